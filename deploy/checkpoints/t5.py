"""A T5 with the shape of v1.1-small, trained on questions and answers, for machines without access to a model hub.

It is trained from random weights and knows the questions of its training only. It also learns to complete names from
some of their words, as pretraining on text would teach it. Without this task no edit could make it generate a new name.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from gracestream.deploy.checkpoints.training import deterministic, digest, reported
from gracestream.pipeline.experiments import tasks
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import ProgressCallback

T = TypeVar("T")

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
"""The special tokens, as in T5."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The training of the model. Its `repr` is part of the checkpoint's name.

    Attributes:
        words: Size of the vocabulary.
        epochs: Passes over all questions.
        learning_rate: Initial learning rate of AdamW; it falls linearly to 0.
        batch: Questions of one step.
        names: Names of one step.
        kept: Probability that a word of a name is part of the input.
        version: Raised when the training changes in a way that the other fields do not show.
    """

    words: int = 8192
    epochs: int = 24
    learning_rate: float = 3e-4
    batch: int = 16
    names: int = 64
    kept: float = 0.5
    version: int = 2


T5 = Recipe()


def t5_folder() -> str:
    """The checkpoint's folder name; it changes with the training data.

    Raises:
        DataError: the data are missing or malformed.
    """
    taught = [(one.inputs, one.target) for one in tasks.zsre_training()]
    return f"t5-{digest(T5, json.dumps([taught, tasks.answer_names()]).encode())}"


def build_t5(folder: Path, report: ProgressCallback) -> None:
    """Train the model on the retained questions of zsRE's experiment and on the names among the answers."""
    taught, names = tasks.zsre_training(), tasks.answer_names()
    tokenizer = _tokenizer([*(one.inputs for one in taught), *names])
    with deterministic(seed=0):
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=len(tokenizer), d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_heads=6,
                feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0,
                pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
                decoder_start_token_id=tokenizer.pad_token_id,
            )
        )  # fmt: skip
        model.lm_head.weight.data.mul_(
            model.config.d_model**-0.5
        )  # otherwise training starts at a loss of about 25, and stays there for long
        _teach(model, tokenizer, taught, names, T5, report)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=T5.words,
        special_tokens=[PAD, END, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A $B {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=512
    )


def _teach(
    model: Any,
    tokenizer: Any,
    taught: Sequence[Example],
    names: Sequence[str],
    recipe: Recipe,
    report: ProgressCallback,
) -> None:
    """Train on all questions for the recipe's epochs, and in each step on completing some names from their parts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    steps = recipe.epochs * -(-len(taught) // recipe.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    questions = chain.from_iterable(_batches(taught, recipe.batch) for _ in range(recipe.epochs))
    endless = chain.from_iterable(_batches(names, recipe.names) for _ in count())
    model.train()
    for asked, named in reported(zip(questions, endless, strict=False), steps, "training steps", report):
        optimizer.zero_grad()
        _loss(model, tokenizer, asked).backward()
        _loss(model, tokenizer, [Example(_part(name, recipe.kept), name) for name in named]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def _loss(model: Any, tokenizer: Any, batch: Sequence[Example]) -> Any:
    """The mean cross entropy of the targets' tokens; padding is masked with -100."""
    encoded = tokenizer([one.inputs for one in batch], padding=True, return_tensors="pt")
    answers = tokenizer([one.target for one in batch], padding=True, return_tensors="pt")
    labels = answers.input_ids.masked_fill(answers.attention_mask == 0, -100)
    return model(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask, labels=labels).loss


def _part(name: str, kept: float) -> str:
    """A random part of the name's words, in order, with at least one word."""
    words = name.split()
    shown = torch.rand(len(words)) < kept
    shown[torch.randint(len(words), ())] = True
    return " ".join(compress(words, shown))


def _batches(all_of_them: Sequence[T], size: int) -> Iterator[list[T]]:
    """Batches over all items in random order."""
    order = torch.randperm(len(all_of_them)).tolist()
    for start in range(0, len(order), size):
        yield [all_of_them[place] for place in order[start : start + size]]
