"""Baselines that predict a value with a small network instead of a codebook (paper, appendix on compared editors).

Both networks take the query that GRACE would look up, and inject their value at GRACE's layer. Each correction trains
them further with Adam, on the model's loss, until the model predicts the target.

- `MemoryNetwork`: attention over `NUM_MEMORIES` learned vectors. It replaces the layer's output for every input.
- `DeferNetwork`: one linear map predicts the probability that an input needs a correction, another one the value.
  Training mixes the value and the layer's own output by this probability, so that both maps learn. Inference replaces
  the output if the probability is at least 0.5.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from gracestream.pipeline.experiments.editors.editor import MAX_EDIT_STEPS, EditOutcome
from gracestream.pipeline.experiments.editors.queries import QueryCache
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import PROBE_TEXTS, Batch, EditableModel, TargetPass, check_target

NUM_MEMORIES = 50
"""Learned vectors of a `MemoryNetwork`."""

MEMORY_LEARNING_RATE, DEFER_LEARNING_RATE = 1e-2, 1.0
"""Adam's learning rates: the best ones for each network in the paper's search."""


class ValueNetworkEditor(ABC):
    """Edits with networks that predict values; `seed` initialises their weights.

    The model stays unedited until the first correction.
    """

    num_entries = 0

    def __init__(self, model: EditableModel, learning_rate: float, steps: int, seed: int) -> None:
        self._model, self.learning_rate, self._steps = model, learning_rate, steps
        self._query_cache = QueryCache(model)
        self._version = 0
        batch = model.task.batch([model.task.tokenize(PROBE_TEXTS[0])])
        with torch.no_grad(), model.adaptor.record_output(batch) as recorded:
            model.task.forward_prompt(batch)
        query_dim = self._query_cache.get([PROBE_TEXTS[0]]).shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.networks = self._build_networks(query_dim, recorded.outputs_BV.shape[1]).to(model.device)
        self._optimizer = torch.optim.Adam(self.networks.parameters(), lr=learning_rate)

    def edit(self, number: int, example: Example) -> EditOutcome:
        """Train the networks until the model predicts the target."""
        del number
        started = time.perf_counter()
        _, supervised = self._model.prepare_correction(example.inputs, example.target)
        if self._predicts_target(supervised):
            return EditOutcome("unchanged", 0, time.perf_counter() - started)
        steps = self._train(example, supervised)
        status = "added" if self._predicts_target(supervised) else "failed"
        return EditOutcome(status, steps, time.perf_counter() - started)

    def state_keys(self, texts: Sequence[str]) -> list[Hashable]:
        """The version of the networks for each text whose output they replace; None for the other texts."""
        if not texts:
            return []
        replacement = self._lookup(torch.from_numpy(self._query_cache.get(texts)))
        return (
            [None] * len(texts)
            if replacement is None
            else [self._version if replaced else None for replaced in replacement[0].tolist()]
        )

    def with_edits(self, batch: Batch) -> AbstractContextManager[object]:
        """A context in which the adaptor injects the networks' values."""
        return self._model.adaptor.with_lookup(batch, self._lookup)

    def _lookup(self, queries_BD: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._replacement_values(queries_BD) if self._version else None

    def _train(self, example: Example, supervised: TargetPass) -> int:
        """Train on one correction; return the number of steps."""
        self._version += 1
        queries_1D = torch.from_numpy(self._query_cache.get([example.inputs]))
        with torch.no_grad(), self._model.adaptor.record_output(supervised.batch) as recorded:
            self._model.task.logits(supervised)
        suffix = self._model.suffix_runner.suffix_of([supervised])
        for step in range(self._steps):
            with torch.enable_grad():
                values_1V = self._training_values(queries_1D, recorded.outputs_BV)
                ((check, loss),) = self._model.suffix_runner.evaluate(suffix, values_1V)
            # `DeferNetwork` mixes outputs in training and replaces them in use, so inference is checked, too.
            if check.predicts_target and self._predicts_target(supervised):
                return step
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        return self._steps

    def _predicts_target(self, supervised: TargetPass) -> bool:
        """Whether the model predicts the target at inference."""
        with torch.no_grad(), self.with_edits(supervised.batch):
            return check_target(self._model.task.logits(supervised)[0], supervised.labels[0])[0].predicts_target

    @abstractmethod
    def _build_networks(self, query_dim: int, value_dim: int) -> nn.Module:
        """Make the networks for queries and values of these dimensions."""

    @abstractmethod
    def _training_values(self, queries_BD: Tensor, outputs_BV: Tensor) -> Tensor:
        """The values (B, V) to inject in training, given the layer's own outputs (B, V)."""

    @abstractmethod
    def _replacement_values(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        """At inference, a mask of the rows to replace (B), and the values (B, V)."""


class MemoryNetwork(ValueNetworkEditor):
    """Injects an attention-weighted mean of learned vectors for every input."""

    def __init__(
        self,
        model: EditableModel,
        learning_rate: float = MEMORY_LEARNING_RATE,
        steps: int = MAX_EDIT_STEPS,
        seed: int = 0,
    ) -> None:
        super().__init__(model, learning_rate, steps, seed)

    def _build_networks(self, query_dim: int, value_dim: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(query_dim, NUM_MEMORIES), nn.Softmax(dim=1), nn.Linear(NUM_MEMORIES, value_dim, bias=False)
        )

    def _training_values(self, queries_BD: Tensor, outputs_BV: Tensor) -> Tensor:
        del outputs_BV
        return self._replacement_values(queries_BD)[1]

    def _replacement_values(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        values_BV: Tensor = self.networks(queries_BD.to(self._model.device))
        return torch.ones(len(queries_BD), dtype=torch.bool), values_BV


class DeferNetwork(ValueNetworkEditor):
    """Predicts a value and the probability that the input needs it, in one linear map; its last output is the logit."""

    def __init__(
        self,
        model: EditableModel,
        learning_rate: float = DEFER_LEARNING_RATE,
        steps: int = MAX_EDIT_STEPS,
        seed: int = 0,
    ) -> None:
        super().__init__(model, learning_rate, steps, seed)

    def _build_networks(self, query_dim: int, value_dim: int) -> nn.Module:
        return nn.Linear(query_dim, value_dim + 1)

    def _training_values(self, queries_BD: Tensor, outputs_BV: Tensor) -> Tensor:
        probabilities_B1, values_BV = self._predict_with_probability(queries_BD)
        return probabilities_B1 * values_BV + (1 - probabilities_B1) * outputs_BV

    def _replacement_values(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        probabilities_B1, values_BV = self._predict_with_probability(queries_BD)
        return probabilities_B1[:, 0] >= 0.5, values_BV

    def _predict_with_probability(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (B, 1) and values (B, V)."""
        predicted = self.networks(queries_BD.to(self._model.device))
        return torch.sigmoid(predicted[:, -1:]), predicted[:, :-1]
