"""The editors by the names under which an experiment runs them."""

from collections.abc import Callable, Sequence

from pipeline.experiments.editors.editor import Editor
from pipeline.experiments.editors.finetuning import ElasticWeights, FineTuning, Retraining
from pipeline.experiments.editors.grace import Grace
from pipeline.model import EditableModel
from pipeline.plan import Plan

EDITORS: dict[str, Callable[[EditableModel, Plan, Sequence[str]], Editor]] = {
    "grace": Grace,
    "ft": lambda model, _plan, _traffic: FineTuning(model),
    "ewc": lambda model, _plan, traffic: ElasticWeights(model, traffic),
    "retrain": lambda model, _plan, _traffic: Retraining(model),
}
"""Each is made of the model that it edits, the plan of an editor worker, and requests that nobody flagged."""
