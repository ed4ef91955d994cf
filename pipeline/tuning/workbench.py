"""One checkpoint, wrapped at several layers with several kinds of query at once, for trial edits.

1. Weights are loaded once; queries of all layers and kinds come from one pass over a prompt.
2. An answer depends on its prompt and the value in place, not on the query or the radius, so each is generated once.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from msgspec import UNSET

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model import (
    Answer,
    Classification,
    EditableModel,
    Encoder,
    InputError,
    LayerError,
    Limits,
    Prompt,
    QueryToken,
    Replaced,
    Session,
    Task,
    in_decoder,
    layer_fault,
    normal_path,
)
from gracestream.schemas.messages import Inputs, Parameters

BATCH = 16

ENCODER = "encoder"

NAME = "trial edits"
"""In place of a fingerprint: no codebook of trial edits is ever published."""

Query = tuple[str, str]
"""A layer and a kind of query."""


class WorkbenchError(UserError):
    """No layer can be tried; the text says why for each."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is loaded once."""

    module: Any
    tokenizer: Any
    limits: Limits
    replace: Replaced | None = None
    encoder: Encoder | None = None


@dataclass(slots=True)
class Workbench:
    """The wrapped models by layer and kind of query, and why some layers cannot be tried."""

    models: dict[str, dict[str, EditableModel]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint, layers: Sequence[str]) -> "Workbench":
        """Wrap each of the layers that can be edited.

        Raises:
            WorkbenchError: none can.
        """
        made = cls()
        for layer in dict.fromkeys(map(normal_path, layers)):
            try:
                made.models[layer] = _wrapped(checkpoint, layer)
            except LayerError as error:
                made.faults[layer] = str(error)
        if not made.models:
            reasons = "; ".join(f"{layer}: {fault}" for layer, fault in made.faults.items())
            raise WorkbenchError(f"no layer can be tried ({reasons or 'none is known'}); name some with --layer")
        return made

    @property
    def task(self) -> Task:
        """The model's task."""
        return self.any_model.task

    @property
    def any_model(self) -> EditableModel:
        """A wrapped model; its tokenizer and unedited answers are those of all of them."""
        return next(iter(next(iter(self.models.values())).values()))

    def queries(self, prompts: Sequence[Prompt]) -> dict[Query, dict[Prompt, np.ndarray]]:
        """The query (D) of each prompt at every layer, of every kind."""
        found: dict[Query, dict[Prompt, np.ndarray]] = {
            (layer, kind): {} for layer, kinds in self.models.items() for kind in kinds
        }
        order = sorted(dict.fromkeys(prompts), key=len)
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            for query, rows in self._seen(some).items():
                found[query].update(zip(some, rows, strict=True))
        return found

    def _seen(self, prompts: Sequence[Prompt]) -> dict[Query, np.ndarray]:
        """Queries of one batch (B, D)."""
        sessions: dict[Query, Session] = {}
        with torch.inference_mode(), ExitStack() as opened:
            for layer, kinds in self.models.items():
                for kind, model in kinds.items():
                    if kind != ENCODER:
                        predicting = model.adaptor.predicting(model.task.batch(prompts), lambda _queries: None)
                        sessions[layer, kind] = opened.enter_context(predicting)
            self.task.observe(self.task.batch(prompts))
        seen = {query: session.queries_BD.cpu().numpy() for query, session in sessions.items()}
        encoded = next((kinds[ENCODER] for kinds in self.models.values() if ENCODER in kinds), None)
        if encoded is not None:
            rows = encoded.queries(prompts).cpu().numpy()  # the same at every layer
            seen |= {(layer, ENCODER): rows for layer in self.models}
        return seen


