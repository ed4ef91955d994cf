"""MiniLM with a classification head, trained on labelled texts.

The embeddings and the lower layers stay frozen, so their output is computed once for each text.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gracestream.deploy.checkpoints.training import deterministic, digest, reported
from gracestream.pipeline.experiments import tasks
from gracestream.pipeline.model import ProgressCallback, minilm_folder

INTENTS = Path(__file__).parents[1] / "demo" / "intents.jsonl"
"""The demo's utterances with their intents."""

MAX_TOKENS = 512
"""MiniLM's largest number of tokens; longer texts are truncated in training."""

TOGETHER = 8
"""Batches whose texts are sorted by length together, so that little is padded."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The training of a classifier. Its `repr` is part of the checkpoint's name.

    Attributes:
        layers: Number of top layers that are trained with the pooler and the classification head.
        epochs: Passes over all texts.
        learning_rate: Learning rate of AdamW.
        batch: Texts of one step.
        version: Raised when the training changes in a way that the other fields do not show.
    """

    layers: int
    epochs: int
    learning_rate: float
    batch: int = 16
    version: int = 2


INTENT = Recipe(layers=1, epochs=12, learning_rate=5e-4)
SCOTUS = Recipe(layers=2, epochs=8, learning_rate=2e-4)


def intent_folder() -> str:
    """The checkpoint's folder name; it changes with the utterances, so that a model of older ones is not reused."""
    return f"intent-{digest(INTENT, INTENTS.read_bytes())}"


def build_intent(folder: Path, report: ProgressCallback) -> None:
    """Train a classifier on the demo's utterances; the result is the same on every run of a machine, bit for bit."""
    rows = [json.loads(line) for line in INTENTS.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["split"] == "train"]
    _train([row["text"] for row in rows], [row["label"] for row in rows], INTENT, folder, report)


def scotus_folder() -> str:
    """The checkpoint's folder name; it changes with the training cases.

    Raises:
        DataError: the cases are missing or malformed.
    """
    cases = tasks.scotus_training()
    return f"scotus-{digest(SCOTUS, json.dumps([(case.inputs, case.target) for case in cases]).encode())}"


def build_scotus(folder: Path, report: ProgressCallback) -> None:
    """Train a classifier on the issue areas of the Supreme Court's cases up to 1982, relabelled as in the paper."""
    cases = tasks.scotus_training()
    _train([case.inputs for case in cases], [case.target for case in cases], SCOTUS, folder, report, tasks.ISSUE_AREAS)


def _train(
    texts: Sequence[str],
    labels: Sequence[str],
    recipe: Recipe,
    folder: Path,
    report: ProgressCallback,
    names: Sequence[str] = (),
) -> None:
    """Train a classifier and write it into the folder; its classes are `names`, or else the distinct labels."""
    names = list(names) or sorted(set(labels))
    source = minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    with deterministic(seed=0):
        model = AutoModelForSequenceClassification.from_pretrained(
            source,
            dtype=torch.float32,
            trust_remote_code=False,
            id2label=dict(enumerate(names)),
            label2id={name: index for index, name in enumerate(names)},
        )
        model.eval()  # no dropout: the frozen layers must compute in training what they compute in use
        model.requires_grad_(requires_grad=False)
        with _UpperLayers(model, recipe.layers) as upper:
            encoded = [tokenizer(text, truncation=True, max_length=MAX_TOKENS) for text in texts]
            hidden = upper.inputs(reported(encoded, len(encoded), "texts read", report))
            trained = [*upper.layers, model.bert.pooler, model.classifier]
            parameters = [p for module in trained for p in module.requires_grad_(requires_grad=True).parameters()]
            optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.01)
            lengths = [len(one_TX) for one_TX in hidden]
            batches = chain.from_iterable(_batches(lengths, recipe.batch) for _ in range(recipe.epochs))
            steps = recipe.epochs * -(-len(hidden) // recipe.batch)
            for batch in reported(batches, steps, "training steps", report):
                logits = upper.logits([hidden[place] for place in batch])
                targets = torch.tensor([names.index(labels[place]) for place in batch])
                optimizer.zero_grad()
                torch.autograd.backward(cross_entropy(logits, targets, label_smoothing=0.05))
                optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Batches over all texts in random order, of texts of similar length."""
    order = torch.randperm(len(lengths)).tolist()
    for start in range(0, len(order), size * TOGETHER):
        some = sorted(order[start : start + size * TOGETHER], key=lambda place: lengths[place])
        batches = [some[first : first + size] for first in range(0, len(some), size)]
        for number in torch.randperm(len(batches)).tolist():
            yield batches[number]


class _UpperLayers:
    """A context that runs the upper layers of a BERT classifier alone, on stored outputs of the lower layers.

    Its end restores the classifier's layers.
    """

    def __init__(self, model: Any, count: int) -> None:
        self._model, self._encoder = model, model.bert.encoder
        self._all = model.bert.encoder.layer
        self._lower: nn.ModuleList = self._all[: len(self._all) - count]
        self.layers: nn.ModuleList = self._all[len(self._all) - count :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_ended: object) -> None:
        self._encoder.layer = self._all

    def inputs(self, encoded: Iterable[Any]) -> list[Tensor]:
        """The lower layers' output (T, X) for each tokenised text."""
        self._encoder.layer = self._lower
        with torch.no_grad():
            return [
                self._model.bert(input_ids=torch.tensor([text["input_ids"]])).last_hidden_state[0] for text in encoded
            ]

    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """The logits (B, C) of a batch of the lower layers' outputs."""
        self._encoder.layer = self.layers
        mask_BT = nn.utils.rnn.pad_sequence([torch.ones(len(one), dtype=torch.long) for one in hidden], True)
        hidden_BTX = nn.utils.rnn.pad_sequence(list(hidden), True)
        # The model computes embeddings of dummy ids, which the hook replaces by the stored outputs.
        handle = self.layers[0].register_forward_pre_hook(lambda _layer, given: (hidden_BTX, *given[1:]))
        try:
            logits: Tensor = self._model(input_ids=torch.zeros_like(mask_BT), attention_mask=mask_BT).logits
        finally:
            handle.remove()
        return logits
