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
    AdaptorPass,
    Classification,
    EditableModel,
    InputError,
    LayerError,
    Limits,
    ModelAnswer,
    ModelTask,
    Prompt,
    QueryToken,
    ReplacedTokens,
    SentenceEncoder,
    is_in_decoder,
    layer_fault,
    normalize_path,
)
from gracestream.schemas.messages import Inputs, Parameters

TRIAL_BATCH_SIZE = 16

ENCODER_QUERY = "encoder"

TRIAL_FINGERPRINT = "trial edits"
"""In place of a fingerprint: no codebook of trial edits is ever published."""

QuerySource = tuple[str, str]
"""A layer and a kind of query."""


class WorkbenchError(UserError):
    """No layer can be tried; the text says why for each."""


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What is loaded once."""

    module: Any
    tokenizer: Any
    limits: Limits
    replace: ReplacedTokens | None = None
    encoder: SentenceEncoder | None = None


@dataclass(slots=True)
class Workbench:
    """The wrapped models by layer and kind of query, and why some layers cannot be tried."""

    models: dict[str, dict[str, EditableModel]] = field(default_factory=dict)
    layer_errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def wrap_layers(cls, checkpoint: LoadedCheckpoint, layers: Sequence[str]) -> "Workbench":
        """Wrap each of the layers that can be edited.

        Raises:
            WorkbenchError: none can.
        """
        made = cls()
        for layer in dict.fromkeys(map(normalize_path, layers)):
            try:
                made.models[layer] = _wrap_layer(checkpoint, layer)
            except LayerError as error:
                made.layer_errors[layer] = str(error)
        if not made.models:
            reasons = "; ".join(f"{layer}: {fault}" for layer, fault in made.layer_errors.items())
            raise WorkbenchError(f"no layer can be tried ({reasons or 'none is known'}); name some with --layer")
        return made

    @property
    def task(self) -> ModelTask:
        """The model's task."""
        return self.any_model.task

    @property
    def any_model(self) -> EditableModel:
        """A wrapped model; its tokenizer and unedited answers are those of all of them."""
        return next(iter(next(iter(self.models.values())).values()))

    def compute_queries(self, prompts: Sequence[Prompt]) -> dict[QuerySource, dict[Prompt, np.ndarray]]:
        """The query (D) of each prompt at every layer, of every kind."""
        found: dict[QuerySource, dict[Prompt, np.ndarray]] = {
            (layer, kind): {} for layer, kinds in self.models.items() for kind in kinds
        }
        order = sorted(dict.fromkeys(prompts), key=len)
        for start in range(0, len(order), TRIAL_BATCH_SIZE):
            some = order[start : start + TRIAL_BATCH_SIZE]
            for query, rows in self._compute_batch(some).items():
                found[query].update(zip(some, rows, strict=True))
        return found

    def _compute_batch(self, prompts: Sequence[Prompt]) -> dict[QuerySource, np.ndarray]:
        """Queries of one batch (B, D)."""
        sessions: dict[QuerySource, AdaptorPass] = {}
        with torch.inference_mode(), ExitStack() as opened:
            for layer, kinds in self.models.items():
                for kind, model in kinds.items():
                    if kind != ENCODER_QUERY:
                        predicting = model.adaptor.with_lookup(model.task.batch(prompts), lambda _queries: None)
                        sessions[layer, kind] = opened.enter_context(predicting)
            self.task.forward_prompt(self.task.batch(prompts))
        seen = {query: session.queries_BD.cpu().numpy() for query, session in sessions.items()}
        encoded = next((kinds[ENCODER_QUERY] for kinds in self.models.values() if ENCODER_QUERY in kinds), None)
        if encoded is not None:
            rows = encoded.queries(prompts).cpu().numpy()  # the same at every layer
            seen |= {(layer, ENCODER_QUERY): rows for layer in self.models}
        return seen


