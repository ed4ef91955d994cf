"""GRACE editing: decides on corrections, trains their values, and undoes them. It knows no Kafka."""

from gracestream.pipeline.editing.calibration import CalibrationError, Sample, calibrate_layer
from gracestream.pipeline.editing.candidate import Again, Ahead
from gracestream.pipeline.editing.config import Plan, plan_of
from gracestream.pipeline.editing.counterfactual import History
from gracestream.pipeline.editing.engine import AT_ONCE, SHORT, EditEngine
from gracestream.pipeline.editing.exceptions import except_from
from gracestream.pipeline.editing.forms import forms_of
from gracestream.pipeline.editing.negatives import COUNT, other_requests
from gracestream.pipeline.editing.no_change import Fruitless, fruitless_in
from gracestream.pipeline.editing.provenance import environment
from gracestream.pipeline.editing.result import Edited, committed_outcome, correction, rejected
from gracestream.pipeline.editing.roles import may_propose
from gracestream.pipeline.editing.scope import ScopeRadius
from gracestream.pipeline.editing.undo import undo
from gracestream.pipeline.editing.value_training import Recipe

__all__ = [
    "AT_ONCE",
    "COUNT",
    "SHORT",
    "Again",
    "Ahead",
    "CalibrationError",
    "EditEngine",
    "Edited",
    "Fruitless",
    "History",
    "Plan",
    "Recipe",
    "Sample",
    "ScopeRadius",
    "calibrate_layer",
    "committed_outcome",
    "correction",
    "environment",
    "except_from",
    "forms_of",
    "fruitless_in",
    "may_propose",
    "other_requests",
    "plan_of",
    "rejected",
    "undo",
]
