"""What the wrapped layer sees of texts."""

from collections.abc import Sequence

import numpy as np

from gracestream.pipeline.model import EditableModel

QUERY_BATCH_SIZE = 16
"""Texts whose queries are taken in one pass."""


class QueryCache:
    """Of a model. A query depends on no edit at the layer, so that of each text is taken once."""

    def __init__(self, model: EditableModel) -> None:
        self._model = model
        self._cached: dict[str, np.ndarray] = {}

    def get(self, texts: Sequence[str]) -> np.ndarray:
        """A query (D), float32, for each text: (N, D)."""
        new = [text for text in dict.fromkeys(texts) if text not in self._cached]
        for start in range(0, len(new), QUERY_BATCH_SIZE):
            batch = new[start : start + QUERY_BATCH_SIZE]
            queries_BD = self._model.queries([self._model.task.tokenize(text) for text in batch])
            self._cached.update(zip(batch, queries_BD.cpu().numpy(), strict=True))
        return np.stack([self._cached[text] for text in texts])
