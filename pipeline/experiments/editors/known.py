"""The editors by the names under which an experiment runs them."""

from collections.abc import Callable, Sequence
from typing import Any

from gracestream.pipeline.editing import Plan
from gracestream.pipeline.experiments.editors.editor import Editor
from gracestream.pipeline.experiments.editors.finetuning import ElasticWeights, FineTuning, Retraining
from gracestream.pipeline.experiments.editors.grace import Grace
from gracestream.pipeline.experiments.editors.mend import Mend
from gracestream.pipeline.experiments.editors.predicting import Defer, Memory
from gracestream.pipeline.experiments.editors.rome import Rome
from gracestream.pipeline.model import EditableModel

Make = Callable[[EditableModel, Plan, Sequence[str], dict[str, Any]], Editor]
"""Of the model that it edits, the plan of an editor worker, requests that nobody flagged, and what was chosen of its
`learning_rate` and the like. GRACE has those in its plan."""

REQUIRE: dict[str, Callable[[EditableModel], None]] = {
    "ft": FineTuning.require,
    "ewc": ElasticWeights.require,
    "retrain": Retraining.require,
    "mend": Mend.require,
    "rome": Rome.require,
}
"""Of those that cannot edit every model at every layer: raises `EditorError` for such a one."""

EDITORS: dict[str, Make] = {
    "grace": lambda model, plan, traffic, _chosen: Grace(model, plan, traffic),
    "ft": lambda model, _plan, _traffic, chosen: FineTuning(model, **chosen),
    "ewc": lambda model, _plan, traffic, chosen: ElasticWeights(model, traffic, **chosen),
    "retrain": lambda model, _plan, _traffic, chosen: Retraining(model, **chosen),
    "memory": lambda model, plan, _traffic, chosen: Memory(model, seed=plan.seed, **chosen),
    "defer": lambda model, plan, _traffic, chosen: Defer(model, seed=plan.seed, **chosen),
    "mend": lambda model, plan, _traffic, chosen: Mend(model, seed=plan.seed, **chosen),
    "rome": lambda model, _plan, traffic, chosen: Rome(model, traffic, **chosen),
}
