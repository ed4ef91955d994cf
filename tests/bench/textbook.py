"""GRACE as the paper's text has it, to measure ours beside: every forward pass computes all distances.

Written from the paper for this purpose alone; it shares with the system the shapes of its arrays, and the forward pass
of a correction.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.tasks.base import TargetPass


class TextbookGrace:
    """Hooks a module: the query is its input at one token, the value replaces its output there or at every token.

    Args:
        module: The module to edit.
        keys_ND: Keys.
        values_NV: Values.
        radii_N: Radii.
        token: The token that is queried, and replaced.
        everywhere: Replace every token instead.
    """

    def __init__(
        self, module: nn.Module, keys_ND: Tensor, values_NV: Tensor, radii_N: Tensor, *, token: int, everywhere: bool
    ) -> None:
        self.keys_ND, self.values_NV, self.radii_N = keys_ND, values_NV, radii_N
        self._token, self._everywhere = token, everywhere
        self._handle = module.register_forward_hook(self._hook)

    def remove(self) -> None:
        """Unwrap the module."""
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
    """Train a value after one forward pass for its query and start; the loss at the end.

    The weights are frozen. A step runs the whole model forward, looks through all keys, and runs it backward.
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
