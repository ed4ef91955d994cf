"""GRACE as the paper describes it, as a baseline: every forward pass computes the distances to all keys.

It is written from the paper, for comparison only. It shares with the product the shapes of arrays and the forward pass
of a correction.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.tasks.base import TargetPass


class TextbookGrace:
    """A hook on a module. The query is the input at one token; the value replaces the output there or at every token.

    Args:
        module: The module to edit.
        keys_ND: Keys.
        values_NV: Values.
        radii_N: Radii.
        token: The token of the query, and of the replaced output.
        everywhere: Replace the output at every token.
    """

    def __init__(
        self, module: nn.Module, keys_ND: Tensor, values_NV: Tensor, radii_N: Tensor, *, token: int, everywhere: bool
    ) -> None:
        self.keys_ND, self.values_NV, self.radii_N = keys_ND, values_NV, radii_N
        self._token, self._everywhere = token, everywhere
        self._handle = module.register_forward_hook(self._hook)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _hook(self, _module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        queries_BD = args[0][:, self._token]
        nearest = torch.cdist(queries_BD, self.keys_ND).min(dim=1)
        hit_B = nearest.values < self.radii_N[nearest.indices]
        values_BV = self.values_NV[nearest.indices]
        edited = output.clone()
        replaced_tokens = (
            slice(None) if self._everywhere else slice(self._token, None if self._token == -1 else self._token + 1)
        )
        edited[:, replaced_tokens] = torch.where(hit_B[:, None, None], values_BV[:, None], output[:, replaced_tokens])
        return edited


def train(model: EditableModel, supervised: TargetPass, steps: int, learning_rate: float) -> float:
    """Train a value. Returns the final loss.

    One forward pass gives the query and the initial value. Each step runs the whole model forward, searches all keys,
    and runs the model backward. The weights are frozen.
    """
    module = model.module.get_submodule(model.layer)
    mask_BT = supervised.batch.mask_BT
    assert mask_BT is not None
    token = int(mask_BT.sum()) - 1 if model.adaptor.query == "last" else 0
    captured: list[tuple[Tensor, Tensor]] = []
    handle = module.register_forward_hook(lambda _module, args, output: captured.append((args[0], output)))
    with torch.no_grad():
        model.task.logits(supervised)
    handle.remove()
    everywhere = model.adaptor.replace == "all"
    ((inputs, outputs),) = captured
    start_V = outputs[0, : int(mask_BT.sum())].mean(dim=0) if everywhere else outputs[0, token]
    values_NV = nn.Parameter(start_V.clone()[None])
    radii_N = torch.ones(1, device=model.device)
    grace = TextbookGrace(module, inputs[:, token], values_NV, radii_N, token=token, everywhere=everywhere)
    optimizer = torch.optim.Adam([values_NV], lr=learning_rate)
    try:
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model.task.logits(supervised)[0], supervised.labels[0])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model.task.logits(supervised)[0], supervised.labels[0]))
    finally:
        grace.remove()
        model.module.zero_grad(set_to_none=True)
