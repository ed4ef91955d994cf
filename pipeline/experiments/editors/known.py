"""The editors by the names under which an experiment runs them."""

from collections.abc import Callable, Sequence
from typing import Any

from gracestream.pipeline.editing import EditConfig
from gracestream.pipeline.experiments.editors.editor import ModelEditor
from gracestream.pipeline.experiments.editors.finetuning import ElasticWeights, FineTuning, PeriodicRetraining
from gracestream.pipeline.experiments.editors.grace import Grace
from gracestream.pipeline.experiments.editors.mend import Mend
from gracestream.pipeline.experiments.editors.predicting import DeferNetwork, MemoryNetwork
from gracestream.pipeline.experiments.editors.rome import Rome
from gracestream.pipeline.model import EditableModel

EditorFactory = Callable[[EditableModel, EditConfig, Sequence[str], dict[str, Any]], ModelEditor]
"""Of the model that it edits, the plan of an editor worker, requests that nobody flagged, and what was chosen of its
`learning_rate` and the like. GRACE has those in its plan."""

EDITOR_REQUIREMENTS: dict[str, Callable[[EditableModel], None]] = {
    "ft": FineTuning.require_editable,
    "ewc": ElasticWeights.require_editable,
    "retrain": PeriodicRetraining.require_editable,
    "mend": Mend.require_editable,
    "rome": Rome.require_editable,
}
"""Of those that cannot edit every model at every layer: raises `EditorError` for such a one."""

EDITOR_FACTORIES: dict[str, EditorFactory] = {
    "grace": lambda model, plan, traffic, _chosen: Grace(model, plan, traffic),
    "ft": lambda model, _plan, _traffic, chosen: FineTuning(model, **chosen),
    "ewc": lambda model, _plan, traffic, chosen: ElasticWeights(model, traffic, **chosen),
    "retrain": lambda model, _plan, _traffic, chosen: PeriodicRetraining(model, **chosen),
    "memory": lambda model, plan, _traffic, chosen: MemoryNetwork(model, seed=plan.seed, **chosen),
    "defer": lambda model, plan, _traffic, chosen: DeferNetwork(model, seed=plan.seed, **chosen),
    "mend": lambda model, plan, _traffic, chosen: Mend(model, seed=plan.seed, **chosen),
    "rome": lambda model, _plan, traffic, chosen: Rome(model, traffic, **chosen),
}
