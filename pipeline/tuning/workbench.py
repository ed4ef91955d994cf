"""One checkpoint, wrapped at several layers with several kinds of query at the same time, for trial edits.

1. Weights are loaded once. One forward pass over a prompt computes its queries at all layers.
2. Each answer is generated once: it depends on the prompt, the layer and the value, not on the query or the radius.
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
"""Prompts of one forward pass."""

ENCODER_QUERY = "encoder"
"""The kind of query that a sentence encoder makes."""

TRIAL_FINGERPRINT = "trial edits"
"""Stands in for the model's fingerprint, which takes long to compute: codebooks of trial edits are never published."""

QuerySource = tuple[str, str]
"""A layer and a kind of query; with the kind `encoder` the queries of all layers are equal."""


class WorkbenchError(UserError):
    """No layer can be tried; the message gives the reason for each layer."""


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A loaded model with its tokenizer and limits.

    Attributes:
        module: The transformers model.
        tokenizer: Its tokenizer.
        limits: Limits on prompts, targets and answers.
        replace: Tokens at which a value is injected; None: the default of the task.
        encoder: The sentence encoder; None: queries of an encoder are not tried.
    """

    module: Any
    tokenizer: Any
    limits: Limits
    replace: ReplacedTokens | None = None
    encoder: SentenceEncoder | None = None


@dataclass(slots=True)
class Workbench:
    """A checkpoint wrapped at several layers.

    Attributes:
        models: The wrapped models by layer and kind of query.
        layer_errors: The reason why a layer cannot be tried, by layer.
    """

    models: dict[str, dict[str, EditableModel]] = field(default_factory=dict)
    layer_errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def wrap_layers(cls, checkpoint: LoadedCheckpoint, layers: Sequence[str]) -> "Workbench":
        """Wrap the layers that can be edited.

        Raises:
            WorkbenchError: no layer can be edited.
        """
        bench = cls()
        for layer in dict.fromkeys(map(normalize_path, layers)):
            try:
                bench.models[layer] = _wrap_layer(checkpoint, layer)
            except LayerError as error:
                bench.layer_errors[layer] = str(error)
        if not bench.models:
            reasons = "; ".join(f"{layer}: {reason}" for layer, reason in bench.layer_errors.items())
            raise WorkbenchError(f"no layer can be tried ({reasons or 'none is known'}); name some with --layer")
        return bench

    @property
    def task(self) -> ModelTask:
        """The model's task."""
        return self.any_model.task

    @property
    def any_model(self) -> EditableModel:
        """One of the wrapped models; all of them share the tokenizer and the unedited answers."""
        return next(iter(next(iter(self.models.values())).values()))

    def compute_queries(self, prompts: Sequence[Prompt]) -> dict[QuerySource, dict[Prompt, np.ndarray]]:
        """The query (D) of each prompt, by layer and kind of query."""
        queries: dict[QuerySource, dict[Prompt, np.ndarray]] = {
            (layer, kind): {} for layer, kinds in self.models.items() for kind in kinds
        }
        order = sorted(dict.fromkeys(prompts), key=len)
        for start in range(0, len(order), TRIAL_BATCH_SIZE):
            batch = order[start : start + TRIAL_BATCH_SIZE]
            for source, rows in self._compute_batch(batch).items():
                queries[source].update(zip(batch, rows, strict=True))
        return queries

    def _compute_batch(self, prompts: Sequence[Prompt]) -> dict[QuerySource, np.ndarray]:
        """The queries of one batch (B, D), by layer and kind of query."""
        sessions: dict[QuerySource, AdaptorPass] = {}
        with torch.inference_mode(), ExitStack() as contexts:
            # All adaptors record their queries during the same pass; a lookup that returns None injects no value.
            for layer, kinds in self.models.items():
                for kind, model in kinds.items():
                    if kind != ENCODER_QUERY:
                        recording = model.adaptor.with_lookup(model.task.batch(prompts), lambda _queries: None)
                        sessions[layer, kind] = contexts.enter_context(recording)
            self.task.forward_prompt(self.task.batch(prompts))
        queries = {source: session.queries_BD.cpu().numpy() for source, session in sessions.items()}
        encoded = next((kinds[ENCODER_QUERY] for kinds in self.models.values() if ENCODER_QUERY in kinds), None)
        if encoded is not None:
            rows = encoded.queries(prompts).cpu().numpy()  # the same at every layer
            queries |= {(layer, ENCODER_QUERY): rows for layer in self.models}
        return queries


