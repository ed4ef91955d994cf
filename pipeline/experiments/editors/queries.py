"""A cache of the queries of texts."""

from collections.abc import Sequence

import numpy as np

from gracestream.pipeline.model import EditableModel

QUERY_BATCH_SIZE = 16
"""Texts of one forward pass."""


class QueryCache:
    """Caches one model's queries. An edit at the layer does not change a query, so the cache never expires."""

    def __init__(self, model: EditableModel) -> None:
        self._model = model
        self._cached: dict[str, np.ndarray] = {}

    def get(self, texts: Sequence[str]) -> np.ndarray:
        """The queries of the texts, float32 (N, D)."""
        new = [text for text in dict.fromkeys(texts) if text not in self._cached]
        for start in range(0, len(new), QUERY_BATCH_SIZE):
            batch = new[start : start + QUERY_BATCH_SIZE]
            queries_BD = self._model.queries([self._model.task.tokenize(text) for text in batch])
            self._cached.update(zip(batch, queries_BD.cpu().numpy(), strict=True))
        return np.stack([self._cached[text] for text in texts])
