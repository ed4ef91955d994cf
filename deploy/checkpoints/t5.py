"""A T5 of v1.1-small's shape that is taught answers, for those who can reach no hub.

It is trained from random weights: beyond the questions that it is taught it knows nothing but names, which it learns to
write from parts of them, as pretraining on text would have taught it. Without these it could not be edited to say one.
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


@dataclass(frozen=True, slots=True)
class Recipe:
    """How it is trained; `version` is raised when that changes what comes out in a way not told here.

    Attributes:
        words: Of the vocabulary.
        epochs: Passes over all questions.
        learning_rate: Of AdamW, which falls to nothing.
        batch: Questions of a step.
        names: Names of a step.
        kept: How many of a name's words it is shown, as a share.
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
    """A name that changes with what it is taught.

    Raises:
        DataError: the data are not there.
    """
    taught = [(one.inputs, one.target) for one in tasks.zsre_training()]
    return f"t5-{digest(T5, json.dumps([taught, tasks.answer_names()]).encode())}"


def build_t5(folder: Path, report: ProgressCallback) -> None:
    """Trained on the questions that zsRE's experiment retains, and on the names that answers are."""
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
        model.lm_head.weight.data.mul_(model.config.d_model**-0.5)  # else the first losses are some 25, and last long
        _teach(model, tokenizer, taught, names, T5, report)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Pairs of bytes, so that it takes any text."""
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
    """Train on all questions so many times, and in each step on some names, of which only some words are shown."""
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
    encoded = tokenizer([one.inputs for one in batch], padding=True, return_tensors="pt")
    answers = tokenizer([one.target for one in batch], padding=True, return_tensors="pt")
    labels = answers.input_ids.masked_fill(answers.attention_mask == 0, -100)
    return model(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask, labels=labels).loss


def _part(name: str, kept: float) -> str:
    """Some of its words, in their order; of a single one, this."""
    words = name.split()
    shown = torch.rand(len(words)) < kept
    shown[torch.randint(len(words), ())] = True
    return " ".join(compress(words, shown))


def _batches(all_of_them: Sequence[T], size: int) -> Iterator[list[T]]:
    """All of them once, in an order of no meaning."""
    order = torch.randperm(len(all_of_them)).tolist()
    for start in range(0, len(order), size):
        yield [all_of_them[place] for place in order[start : start + size]]
