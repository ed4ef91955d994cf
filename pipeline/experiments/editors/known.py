"""The registry of editors by name (`gracestream experiment --editor`)."""

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
"""Makes an editor from a model, an editor worker's configuration, unflagged requests, and keyword arguments.

The keyword arguments are the editor's own options that the user set, such as `learning_rate`. GRACE ignores them: its
options are in the configuration.
"""

EDITOR_REQUIREMENTS: dict[str, Callable[[EditableModel], None]] = {
    "ft": FineTuning.require_editable,
    "ewc": ElasticWeights.require_editable,
    "retrain": PeriodicRetraining.require_editable,
    "mend": Mend.require_editable,
    "rome": Rome.require_editable,
}
"""Checks of the editors that cannot edit every model at every layer; they raise `EditorError`."""

EDITOR_FACTORIES: dict[str, EditorFactory] = {
    "grace": lambda model, config, traffic, _options: Grace(model, config, traffic),
    "ft": lambda model, _config, _traffic, options: FineTuning(model, **options),
    "ewc": lambda model, _config, traffic, options: ElasticWeights(model, traffic, **options),
    "retrain": lambda model, _config, _traffic, options: PeriodicRetraining(model, **options),
    "memory": lambda model, config, _traffic, options: MemoryNetwork(model, seed=config.seed, **options),
    "defer": lambda model, config, _traffic, options: DeferNetwork(model, seed=config.seed, **options),
    "mend": lambda model, config, _traffic, options: Mend(model, seed=config.seed, **options),
    "rome": lambda model, _config, traffic, options: Rome(model, traffic, **options),
}
"""The editors by name."""