def _wrap_layer(checkpoint: LoadedCheckpoint, layer: str) -> dict[str, EditableModel]:
    """Wrap the layer once for each kind of query that depends on the whole prompt there.

    Raises:
        LayerError: the layer cannot be edited, or no kind of query depends on the whole prompt.
    """
    default_model = _wrap_model(checkpoint, layer)
    if (reason := layer_fault(default_model.task, default_model.adaptor)) is not None:
        default_model.adaptor.remove()
        raise LayerError(reason)
    candidates = {default_model.adaptor.query: default_model}
    # While a decoder processes the prompt it has a single token, so there is nothing to average.
    if not (checkpoint.module.config.is_encoder_decoder and is_in_decoder(layer)):
        candidates["mean"] = _wrap_model(checkpoint, layer, query="mean")
    usable: dict[str, EditableModel] = {
        kind: model for kind, model in candidates.items() if not model.query_ignores_context()
    }
    if checkpoint.encoder is not None:
        return {ENCODER_QUERY: _wrap_model(checkpoint, layer, encoder=checkpoint.encoder), **usable}
    if not usable:
        raise LayerError("no token has seen the rest of a prompt there: an edit would reach every prompt")
    return usable


def _wrap_model(
    checkpoint: LoadedCheckpoint, layer: str, query: QueryToken | None = None, encoder: SentenceEncoder | None = None
) -> EditableModel:
    return EditableModel(
        checkpoint.module, checkpoint.tokenizer, layer, limits=checkpoint.limits, replace=checkpoint.replace,
        query=query, encoder=encoder, fingerprint=TRIAL_FINGERPRINT,
    )  # fmt: skip


class AnswerCache:
    """A cache of one checkpoint's answers, unedited and with injected values."""

    def __init__(self, task: ModelTask, max_new_tokens: int) -> None:
        """Generated answers have at most `max_new_tokens` tokens; a classifier ignores the limit."""
        self._task = task
        self.parameters = (
            Parameters() if isinstance(task, Classification) else Parameters(max_new_tokens=max_new_tokens)
        )
        self._unedited: dict[Prompt, str] = {}
        self._edited: dict[tuple[str, Prompt, bytes], ModelAnswer] = {}

    def is_usable(self, inputs: Inputs) -> bool:
        """Whether the model can answer these inputs."""
        return self.explain_rejection(inputs) is None

    def explain_rejection(self, inputs: Inputs) -> str | None:
        """The reason why the model cannot answer these inputs; None: it can."""
        try:
            self._task.batch_key(self._task.tokenize(inputs), self.parameters)
        except InputError as error:
            return str(error)
        return None

    def unedited_answers(self, prompts: Sequence[Prompt]) -> list[str]:
        """The unedited model's answer to each prompt, as text."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._unedited]
        for batch in _length_batches(new):
            with torch.inference_mode():
                answers = self._task.run(self._task.batch(batch), [self.parameters] * len(batch))
            self._unedited.update((prompt, answer_text(answer)) for prompt, answer in zip(batch, answers, strict=True))
        return [self._unedited[prompt] for prompt in prompts]

    def edited_answers(
        self, model: EditableModel, prompt_values: Sequence[tuple[Prompt, np.ndarray]]
    ) -> list[ModelAnswer]:
        """The answer to each prompt with its value (V) injected at the model's layer."""
        keys = [(model.layer, prompt, value_V.tobytes()) for prompt, value_V in prompt_values]
        values = dict(zip(keys, (value_V for _, value_V in prompt_values), strict=True))
        new = [key for key in values if key not in self._edited]
        new.sort(key=lambda key: len(key[1]))
        for start in range(0, len(new), TRIAL_BATCH_SIZE):
            batch = new[start : start + TRIAL_BATCH_SIZE]
            answers = self._run(model, [prompt for _, prompt, _ in batch], np.stack([values[key] for key in batch]))
            self._edited.update(zip(batch, answers, strict=True))
        return [self._edited[key] for key in keys]

    def _run(self, model: EditableModel, prompts: Sequence[Prompt], values_BV: np.ndarray) -> list[ModelAnswer]:
        """The answers of one batch, with the values (B, V) injected."""
        batch = model.task.batch(prompts)
        mask_and_values = torch.ones(len(prompts), dtype=torch.bool), torch.from_numpy(values_BV)
        with torch.inference_mode(), model.adaptor.with_lookup(batch, lambda _queries: mask_and_values):
            return model.task.run(batch, [self.parameters] * len(prompts))


def answer_text(answer: ModelAnswer) -> str:
    """An answer as text; for a classifier its label."""
    return answer.outputs.text if answer.outputs.text is not UNSET else str(answer.outputs.label)


def _length_batches(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Batches of prompts of similar length, so that little is padded."""
    order = sorted(prompts, key=len)
    return [order[start : start + TRIAL_BATCH_SIZE] for start in range(0, len(order), TRIAL_BATCH_SIZE)]
