"""GRACE as the paper's text has it, to measure ours beside: every forward pass computes all distances.

Written from the paper for this purpose alone; it shares nothing with the system but the shapes of its arrays.
"""

from typing import Any

import torch
from torch import Tensor, nn


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
        where = slice(None) if self._everywhere else slice(self._token, None if self._token == -1 else self._token + 1)
        edited[:, where] = torch.where(hit_B[:, None, None], values_BV[:, None], output[:, where])
        return edited
