"""Small networks that predict a value, in place of a codebook that finds it (paper, appendix on compared editors).

Both see the query that GRACE would look up, and their value goes where GRACE's would. They are trained by Adam on the
model's loss for each correction as it comes, go on from what they were, and stop once the model is right.

- `MemoryNetwork`: attention over `NUM_MEMORIES` learned vectors. It replaces the layer's output for every input.
- `DeferNetwork`: one network says how likely an input is to be one that was corrected, another what the value is. In
  training value and own output are mixed by that probability, so that both learn; in use it replaces from one half on.
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
MEMORY_LEARNING_RATE, DEFER_LEARNING_RATE = 1e-2, 1.0
"""The paper's, of those that it tried the best for each."""


class ValueNetworkEditor(ABC):
    """Networks beside the model, whose first weights `seed` draws. They replace nothing before the first correction."""

    num_entries = 0

    def __init__(self, model: EditableModel, learning_rate: float, steps: int, seed: int) -> None:
        self._model, self.learning_rate, self._steps = model, learning_rate, steps
        self._query_cache = QueryCache(model)
        self._version = 0
        batch = model.task.batch([model.task.tokenize(PROBE_TEXTS[0])])
        with torch.no_grad(), model.adaptor.capture_output(batch) as seen:
            model.task.forward_prompt(batch)
        width = self._query_cache.get([PROBE_TEXTS[0]]).shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.networks = self._build_networks(width, seen.outputs_BV.shape[1]).to(model.device)
        self._optimizer = torch.optim.Adam(self.networks.parameters(), lr=learning_rate)

    def edit(self, number: int, example: Example) -> EditOutcome:
        """Train the networks until the model gives the target."""
        del number
        begun = time.perf_counter()
        _, supervised = self._model.prepare_correction(example.inputs, example.target)
        if self._predicts_target(supervised):
            return EditOutcome("unchanged", 0, time.perf_counter() - begun)
        steps = self._train(example, supervised)
        status = "added" if self._predicts_target(supervised) else "failed"
        return EditOutcome(status, steps, time.perf_counter() - begun)

    def state_keys(self, texts: Sequence[str]) -> list[Hashable]:
        """The networks', of a text for which they replace the output."""
        if not texts:
            return []
        found = self._lookup(torch.from_numpy(self._query_cache.get(texts)))
        return [None] * len(texts) if found is None else [self._version if one else None for one in found[0].tolist()]

    def with_edits(self, batch: Batch) -> AbstractContextManager[object]:
        """The adaptor's session, with a prediction for each row."""
        return self._model.adaptor.with_lookup(batch, self._lookup)

    def _lookup(self, queries_BD: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._replacement_values(queries_BD) if self._version else None

    def _train(self, example: Example, supervised: TargetPass) -> int:
        """The steps that it took."""
        self._version += 1
        queries_1D = torch.from_numpy(self._query_cache.get([example.inputs]))
        with torch.no_grad(), self._model.adaptor.capture_output(supervised.batch) as seen:
            self._model.task.logits(supervised)
        rest = self._model.suffix_runner.suffix_of([supervised])
        for step in range(self._steps):
            with torch.enable_grad():
                values_1V = self._training_values(queries_1D, seen.outputs_BV)
                ((judged, loss),) = self._model.suffix_runner.evaluate(rest, values_1V)
            if judged.predicts_target and self._predicts_target(supervised):
                return step
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        return self._steps

    def _predicts_target(self, supervised: TargetPass) -> bool:
        """Whether the model gives the target, served as it would be."""
        with torch.no_grad(), self.with_edits(supervised.batch):
            return check_target(self._model.task.logits(supervised)[0], supervised.labels[0])[0].predicts_target

    @abstractmethod
    def _build_networks(self, query_dim: int, value_dim: int) -> nn.Module:
        """The networks, for queries and values of so many numbers."""

    @abstractmethod
    def _training_values(self, queries_BD: Tensor, outputs_BV: Tensor) -> Tensor:
        """Values (B, V) to train by, beside what the layer puts out itself."""

    @abstractmethod
    def _replacement_values(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        """In use: the rows whose output is replaced (B), and values (B, V)."""


class MemoryNetwork(ValueNetworkEditor):
    """Learned vectors, of which each input is served a mean that attention weighs."""

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
    """Two linear networks: the probability that an input is to be corrected (its last output), and the value."""

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
        shares_B1, values_BV = self._predict_with_probability(queries_BD)
        return shares_B1 * values_BV + (1 - shares_B1) * outputs_BV

    def _replacement_values(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        shares_B1, values_BV = self._predict_with_probability(queries_BD)
        return shares_B1[:, 0] >= 0.5, values_BV

    def _predict_with_probability(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (B, 1) and values (B, V)."""
        predicted = self.networks(queries_BD.to(self._model.device))
        return torch.sigmoid(predicted[:, -1:]), predicted[:, :-1]
