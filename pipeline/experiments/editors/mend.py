"""MEND: a hypernetwork turns the gradient of a correction into a weight update (Mitchell et al. 2021).

The weight gradient of a linear layer is a sum over tokens of outer products of two vectors: the layer's input, and the
gradient of the loss with respect to the layer's output. The hypernetwork maps each pair of vectors to another pair. The
sum of the new outer products, with a learned step size, is subtracted from the weights.

The hypernetwork is trained online: each correction trains it further with Adam, on the loss of the updated model. As in
the paper's comparison, there are no corrections to train it on in advance.

The inputs have norm 1, and the gradients are divided by the largest norm over all tokens. The network's residual
blocks start as the identity, so the first update follows the negative gradient of each token.
"""

import torch
from torch import Tensor, nn

from gracestream.pipeline.experiments.editors.editor import MAX_EDIT_STEPS
from gracestream.pipeline.experiments.editors.weights import LinearLayerEditor
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import EditableModel, TargetPass, check_target

LEARNING_RATE = 1e-2
"""Adam's learning rate: the best one for MEND in the paper's search."""

HIDDEN_RANK = 128
"""Width of the hypernetwork's hidden layers."""

INITIAL_STEP_SIZE = 0.1
"""Step size before any training."""


class Mend(LinearLayerEditor):
    """Edits with a hypernetwork; `seed` initialises its weights."""

    def __init__(
        self, model: EditableModel, learning_rate: float = LEARNING_RATE, steps: int = MAX_EDIT_STEPS, seed: int = 0
    ) -> None:
        super().__init__(model)
        self.learning_rate, self._steps = learning_rate, steps
        value_dim, input_dim = self.weight_VD.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._network = _Hypernetwork(input_dim, value_dim).to(model.device)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=learning_rate)

    def _apply_correction(self, example: Example, supervised: TargetPass) -> int:
        """Train the hypernetwork until its update makes the model predict the target, then apply the update."""
        del example
        pairs = self._gradient_pairs(supervised)
        steps = 0
        while True:
            with torch.enable_grad():
                inputs_TD, gradients_TV = self._network(*pairs)

                # The update W -= gradientsᵀ inputs, applied to the layer's output, so that the loss depends on the
                # hypernetwork. The default arguments bind the tensors of this step.
                def subtract_update(
                    input_BTD: Tensor, output_BTV: Tensor, inputs: Tensor = inputs_TD, gradients: Tensor = gradients_TV
                ) -> Tensor:
                    return output_BTV - (input_BTD.float() @ inputs.T @ gradients).to(output_BTV.dtype)

                with self._with_output_hook(subtract_update):
                    check, loss = check_target(self._model.task.logits(supervised)[0], supervised.labels[0])
            if check.predicts_target or steps == self._steps:
                break
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            steps += 1
        self.weight_VD.sub_((gradients_TV.T @ inputs_TD).detach())
        return steps

    def _gradient_pairs(self, supervised: TargetPass) -> tuple[Tensor, Tensor]:
        """The layer's input at each token (T, D), and the gradient of the loss by the layer's output (T, V)."""
        recorded: list[Tensor] = []

        def record(input_BTD: Tensor, output_BTV: Tensor) -> Tensor:
            recorded.extend((input_BTD.detach()[0].float(), output_BTV.detach().requires_grad_()))
            return recorded[1]

        with torch.enable_grad(), self._with_output_hook(record):
            _, loss = check_target(self._model.task.logits(supervised)[0], supervised.labels[0])
            (gradients_1TV,) = torch.autograd.grad(loss, recorded[1])
        return recorded[0], gradients_1TV[0].float()


class _Hypernetwork(nn.Module):
    """Maps inputs (T, D) and gradients (T, V) to the factors of the weight update, in the same shapes."""

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
    """A residual block with a hidden layer of low rank; its last weights start at 0, so the block is the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, HIDDEN_RANK)
        self.up = nn.Linear(HIDDEN_RANK, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, pairs_TP: Tensor) -> Tensor:
        added_TP: Tensor = self.up(torch.relu(self.down(pairs_TP)))
        return pairs_TP + added_TP