def _wrapped(checkpoint: Checkpoint, layer: str) -> dict[str, EditableModel]:
    """The layer with each kind of query that can tell prompts apart there.

    Raises:
        LayerError: it cannot be edited.
    """
    own = _at(checkpoint, layer)
    if (fault := layer_fault(own.task, own.adaptor)) is not None:
        own.adaptor.remove()
        raise LayerError(fault)
    found = {own.adaptor.query: own}
    if not (checkpoint.module.config.is_encoder_decoder and in_decoder(layer)):
        found["mean"] = _at(checkpoint, layer, query="mean")
    seeing: dict[str, EditableModel] = {kind: model for kind, model in found.items() if not model.is_blind()}
    if checkpoint.encoder is not None:
        return {ENCODER: _at(checkpoint, layer, encoder=checkpoint.encoder), **seeing}
    if not seeing:
        raise LayerError("no token has seen the rest of a prompt there: an edit would reach every prompt")
    return seeing


def _at(
    checkpoint: Checkpoint, layer: str, query: QueryToken | None = None, encoder: Encoder | None = None
) -> EditableModel:
    return EditableModel(
        checkpoint.module, checkpoint.tokenizer, layer, limits=checkpoint.limits, replace=checkpoint.replace,
        query=query, encoder=encoder, fingerprint=NAME,
    )  # fmt: skip


class Answers:
    """Answers of one checkpoint, unedited and with values in place."""

    def __init__(self, task: Task, tokens: int) -> None:
        """Answers have so many tokens at most, where the task generates."""
        self._task = task
        self.parameters = Parameters() if isinstance(task, Classification) else Parameters(max_new_tokens=tokens)
        self._unedited: dict[Prompt, str] = {}
        self._edited: dict[tuple[str, Prompt, bytes], Answer] = {}

    def taken(self, inputs: Inputs) -> bool:
        """Whether the model can answer these inputs."""
        return self.why_not(inputs) is None

    def why_not(self, inputs: Inputs) -> str | None:
        """Why the model cannot answer these inputs; None: it can."""
        try:
            self._task.admit(self._task.tokenize(inputs), self.parameters)
        except InputError as error:
            return str(error)
        return None

    def unedited(self, prompts: Sequence[Prompt]) -> list[str]:
        """The unedited model's answer to each."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._unedited]
        for some in _batches(new):
            with torch.inference_mode():
                answers = self._task.run(self._task.batch(some), [self.parameters] * len(some))
            self._unedited.update((prompt, said(answer)) for prompt, answer in zip(some, answers, strict=True))
        return [self._unedited[prompt] for prompt in prompts]

    def edited(self, model: EditableModel, asked: Sequence[tuple[Prompt, np.ndarray]]) -> list[Answer]:
        """The answer to each prompt with a value (V) in place at the model's layer."""
        keys = [(model.layer, prompt, value_V.tobytes()) for prompt, value_V in asked]
        values = dict(zip(keys, (value_V for _, value_V in asked), strict=True))
        new = [key for key in values if key not in self._edited]
        new.sort(key=lambda key: len(key[1]))
        for start in range(0, len(new), BATCH):
            some = new[start : start + BATCH]
            answers = self._run(model, [prompt for _, prompt, _ in some], np.stack([values[key] for key in some]))
            self._edited.update(zip(some, answers, strict=True))
        return [self._edited[key] for key in keys]

    def _run(self, model: EditableModel, prompts: Sequence[Prompt], values_BV: np.ndarray) -> list[Answer]:
        """The answers of one batch."""
        batch = model.task.batch(prompts)
        in_place = torch.ones(len(prompts), dtype=torch.bool), torch.from_numpy(values_BV)
        with torch.inference_mode(), model.adaptor.predicting(batch, lambda _queries: in_place):
            return model.task.run(batch, [self.parameters] * len(prompts))


def said(answer: Answer) -> str:
    """An answer as text: a classifier's is its label."""
    return answer.outputs.text if answer.outputs.text is not UNSET else str(answer.outputs.label)


def _batches(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Prompts of similar length together."""
    order = sorted(prompts, key=len)
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
