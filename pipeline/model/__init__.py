"""Models that can be edited: how they are loaded, read, and made to answer with a codebook."""

from gracestream.pipeline.model.adaptor import QueryToken, Replaced, Session, last_token
from gracestream.pipeline.model.batch import Batch, Prompt
from gracestream.pipeline.model.checkpoint import ModelError, device_of, is_causal, load_checkpoint, unreported
from gracestream.pipeline.model.editable import EditableModel, Served
from gracestream.pipeline.model.layers import LayerError, LayerRange, in_decoder, linear_layers, normal_path
from gracestream.pipeline.model.probe_texts import TEXTS
from gracestream.pipeline.model.registry import (
    Report,
    known_layer,
    layer_of,
    minilm_folder,
    naming_known,
    package_folder,
    prepare,
    resolve,
    resolve_encoder,
)
from gracestream.pipeline.model.sentence_encoder import FARTHEST, MARK, REMEDY, UNIT, Encoder
from gracestream.pipeline.model.suffix_pass import Passes, Rest, Verdict, verdict
from gracestream.pipeline.model.tasks.base import Answer, InputError, Limits, Supervised, Task
from gracestream.pipeline.model.tasks.classification import Classification
from gracestream.pipeline.model.tasks.generation import CausalGeneration, Seq2SeqGeneration
from gracestream.pipeline.model.trial import layer_fault

__all__ = [
    "FARTHEST",
    "MARK",
    "REMEDY",
    "TEXTS",
    "UNIT",
    "Answer",
    "Batch",
    "CausalGeneration",
    "Classification",
    "EditableModel",
    "Encoder",
    "InputError",
    "LayerError",
    "LayerRange",
    "Limits",
    "ModelError",
    "Passes",
    "Prompt",
    "QueryToken",
    "Replaced",
    "Report",
    "Rest",
    "Seq2SeqGeneration",
    "Served",
    "Session",
    "Supervised",
    "Task",
    "Verdict",
    "device_of",
    "in_decoder",
    "is_causal",
    "known_layer",
    "last_token",
    "layer_fault",
    "layer_of",
    "linear_layers",
    "load_checkpoint",
    "minilm_folder",
    "naming_known",
    "normal_path",
    "package_folder",
    "prepare",
    "resolve",
    "resolve_encoder",
    "unreported",
    "verdict",
]
