"""What the wrapped layer sees of texts."""

from collections.abc import Sequence

import numpy as np

from gracestream.pipeline.model import EditableModel

AT_ONCE = 16
"""Texts whose queries are taken in one pass."""


class Queries:
    """Of a model. A query depends on no edit at the layer, so that of each text is taken once."""

    def __init__(self, model: EditableModel) -> None:
        self._model = model
        self._known: dict[str, np.ndarray] = {}

    def of(self, texts: Sequence[str]) -> np.ndarray:
        """A query (D), float32, for each text: (N, D)."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        for start in range(0, len(new), AT_ONCE):
            batch = new[start : start + AT_ONCE]
            queries_BD = self._model.queries([self._model.task.tokenize(text) for text in batch])
            self._known.update(zip(batch, queries_BD.cpu().numpy(), strict=True))
        return np.stack([self._known[text] for text in texts])
