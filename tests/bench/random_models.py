"""Models with random weights: real architectures and widths, without a download.

They take as long as trained models. This module needs only the packages of the engine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.suffix_pass import check_target
from gracestream.pipeline.model.tasks.base import Limits

FIRST_WORD_ID = 10
"""Smaller token ids may be special tokens."""


class NoWrongTargetError(Exception):
    """The model predicts every candidate target, so none is wrong."""


@dataclass(frozen=True, slots=True)
class RandomModel:
    """An architecture, its edited layer, and candidate targets. The model is wrong about at least one of them."""

    name: str
    build: Callable[[], Any]
    layer: str
    targets: tuple[str, ...]

    def module(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Any:
        """The module, built on its device. The weights are the same each time on one device."""
        device = torch.device(device)
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]), device:
            torch.manual_seed(0)
            module = self.build()
        return module.to(dtype)

    def load(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> EditableModel:
        """The model with an adaptor around its layer."""
        return self.editable(self.module(device, dtype))

    def editable(self, module: Any) -> EditableModel:
        """A module of this architecture with an adaptor around its layer."""
        size = module.get_input_embeddings().num_embeddings
        end = None if module.config.eos_token_id is None else "</s>"
        limits = Limits(default_max_new_tokens=1)
        return EditableModel(module, tokenizer(size, end), self.layer, limits=limits, fingerprint="0" * 64)

    def wrong_target(self, model: EditableModel, tokens: int, seed: int) -> tuple[str, str]:
        """A prompt of `tokens` tokens, and a target that the model does not predict.

        Raises:
            NoWrongTargetError: The model predicts all targets.
        """
        (text,) = texts(model, 1, tokens, seed)
        for target in self.targets:
            _, supervised = model.prepare_correction(text, target)
            with torch.no_grad():
                if not check_target(model.task.logits(supervised)[0], supervised.labels[0])[0].predicts_target:
                    return text, target
        raise NoWrongTargetError(f"{self.name} already predicts all of {', '.join(self.targets)}")


def tokenizer(size: int, end: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word: `w17` is token 17."""
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "</s>": 4}
    words |= {f"w{number}": number for number in range(len(words), size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", eos_token=end, cls_token="[CLS]"
    )


def prompts(model: EditableModel, count: int, tokens: int, seed: int = 0) -> list[Prompt]:
    """Random prompts of `tokens` tokens."""
    generator = np.random.default_rng(seed)
    vocabulary = model.module.get_input_embeddings().num_embeddings
    return [Prompt(tuple(row)) for row in generator.integers(FIRST_WORD_ID, vocabulary, (count, tokens)).tolist()]


def texts(model: EditableModel, count: int, tokens: int, seed: int = 0) -> list[str]:
    """Random texts of `tokens` tokens."""
    return [model.task.tokenizer.decode(prompt.token_ids) for prompt in prompts(model, count, tokens, seed)]


def _bert(**sizes: int) -> Any:
    return BertForSequenceClassification(BertConfig(num_labels=2, **sizes))


def _gpt2(**sizes: int) -> Any:
    """GPT-2 without an end token: with random weights, a value at one position cannot move it to another."""
    return GPT2LMHeadModel(GPT2Config(pad_token_id=0, eos_token_id=None, bos_token_id=2, **sizes))


def _t5(end: int | None = 4, **sizes: int) -> Any:
    """T5 v1.1 small."""
    default_sizes = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
    return T5ForConditionalGeneration(
        T5Config(
            **(default_sizes | sizes), feed_forward_proj="gated-gelu", tie_word_embeddings=False, pad_token_id=0,
            eos_token_id=end, decoder_start_token_id=0,
        )
    )  # fmt: skip


# The layers of the paper (appendix on hyperparameters). GPT2-XL's 36th of 48 blocks becomes the 9th of 12.
BERT = RandomModel("bert-base", _bert, "bert.encoder.layer[10].output.dense", ("1", "0"))
# One token: in a causal model with random weights, a value at the prompt's end hardly affects later tokens.
GPT2 = RandomModel("gpt2-small", _gpt2, "transformer.h[8].mlp.c_fc", ("w17",))
T5 = RandomModel("t5-v1.1-small", _t5, "encoder.block[4].layer[1].DenseReluDense.wo", ("w17 w17",))

TINY = (
    replace(
        BERT, name="bert-tiny", layer="bert.encoder.layer[1].output.dense",
        build=lambda: _bert(
            vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
        ),
    ),
    replace(
        GPT2, name="gpt2-tiny", layer="transformer.h[1].mlp.c_fc", targets=("w17", "w18"),
        build=lambda: _gpt2(vocab_size=300, n_embd=64, n_layer=3, n_head=4),
    ),
    replace(
        T5, name="t5-tiny", layer="encoder.block[0].layer[1].DenseReluDense.wo", targets=("w17", "w18"),
        build=lambda: _t5(None, vocab_size=300, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4),
    ),
)  # fmt: skip
"""Small models of the same three kinds, for rehearsals. This T5 has no end token: its value affects only one token."""


def gpt2_xl(blocks: int = 48) -> RandomModel:
    """GPT2-XL with its real widths and `blocks` blocks, edited after three quarters of them."""
    return replace(
        GPT2,
        name="gpt2-xl" if blocks == 48 else f"gpt2-xl-{blocks}-blocks",
        layer=f"transformer.h[{3 * blocks // 4 - 1}].mlp.c_fc",
        build=lambda: _gpt2(n_embd=1600, n_layer=blocks, n_head=25),
    )
