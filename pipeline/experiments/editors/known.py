"""The editors by the names under which an experiment runs them."""

from collections.abc import Callable, Sequence

from pipeline.experiments.editors.editor import Editor
from pipeline.experiments.editors.finetuning import ElasticWeights, FineTuning, Retraining
from pipeline.experiments.editors.grace import Grace
from pipeline.experiments.editors.mend import Mend
from pipeline.experiments.editors.predicting import Defer, Memory
from pipeline.experiments.editors.rome import Rome
from pipeline.model import EditableModel
from pipeline.plan import Plan

EDITORS: dict[str, Callable[[EditableModel, Plan, Sequence[str]], Editor]] = {
    "grace": Grace,
    "ft": lambda model, _plan, _traffic: FineTuning(model),
    "ewc": lambda model, _plan, traffic: ElasticWeights(model, traffic),
    "retrain": lambda model, _plan, _traffic: Retraining(model),
    "memory": lambda model, plan, _traffic: Memory(model, seed=plan.seed),
    "defer": lambda model, plan, _traffic: Defer(model, seed=plan.seed),
    "mend": lambda model, plan, _traffic: Mend(model, seed=plan.seed),
    "rome": lambda model, _plan, traffic: Rome(model, traffic),
}
"""Each is made of the model that it edits, the plan of an editor worker, and requests that nobody flagged."""
