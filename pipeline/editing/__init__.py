"""GRACE editing: decide on corrections, train their values, and undo them (docs/explanation/method.md).

The package does no I/O: it takes feedback and returns outcomes and deltas. The editor and the history packages connect
it to Kafka.
"""

from gracestream.pipeline.editing.calibration import CalibrationError, LabelledRequest, calibrate_layer
from gracestream.pipeline.editing.candidate import DraftValue, RecordedInputs
from gracestream.pipeline.editing.config import EditConfig, edit_config_from_lead
from gracestream.pipeline.editing.counterfactual import History
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.exceptions import decide_exception
from gracestream.pipeline.editing.forms import make_forms
from gracestream.pipeline.editing.negatives import TEMPLATES_PER_RADIUS, other_requests
from gracestream.pipeline.editing.provenance import describe_environment
from gracestream.pipeline.editing.result import DecisionResult, committed_outcome, make_correction, rejected_result
from gracestream.pipeline.editing.roles import may_propose
from gracestream.pipeline.editing.scope import ScopeRadius
from gracestream.pipeline.editing.undo import undo
from gracestream.pipeline.editing.value_search import FORM_BATCH_SIZE, SHORT_TARGET_TOKENS
from gracestream.pipeline.editing.value_training import ValueTrainingConfig

__all__ = [
    "FORM_BATCH_SIZE",
    "SHORT_TARGET_TOKENS",
    "TEMPLATES_PER_RADIUS",
    "CalibrationError",
    "DecisionResult",
    "DraftValue",
    "EditConfig",
    "EditEngine",
    "History",
    "LabelledRequest",
    "RecordedInputs",
    "ScopeRadius",
    "ValueTrainingConfig",
    "calibrate_layer",
    "committed_outcome",
    "decide_exception",
    "describe_environment",
    "edit_config_from_lead",
    "make_correction",
    "make_forms",
    "may_propose",
    "other_requests",
    "rejected_result",
    "undo",
]
