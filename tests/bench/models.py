"""The models that speed is measured on: three architectures with random weights, and two checkpoints that people use.

Random weights take as long as trained ones; they need no download.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

from pipeline.batch import Prompt
from pipeline.experiments.data import CounterFactRow, QuestionRow, ZsreRow, rows_of
from pipeline.experiments.tasks import COUNTERFACT, NQ, ZSRE
from pipeline.model import EditableModel
from pipeline.settings import load_settings
from pipeline.tasks import Limits
from tests.bench.framework import BenchError, Options
from workers.boot import load_model

FIRST_WORD = 10
"""Token ids below are special, or may be."""

TOKENS = 20
"""Of a prompt for a model of random weights."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure on, its layer that is edited, and whether it is trained: texts mean something to it then."""

    name: str
    load: Callable[[], EditableModel]
    trained: bool = False

    def asked(self, model: EditableModel, count: int) -> list[Prompt]:
        """Prompts as it is asked them: of a trained model questions of people's, else `TOKENS` random tokens.

        Raises:
            DataError: there are no questions at hand.
            BenchError: there are not so many.
        """
        if not self.trained:
            return self.prompts(model, count, TOKENS, seed=1)
        texts = questions()
        if len(texts) < count:
            raise BenchError(f"{count} questions are wanted, and there are {len(texts)}")
        return [model.task.tokenize(text) for text in texts[:count]]

    def prompts(self, model: EditableModel, count: int, tokens: int, seed: int = 0) -> list[Prompt]:
        """Random prompts of so many tokens."""
        generator = np.random.default_rng(seed)
        most = model.module.get_input_embeddings().num_embeddings
        return [Prompt(tuple(row)) for row in generator.integers(FIRST_WORD, most, (count, tokens)).tolist()]


def questions() -> list[str]:
    """Questions and beginnings of sentences as people write them, each once, in an order of no meaning.

    Raises:
        DataError: the data are not there.
    """
    texts = {row.question for row in rows_of(NQ, QuestionRow)}
    texts |= {text for row in rows_of(ZSRE, ZsreRow) for text in (row.src, row.rephrase)}
    texts |= {row.prompt for row in rows_of(COUNTERFACT, CounterFactRow)}
    ordered = sorted(texts)
    random.Random(0).shuffle(ordered)
    return ordered


def _tokenizer(size: int, end: str | None) -> PreTrainedTokenizerFast:
    """One token a word: `w17` is token 17."""
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "</s>": 4}
    words |= {f"w{number}": number for number in range(len(words), size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", eos_token=end, cls_token="[CLS]"
    )


def _built(build: Callable[[], Any], layer: str) -> EditableModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
    size = model.get_input_embeddings().num_embeddings
    end = None if model.config.eos_token_id is None else "</s>"
    return EditableModel(model, _tokenizer(size, end), layer, limits=Limits(max_new_tokens=1), fingerprint="0" * 64)


def _bert() -> Any:
    return BertForSequenceClassification(BertConfig(num_labels=2))


def _gpt2() -> Any:
    """Without an end token: in a model of random weights no value at one position makes it come at another."""
    return GPT2LMHeadModel(GPT2Config(pad_token_id=0, eos_token_id=None, bos_token_id=2))


def _t5() -> Any:
    """T5 v1.1 small."""
    return T5ForConditionalGeneration(
        T5Config(
            d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu",
            tie_word_embeddings=False, pad_token_id=0, eos_token_id=4, decoder_start_token_id=0,
        )
    )  # fmt: skip


def _known(name: str) -> EditableModel:
    return load_model(load_settings(model=name, device="cpu", max_new_tokens=1))


# The paper's layers (appendix on hyperparameters); of GPT2-XL's 36th of 48 blocks, the 9th of 12.
SUBJECTS = (
    Subject("bert-base", lambda: _built(_bert, "bert.encoder.layer[10].output.dense")),
    Subject("gpt2-small", lambda: _built(_gpt2, "transformer.h[8].mlp.c_fc")),
    Subject("t5-v1.1-small", lambda: _built(_t5, "encoder.block[4].layer[1].DenseReluDense.wo")),
    Subject("smollm2", lambda: _known("smollm2"), trained=True),
    Subject("minilm", lambda: _known("intent"), trained=True),
)


def subjects(options: Options, some: Sequence[Subject]) -> Sequence[Subject]:
    """Those of some models that are to be measured.

    Raises:
        BenchError: none of them has the name that is asked for.
    """
    found = [subject for subject in some if options.only in ("", subject.name)]
    if not found:
        raise BenchError(f"{options.only!r} is not measured here; {', '.join(subject.name for subject in some)} are")
    return found
