"""Small networks that predict a value, in place of a codebook that finds it (paper, appendix on compared editors).

Both see the query that GRACE would look up, and their value goes where GRACE's would. They are trained by Adam on the
model's loss for each correction as it comes, go on from what they were, and stop once the model is right.

- `Memory`: attention over `MEMORIES` learned vectors. It replaces the layer's output for every input.
- `Defer`: one network says how likely an input is to be one that was corrected, another what the value is. In training
  value and own output are mixed by that probability, so that both learn; in use it replaces from one half on.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from gracestream.pipeline.experiments.editors.editor import STEPS, Made
from gracestream.pipeline.experiments.editors.queries import Queries
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import TEXTS, Batch, EditableModel, Supervised, verdict

MEMORIES = 50
MEMORY_RATE, DEFER_RATE = 1e-2, 1.0
"""The paper's, of those that it tried the best for each."""


class Predicting(ABC):
    """Networks beside the model, whose first weights `seed` draws. They replace nothing before the first correction."""

    entries = 0

    def __init__(self, model: EditableModel, learning_rate: float, steps: int, seed: int) -> None:
        self._model, self.learning_rate, self._steps = model, learning_rate, steps
        self._queries = Queries(model)
        self._changes = 0
        batch = model.task.batch([model.task.tokenize(TEXTS[0])])
        with torch.no_grad(), model.adaptor.watching(batch) as seen:
            model.task.observe(batch)
        width = self._queries.of([TEXTS[0]]).shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.networks = self._made(width, seen.outputs_BV.shape[1]).to(model.device)
        self._optimizer = torch.optim.Adam(self.networks.parameters(), lr=learning_rate)

    def edit(self, number: int, example: Example) -> Made:
        """Train the networks until the model gives the target."""
        del number
        begun = time.perf_counter()
        _, supervised = self._model.supervised(example.inputs, example.target)
        if self._right(supervised):
            return Made("unchanged", 0, time.perf_counter() - begun)
        steps = self._train(example, supervised)
        status = "added" if self._right(supervised) else "failed"
        return Made(status, steps, time.perf_counter() - begun)

    def states(self, texts: Sequence[str]) -> list[Hashable]:
        """The networks', of a text for which they replace the output."""
        if not texts:
            return []
        found = self._lookup(torch.from_numpy(self._queries.of(texts)))
        return [None] * len(texts) if found is None else [self._changes if one else None for one in found[0].tolist()]

    def serving(self, batch: Batch) -> AbstractContextManager[object]:
        """The adaptor's session, with a prediction for each row."""
        return self._model.adaptor.predicting(batch, self._lookup)

    def _lookup(self, queries_BD: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._replacing(queries_BD) if self._changes else None

    def _train(self, example: Example, supervised: Supervised) -> int:
        """The steps that it took."""
        self._changes += 1
        queries_1D = torch.from_numpy(self._queries.of([example.inputs]))
        with torch.no_grad(), self._model.adaptor.watching(supervised.batch) as seen:
            self._model.task.logits(supervised)
        rest = self._model.passes.rest_of([supervised])
        for step in range(self._steps):
            with torch.enable_grad():
                values_1V = self._mixed(queries_1D, seen.outputs_BV)
                ((judged, loss),) = self._model.passes.judge(rest, values_1V)
            if judged.right and self._right(supervised):
                return step
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        return self._steps

    def _right(self, supervised: Supervised) -> bool:
        """Whether the model gives the target, served as it would be."""
        with torch.no_grad(), self.serving(supervised.batch):
            return verdict(self._model.task.logits(supervised)[0], supervised.labels[0])[0].right

    @abstractmethod
    def _made(self, queries: int, values: int) -> nn.Module:
        """The networks, for queries and values of so many numbers."""

    @abstractmethod
    def _mixed(self, queries_BD: Tensor, outputs_BV: Tensor) -> Tensor:
        """Values (B, V) to train by, beside what the layer puts out itself."""

    @abstractmethod
    def _replacing(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        """In use: the rows whose output is replaced (B), and values (B, V)."""


class Memory(Predicting):
    """Learned vectors, of which each input is served a mean that attention weighs."""

    def __init__(
        self, model: EditableModel, learning_rate: float = MEMORY_RATE, steps: int = STEPS, seed: int = 0
    ) -> None:
        super().__init__(model, learning_rate, steps, seed)

    def _made(self, queries: int, values: int) -> nn.Module:
        return nn.Sequential(nn.Linear(queries, MEMORIES), nn.Softmax(dim=1), nn.Linear(MEMORIES, values, bias=False))

    def _mixed(self, queries_BD: Tensor, outputs_BV: Tensor) -> Tensor:
        del outputs_BV
        return self._replacing(queries_BD)[1]

    def _replacing(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        values_BV: Tensor = self.networks(queries_BD.to(self._model.device))
        return torch.ones(len(queries_BD), dtype=torch.bool), values_BV


class Defer(Predicting):
    """Two linear networks: the probability that an input is to be corrected (its last output), and the value."""

    def __init__(
        self, model: EditableModel, learning_rate: float = DEFER_RATE, steps: int = STEPS, seed: int = 0
    ) -> None:
        super().__init__(model, learning_rate, steps, seed)

    def _made(self, queries: int, values: int) -> nn.Module:
        return nn.Linear(queries, values + 1)

    def _mixed(self, queries_BD: Tensor, outputs_BV: Tensor) -> Tensor:
        shares_B1, values_BV = self._predicted(queries_BD)
        return shares_B1 * values_BV + (1 - shares_B1) * outputs_BV

    def _replacing(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        shares_B1, values_BV = self._predicted(queries_BD)
        return shares_B1[:, 0] >= 0.5, values_BV

    def _predicted(self, queries_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (B, 1) and values (B, V)."""
        predicted = self.networks(queries_BD.to(self._model.device))
        return torch.sigmoid(predicted[:, -1:]), predicted[:, :-1]