def _wrap_layer(checkpoint: LoadedCheckpoint, layer: str) -> dict[str, EditableModel]:
    """The layer with each kind of query that can tell prompts apart there.

    Raises:
        LayerError: it cannot be edited.
    """
    own = _wrap_model(checkpoint, layer)
    if (fault := layer_fault(own.task, own.adaptor)) is not None:
        own.adaptor.remove()
        raise LayerError(fault)
    found = {own.adaptor.query: own}
    if not (checkpoint.module.config.is_encoder_decoder and is_in_decoder(layer)):
        found["mean"] = _wrap_model(checkpoint, layer, query="mean")
    seeing: dict[str, EditableModel] = {
        kind: model for kind, model in found.items() if not model.query_ignores_context()
    }
    if checkpoint.encoder is not None:
        return {ENCODER_QUERY: _wrap_model(checkpoint, layer, encoder=checkpoint.encoder), **seeing}
    if not seeing:
        raise LayerError("no token has seen the rest of a prompt there: an edit would reach every prompt")
    return seeing


def _wrap_model(
    checkpoint: LoadedCheckpoint, layer: str, query: QueryToken | None = None, encoder: SentenceEncoder | None = None
) -> EditableModel:
    return EditableModel(
        checkpoint.module, checkpoint.tokenizer, layer, limits=checkpoint.limits, replace=checkpoint.replace,
        query=query, encoder=encoder, fingerprint=TRIAL_FINGERPRINT,
    )  # fmt: skip


class AnswerCache:
    """Answers of one checkpoint, unedited and with values in place."""

    def __init__(self, task: ModelTask, max_new_tokens: int) -> None:
        """Answers have so many tokens at most, where the task generates."""
        self._task = task
        self.parameters = (
            Parameters() if isinstance(task, Classification) else Parameters(max_new_tokens=max_new_tokens)
        )
        self._unedited: dict[Prompt, str] = {}
        self._edited: dict[tuple[str, Prompt, bytes], ModelAnswer] = {}

    def accepts(self, inputs: Inputs) -> bool:
        """Whether the model can answer these inputs."""
        return self.explain_rejection(inputs) is None

    def explain_rejection(self, inputs: Inputs) -> str | None:
        """Why the model cannot answer these inputs; None: it can."""
        try:
            self._task.batch_key(self._task.tokenize(inputs), self.parameters)
        except InputError as error:
            return str(error)
        return None

    def unedited_answers(self, prompts: Sequence[Prompt]) -> list[str]:
        """The unedited model's answer to each."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._unedited]
        for some in _length_batches(new):
            with torch.inference_mode():
                answers = self._task.run(self._task.batch(some), [self.parameters] * len(some))
            self._unedited.update((prompt, answer_text(answer)) for prompt, answer in zip(some, answers, strict=True))
        return [self._unedited[prompt] for prompt in prompts]

    def edited_answers(
        self, model: EditableModel, prompt_values: Sequence[tuple[Prompt, np.ndarray]]
    ) -> list[ModelAnswer]:
        """The answer to each prompt with a value (V) in place at the model's layer."""
        keys = [(model.layer, prompt, value_V.tobytes()) for prompt, value_V in prompt_values]
        values = dict(zip(keys, (value_V for _, value_V in prompt_values), strict=True))
        new = [key for key in values if key not in self._edited]
        new.sort(key=lambda key: len(key[1]))
        for start in range(0, len(new), TRIAL_BATCH_SIZE):
            some = new[start : start + TRIAL_BATCH_SIZE]
            answers = self._run(model, [prompt for _, prompt, _ in some], np.stack([values[key] for key in some]))
            self._edited.update(zip(some, answers, strict=True))
        return [self._edited[key] for key in keys]

    def _run(self, model: EditableModel, prompts: Sequence[Prompt], values_BV: np.ndarray) -> list[ModelAnswer]:
        """The answers of one batch."""
        batch = model.task.batch(prompts)
        in_place = torch.ones(len(prompts), dtype=torch.bool), torch.from_numpy(values_BV)
        with torch.inference_mode(), model.adaptor.with_lookup(batch, lambda _queries: in_place):
            return model.task.run(batch, [self.parameters] * len(prompts))


def answer_text(answer: ModelAnswer) -> str:
    """An answer as text: a classifier's is its label."""
    return answer.outputs.text if answer.outputs.text is not UNSET else str(answer.outputs.label)


def _length_batches(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Prompts of similar length together."""
    order = sorted(prompts, key=len)
    return [order[start : start + TRIAL_BATCH_SIZE] for start in range(0, len(order), TRIAL_BATCH_SIZE)]
