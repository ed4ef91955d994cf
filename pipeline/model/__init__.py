"""Editable models: checkpoints, layers, tasks and the adaptor, up to answers served with a codebook's edits."""

from gracestream.pipeline.model.adaptor import AdaptorPass, QueryToken, ReplacedTokens, last_token_positions
from gracestream.pipeline.model.batch import Batch, LastTurn, Prompt
from gracestream.pipeline.model.checkpoint import (
    ModelError,
    is_causal,
    load_checkpoint,
    resolve_device,
    suppress_load_warnings,
)
from gracestream.pipeline.model.editable import ENCODER_REQUIRED, EditableModel, ServedAnswer
from gracestream.pipeline.model.engines.base import (
    AnswerEngine,
    CodebookView,
    EngineRequest,
    Finished,
    describe_failure,
)
from gracestream.pipeline.model.engines.choose import EngineName, make_engine
from gracestream.pipeline.model.layers import LayerError, RepeatedLayer, is_in_decoder, linear_layers, normalize_path
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.registry import (
    ProgressCallback,
    default_layer,
    ensure_model_built,
    minilm_folder,
    package_folder,
    resolve_encoder,
    resolve_layer,
    resolve_model,
    suggest_known_models,
)
from gracestream.pipeline.model.sentence_encoder import (
    ENCODER_DEFAULT_RADIUS,
    ENCODER_MAX_RADIUS,
    ENCODER_REMEDY,
    PROMPT_HASH_NORM,
    SentenceEncoder,
)
from gracestream.pipeline.model.suffix_pass import SuffixPass, SuffixRunner, TargetCheck, check_target
from gracestream.pipeline.model.tasks.base import InputError, Limits, ModelAnswer, ModelTask, TargetPass
from gracestream.pipeline.model.tasks.causal import CausalGeneration
from gracestream.pipeline.model.tasks.classification import Classification
from gracestream.pipeline.model.tasks.seq2seq import Seq2SeqGeneration
from gracestream.pipeline.model.trial import layer_fault

__all__ = [
    "ENCODER_DEFAULT_RADIUS",
    "ENCODER_MAX_RADIUS",
    "ENCODER_REMEDY",
    "ENCODER_REQUIRED",
    "PROBE_TEXTS",
    "PROMPT_HASH_NORM",
    "AdaptorPass",
    "AnswerEngine",
    "Batch",
    "CausalGeneration",
    "Classification",
    "CodebookView",
    "EditableModel",
    "EngineName",
    "EngineRequest",
    "Finished",
    "InputError",
    "LastTurn",
    "LayerError",
    "Limits",
    "ModelAnswer",
    "ModelError",
    "ModelTask",
    "ProgressCallback",
    "Prompt",
    "QueryToken",
    "RepeatedLayer",
    "ReplacedTokens",
    "SentenceEncoder",
    "Seq2SeqGeneration",
    "ServedAnswer",
    "SuffixPass",
    "SuffixRunner",
    "TargetCheck",
    "TargetPass",
    "check_target",
    "default_layer",
    "describe_failure",
    "ensure_model_built",
    "is_causal",
    "is_in_decoder",
    "last_token_positions",
    "layer_fault",
    "linear_layers",
    "load_checkpoint",
    "make_engine",
    "minilm_folder",
    "normalize_path",
    "package_folder",
    "resolve_device",
    "resolve_encoder",
    "resolve_layer",
    "resolve_model",
    "suggest_known_models",
    "suppress_load_warnings",
]
