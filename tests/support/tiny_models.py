"""Tiny models with random weights, and codebooks made by hand: real parts, small enough for every test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec import UNSET
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from gracestream.pipeline.codebook.codebook import AppliedDelta, Codebook, Label
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.tasks.base import Limits
from gracestream.schemas.deltas import Cause, Delta, EntryChange, Op, Tensor, seal_delta
from gracestream.schemas.messages import Inputs, Outcome

WORDS = sorted({word for text in PROBE_TEXTS for word in text.split()})
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "</s>"]
CHAT = "{% for message in messages %}{{ message.content }} </s> {% endfor %}"
"""A chat template: a control token after each message."""

LIMITS = Limits(max_input_tokens=48, max_target_tokens=6, default_max_new_tokens=6)
CODEBOOK, MODEL, LAYER = "default", "f" * 64, "layer.0"

torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of model: its builder, and the layer that the tests edit, in the paper's notation."""

    build: Callable[[], Any]
    layer: str
    special_tokens: str = ""


def tokenizer(template: str = "", **names: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word of the probe sentences."""
    vocabulary = {word: index for index, word in enumerate([*SPECIALS, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template == "bert":
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        columns = ["input_ids", "token_type_ids", "attention_mask"]
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "model_input_names": columns}
    elif template == "t5":
        backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 4)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", eos_token="</s>", **names
    )


SIZE, END = len(SPECIALS) + len(WORDS), SPECIALS.index("</s>")


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.15, pad_token_id=0,
            bos_token_id=2, eos_token_id=END,
        )
    )  # fmt: skip


def gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=SIZE, n_embd=64, n_layer=3, n_head=4, n_positions=64, initializer_range=0.2,
            bos_token_id=2, eos_token_id=END, tie_word_embeddings=False,
        )
    )  # fmt: skip


def t5() -> Any:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=SIZE, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_decoder_layers=3, num_heads=4,
            pad_token_id=0, eos_token_id=END, decoder_start_token_id=0, initializer_factor=1.5,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def bert() -> Any:
    names = ["wrong", "right", "neither", "both"]
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=SIZE, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=64, initializer_range=0.3, pad_token_id=0,
            id2label=dict(enumerate(names)), label2id={name: index for index, name in enumerate(names)},
        )
    )  # fmt: skip


KINDS: dict[str, Kind] = {
    "llama": Kind(llama, "model.layers[1].mlp.down_proj"),
    "gpt2": Kind(gpt2, "transformer.h[1].mlp.c_proj.weight"),
    "t5-encoder": Kind(t5, "encoder.block[1].layer[1].DenseReluDense.wo", "t5"),
    "t5-decoder": Kind(t5, "decoder.block[1].layer[2].DenseReluDense.wo.weight", "t5"),
    "bert": Kind(bert, "bert.encoder.layer[1].output.dense", "bert"),
}


def editable(
    kind: str,
    layer: str | None = None,
    seed: int = 0,
    limits: Limits = LIMITS,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    chat_template: str | None = None,
    **adaptor: Any,
) -> EditableModel:
    """A model of a kind with an adaptor. Equal seeds give equal weights; the global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = KINDS[kind].build()
    if (lm_head := model.get_output_embeddings()) is not None:
        lm_head.weight.data[END] *= 4  # so that a value can make it end its answer, as trained models do
    return EditableModel(
        model.to(device, dtype),
        tokenizer(KINDS[kind].special_tokens, chat_template=chat_template),
        layer or KINDS[kind].layer,
        limits=limits,
        fingerprint=MODEL,
        **adaptor,
    )


def correct(
    engine: EditEngine, feedback_id: str, inputs: Inputs, target: str, offset: int = 0
) -> tuple[Outcome, bytes | None]:
    """Correct one input and apply the decision; returns the outcome, and the delta if there is one."""
    edited = engine.edit(make_correction(feedback_id, inputs, target), offset)
    assert edited.outcome is not None
    if edited.delta_record is not None:
        engine.apply(edited.delta_record)
    return edited.outcome, edited.delta_record


def added(
    entry_id: str, key: Sequence[float] | np.ndarray, radius: float, label: Label = (0,), value: Any = None
) -> EntryChange:
    """A new entry; its value is its key unless given."""
    return EntryChange(
        entry_id=entry_id,
        key=Tensor.from_array(np.asarray(key)),
        value=Tensor.from_array(np.asarray(key if value is None else value)),
        radius=radius,
        label=label,
    )


def sealed(
    codebook: Codebook, /, *entries: EntryChange, op: Op = "add", cause: Cause | None = None, **fields: Any
) -> bytes:
    """The next delta of `codebook`; `fields` override those of the delta."""
    usual: dict[str, Any] = {
        "v": 1,
        "codebook": codebook.name,
        "model": codebook.model,
        "layer": codebook.layer,
        "term": codebook.term + (op == "lead"),
        "seq": codebook.seq + 1,
    }
    if cause is not None:
        usual["cause"] = cause
    return seal_delta(Delta(op=op, entries=entries, digest=b"", **(usual | fields)), codebook.digest)[0]


def new_codebook(model: str = MODEL, layer: str = LAYER) -> Codebook:
    """An empty codebook in its first term."""
    codebook = Codebook(CODEBOOK, model, layer)
    codebook.apply(sealed(codebook, op="lead"))
    return codebook


def changed(codebook: Codebook, *entries: EntryChange, op: Op = "add") -> AppliedDelta:
    """Apply the next delta with these changes; returns the applied delta."""
    applied = codebook.apply(sealed(codebook, *entries, op=op))
    assert applied is not None
    return applied


def filled(keys_ND: np.ndarray, radii: float | np.ndarray = 1.0) -> Codebook:
    """A codebook with one entry per key, in order."""
    codebook = new_codebook()
    radii_N = np.broadcast_to(radii, len(keys_ND)).tolist()
    entries = [added(f"e{row}", keys_ND[row], radius) for row, radius in enumerate(radii_N)]
    codebook.apply(sealed(codebook, *entries))
    return codebook


def index_of(codebook: Codebook) -> KeyIndex:
    return KeyIndex(codebook, torch.device("cpu"))


def texts(count: int, seed: int = 0, shortest: int = 2, longest: int = 12) -> list[str]:
    """Different texts of the tiny vocabulary, of different lengths."""
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, int(generator.integers(shortest, longest + 1)))) for _ in range(count)]


def with_radius(codebook: Codebook, entry_id: str, radius: float, value: np.ndarray | None = None) -> bytes:
    """The delta that gives an entry another radius, and another value if given."""
    change = EntryChange(entry_id=entry_id, radius=radius, value=UNSET if value is None else Tensor.from_array(value))
    return sealed(codebook, change, op="split")


class Failing(torch.nn.Module):
    """Raises `error` for batches of more than `room` rows."""

    def __init__(self, inner: torch.nn.Module, error: Exception, room: int) -> None:
        super().__init__()
        self.inner, self.error, self.room = inner, error, room
        self.batches: list[int] = []

    def forward(self, hidden_BTD: torch.Tensor) -> Any:
        self.batches.append(len(hidden_BTD))
        if len(hidden_BTD) > self.room:
            raise self.error
        return self.inner(hidden_BTD)
