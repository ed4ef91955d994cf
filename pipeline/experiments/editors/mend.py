"""MEND: a network that turns the gradient of a correction into a change of the weights (Mitchell et al. 2021).

The gradient of a linear layer is a sum over tokens of outer products: of what the layer sees, and of the loss's slope
by what it puts out. The network maps each such pair to another, whose outer products, times a step size of its own, are
subtracted from the weights. It is trained as corrections come, by Adam on the loss of the model that it has changed,
and goes on from what it was: as in the paper's comparison there are no corrections to train it on before.

A pair is given to the network with its input at a length of one and its slope in parts of the longest of all tokens',
and what the network adds to it is nothing at first. So the first change goes, token by token, down the gradient.
"""

import torch
from torch import Tensor, nn

from gracestream.pipeline.experiments.editors.editor import MAX_EDIT_STEPS
from gracestream.pipeline.experiments.editors.weights import LinearLayerEditor
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import EditableModel, TargetPass, check_target

LEARNING_RATE = 1e-2
"""The paper's, of those that it tried the best for MEND."""

HIDDEN_RANK = 128
"""Of the network's hidden layers."""

INITIAL_STEP_SIZE = 0.1
"""How far the weights go along the pairs, before any training."""


class Mend(LinearLayerEditor):
    """`seed` draws the network's first weights."""

    def __init__(
        self, model: EditableModel, learning_rate: float = LEARNING_RATE, steps: int = MAX_EDIT_STEPS, seed: int = 0
    ) -> None:
        super().__init__(model)
        self.learning_rate, self._steps = learning_rate, steps
        values, queries = self.weight_VD.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._network = _Hypernetwork(queries, values).to(model.device)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=learning_rate)

    def _apply_correction(self, example: Example, supervised: TargetPass) -> int:
        """Train the network until its change makes the model right, and make that change."""
        del example
        pairs = self._gradient_pairs(supervised)
        steps = 0
        while True:
            with torch.enable_grad():
                inputs_TD, slopes_TV = self._network(*pairs)

                def changed(
                    seen_BTD: Tensor, output_BTV: Tensor, left: Tensor = inputs_TD, right: Tensor = slopes_TV
                ) -> Tensor:
                    return output_BTV - (seen_BTD.float() @ left.T @ right).to(output_BTV.dtype)

                with self._with_output_hook(changed):
                    judged, loss = check_target(self._model.task.logits(supervised)[0], supervised.labels[0])
            if judged.predicts_target or steps == self._steps:
                break
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            steps += 1
        self.weight_VD.sub_((slopes_TV.T @ inputs_TD).detach())
        return steps

    def _gradient_pairs(self, supervised: TargetPass) -> tuple[Tensor, Tensor]:
        """What the layer sees at each token (T, D), and the loss's slope by what it puts out there (T, V)."""
        seen: list[Tensor] = []

        def watched(seen_BTD: Tensor, output_BTV: Tensor) -> Tensor:
            seen.extend((seen_BTD.detach()[0].float(), output_BTV.detach().requires_grad_()))
            return seen[1]

        with torch.enable_grad(), self._with_output_hook(watched):
            _, loss = check_target(self._model.task.logits(supervised)[0], supervised.labels[0])
            (slopes_1TV,) = torch.autograd.grad(loss, seen[1])
        return seen[0], slopes_1TV[0].float()


class _Hypernetwork(nn.Module):
    def __init__(self, input_dim: int, output_dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_LowRankResidual(input_dim + output_dim) for _ in range(2))
        self.step_size = nn.Parameter(torch.tensor(INITIAL_STEP_SIZE))
        self.input_dim = input_dim

    def forward(self, inputs_TD: Tensor, gradients_TV: Tensor) -> tuple[Tensor, Tensor]:
        inputs_TD = nn.functional.normalize(inputs_TD, dim=1)
        gradients_TV = gradients_TV / gradients_TV.norm(dim=1).max().clamp(min=1e-30)
        pairs_TP = torch.cat([inputs_TD, gradients_TV], dim=1)
        for block in self.blocks:
            pairs_TP = block(pairs_TP)
        return pairs_TP[:, : self.input_dim], self.step_size * pairs_TP[:, self.input_dim :]


class _LowRankResidual(nn.Module):
    """Adds to its input what a network of low rank makes of it: nothing at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, HIDDEN_RANK)
        self.up = nn.Linear(HIDDEN_RANK, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, pairs_TP: Tensor) -> Tensor:
        added_TP: Tensor = self.up(torch.relu(self.down(pairs_TP)))
        return pairs_TP + added_TP
