"""The radius of a correction's own, as an engine asks for it (`pipeline.editing.negatives`; design, section 4).

The requests about the correction's subject pass through the model's tokenizer and the encoder as a replica's prompts
do, marks and all, so that their distances are those which a lookup compares. A classifier's corrections have none:
what another class is asked about is not another relation of a subject.
"""

from collections.abc import Sequence

import numpy as np

from gracestream.pipeline.editing.negatives import scope_radius
from gracestream.pipeline.model import Classification, EditableModel, InputError, Prompt
from gracestream.pipeline.wording import extract_subject
from gracestream.schemas.messages import Inputs, is_chat

ENCODER_BATCH_SIZE = 16
"""Prompts of one pass of the encoder, those of similar length together."""

MAX_CACHED_RADII = 64
"""Corrections whose radius is kept: one whose value is trained ahead is decided on a second time soon after."""


class ScopeRadius:
    """Radii of one model's corrections. With queries of a layer, none has one."""

    def __init__(self, model: EditableModel) -> None:
        self._model = model
        self._cache: dict[tuple[Inputs, float], float | None] = {}

    @property
    def is_supported(self) -> bool:
        """Whether its queries are an encoder's and it is no classifier."""
        return self._model.reads_text and not isinstance(self._model.task, Classification)

    def has_subject(self, inputs: Inputs) -> bool:
        """Whether there are other requests about the subject of these inputs."""
        text = _encoder_text(inputs)
        return self.is_supported and text is not None and extract_subject(text) is not None

    def __call__(self, inputs: Inputs, query_D: np.ndarray, alpha: float) -> float | None:
        """The radius within which at most a share of alpha of other requests about its subject lies; None: has none."""
        text = _encoder_text(inputs)
        if text is None or not self.is_supported:
            return None
        if (inputs, alpha) not in self._cache:
            while len(self._cache) >= MAX_CACHED_RADII:
                self._cache.pop(next(iter(self._cache)))
            self._cache[inputs, alpha] = scope_radius(self._compute_queries, text, query_D, alpha)
        return self._cache[inputs, alpha]

    def _compute_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Of those that the model can take."""
        prompts = sorted(filter(None, map(self._tokenize, texts)), key=len)
        chunks = [prompts[start : start + ENCODER_BATCH_SIZE] for start in range(0, len(prompts), ENCODER_BATCH_SIZE)]
        found = [self._model.queries(chunk).cpu().numpy() for chunk in chunks]
        return np.concatenate(found) if found else np.empty((0, 1), np.float32)

    def _tokenize(self, text: str) -> Prompt | None:
        try:
            return self._model.task.tokenize(text)
        except InputError:
            return None


def _encoder_text(inputs: Inputs) -> str | None:
    """What the encoder reads; None of a pair, and of a chat that goes on, which its own entry alone serves."""
    if isinstance(inputs, str):
        return inputs
    if not is_chat(inputs) or any(message.role != "system" for message in inputs[:-1]):
        return None
    return inputs[-1].content
