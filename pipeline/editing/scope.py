"""Scope radii for the corrections of one model (`pipeline.editing.negatives`, docs/explanation/method.md).

Requests about the subject of a correction pass through the tokenizer and the encoder like the prompts of a replica,
with their prompt hash. So their distances are those that a lookup compares.

Not covered: classifiers, whose inputs are not requests about relations of a subject, and queries taken from a layer.
"""

from collections.abc import Sequence

import numpy as np

from gracestream.pipeline.editing.negatives import scope_radius
from gracestream.pipeline.model import Classification, EditableModel, InputError, Prompt
from gracestream.pipeline.wording import extract_subject
from gracestream.schemas.messages import Inputs, is_chat

ENCODER_BATCH_SIZE = 16
"""Prompts of one pass of the encoder; prompts of similar length share a pass."""

MAX_CACHED_RADII = 64
"""Radii in the cache. A correction with a draft needs its radius twice: for the draft and for the decision."""


class ScopeRadius:
    """The scope radii of one model's corrections, with a small cache; None for corrections without one."""

    def __init__(self, model: EditableModel) -> None:
        self._model = model
        self._cache: dict[tuple[Inputs, float], float | None] = {}

    @property
    def is_supported(self) -> bool:
        """Whether the model's queries come from a sentence encoder and the model is no classifier."""
        return self._model.reads_text and not isinstance(self._model.task, Classification)

    def has_subject(self, inputs: Inputs) -> bool:
        """Whether a subject is found in these inputs, so that other requests about it can be made."""
        text = _encoder_text(inputs)
        return self.is_supported and text is not None and extract_subject(text) is not None

    def __call__(self, inputs: Inputs, query_D: np.ndarray, alpha: float) -> float | None:
        """The scope radius of a correction with the query `query_D`; None without a subject.

        Another request about the subject lies within it with a probability of at most `alpha`.
        """
        text = _encoder_text(inputs)
        if text is None or not self.is_supported:
            return None
        if (inputs, alpha) not in self._cache:
            # A dict keeps its order of insertion, so this drops the oldest radius.
            while len(self._cache) >= MAX_CACHED_RADII:
                self._cache.pop(next(iter(self._cache)))
            self._cache[inputs, alpha] = scope_radius(self._compute_queries, text, query_D, alpha)
        return self._cache[inputs, alpha]

    def _compute_queries(self, texts: Sequence[str]) -> np.ndarray:
        """The queries (N, D) of the texts that the model can take, in order of length."""
        prompts = sorted(filter(None, map(self._tokenize, texts)), key=len)
        chunks = [prompts[start : start + ENCODER_BATCH_SIZE] for start in range(0, len(prompts), ENCODER_BATCH_SIZE)]
        queries = [self._model.queries(chunk).cpu().numpy() for chunk in chunks]
        return np.concatenate(queries) if queries else np.empty((0, 1), np.float32)

    def _tokenize(self, text: str) -> Prompt | None:
        """The prompt of a text; None if the model cannot take it."""
        try:
            return self._model.task.tokenize(text)
        except InputError:
            return None


def _encoder_text(inputs: Inputs) -> str | None:
    """The text that the encoder reads: a plain text, or the only user message of a chat.

    None for a pair of texts and for a chat with earlier turns.
    """
    if isinstance(inputs, str):
        return inputs
    if not is_chat(inputs) or any(message.role != "system" for message in inputs[:-1]):
        return None
    return inputs[-1].content
