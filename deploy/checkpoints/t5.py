"""A T5 of v1.1-small's shape that is taught answers, for those who can reach no hub.

It is trained from random weights, and its tokenizer on the same questions: beyond what it was taught it knows nothing.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from deploy.checkpoints.training import deterministic, digest
from pipeline.experiments import tasks
from pipeline.experiments.tasks import Example

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How it is trained; `version` is raised when that changes what comes out in a way not told here.

    Attributes:
        words: Of the vocabulary.
        epochs: Passes over all questions, at most.
        enough: Mean loss of a token; where that of no batch is higher, it ends.
        learning_rate: Of AdamW, which falls to nothing.
    """

    words: int = 8192
    epochs: int = 30
    enough: float = 0.01
    learning_rate: float = 3e-4
    batch: int = 16
    version: int = 1


T5 = Recipe()


def t5_folder() -> str:
    """A name that changes with what it is taught.

    Raises:
        DataError: the data are not there.
    """
    return f"t5-{digest(T5, json.dumps([(one.inputs, one.target) for one in tasks.zsre_training()]).encode())}"


def build_t5(folder: Path) -> None:
    """Trained on the questions that zsRE's experiment retains."""
    taught = tasks.zsre_training()
    tokenizer = _tokenizer([text for one in taught for text in (one.inputs, one.target)])
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
        _teach(model, tokenizer, taught, T5)
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


def _teach(model: Any, tokenizer: Any, taught: Sequence[Example], recipe: Recipe) -> None:
    """Train until no batch of a pass has a higher loss than is enough, or for so many passes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    steps = recipe.epochs * -(-len(taught) // recipe.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    model.train()
    for _ in range(recipe.epochs):
        worst = 0.0
        for batch in _batches(taught, recipe.batch):
            encoded = tokenizer([one.inputs for one in batch], padding=True, return_tensors="pt")
            answers = tokenizer([one.target for one in batch], padding=True, return_tensors="pt")
            labels = answers.input_ids.masked_fill(answers.attention_mask == 0, -100)
            said = model(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask, labels=labels)
            worst = max(worst, said.loss.item())
            optimizer.zero_grad()
            said.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if worst < recipe.enough:
            break
    model.eval()


def _batches(taught: Sequence[Example], size: int) -> Iterator[list[Example]]:
    """All of them once, in an order of no meaning."""
    order = torch.randperm(len(taught)).tolist()
    for start in range(0, len(order), size):
        yield [taught[place] for place in order[start : start + size]]
