"""Cached activations of the modules that run before the edited layer."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from gracestream.pipeline.model.layers import enclosing_blocks


class ActivationCache:
    """The outputs of what runs before the edited layer, taken from one forward pass and given back in later ones.

    That are the blocks before the one that holds it, what that block runs once and before it, and the layer's own
    output: they depend on no value there. (A value overwrites the same tokens of that output each time.) Copies are
    kept and given, since some models add to what a module put out.
    """

    def __init__(
        self,
        earlier_blocks: Sequence[nn.Module] = (),
        layer_block: nn.Module | None = None,
        layer: Any = None,
        allowed_modules: Collection[nn.Module] | None = None,
        outputs: Mapping[nn.Module, Any] | None = None,
    ) -> None:
        self._earlier_blocks, self._layer_block, self._layer, self._allowed_modules = (
            earlier_blocks,
            layer_block,
            layer,
            allowed_modules,
        )
        self._outputs = dict(outputs or {})

    @classmethod
    def for_layer(cls, model: nn.Module, path: str, allowed_modules: Collection[nn.Module] | None = None) -> Self:
        """What runs before the layer at `path`, of these modules only; nothing, where that is in no stack of blocks."""
        blocks, number = enclosing_blocks(model, path)
        return cls(blocks[:number], blocks[number], model.get_submodule(path), allowed_modules) if blocks else cls()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep what they put out in the forward pass inside."""
        found: dict[nn.Module, list[Any]] = {}
        reached: list[nn.Module] = []

        def keep(module: nn.Module, _args: Any, output: Any) -> None:
            early = not reached or module in (self._layer, *self._earlier_blocks)
            found.setdefault(module, []).append(_clone_output(output) if early else None)

        inner = [] if self._layer_block is None else self._modules_before_layer()
        handles = [module.register_forward_hook(keep) for module in (*self._earlier_blocks[-1:], *inner)]
        if self._layer is not None:
            handles.append(self._layer.register_forward_pre_hook(lambda module, _args: reached.append(module)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        once = {module: outputs[0] for module, outputs in found.items() if len(outputs) == 1}
        self._store({module: output for module, output in once.items() if output is not None})

    def contains(self, module: nn.Module) -> bool:
        """Whether this module's output was recorded, so that it does not run again."""
        return module in self._outputs

    def slice_tokens(self, tokens: slice) -> None:
        """Keep these tokens only: later passes are over them."""
        self._outputs = {module: _slice_tokens(output, tokens) for module, output in self._outputs.items()}

    def select_rows(self, indices: Sequence[int]) -> Self:
        """Some of the rows: later passes are over them."""
        outputs = {module: _select_rows(output, list(indices)) for module, output in self._outputs.items()}
        return type(self)(self._earlier_blocks, self._layer_block, self._layer, self._allowed_modules, outputs)

    @property
    def outputs(self) -> Mapping[nn.Module, Any]:
        """What was recorded, by the module that put it out."""
        return self._outputs

    def concatenate(self, others: Sequence[Self]) -> Self | None:
        """This pass and others as one, each row padded on the right; None where that cannot be done."""
        outputs: dict[nn.Module, Any] = {}
        if any(other.outputs.keys() != self._outputs.keys() for other in others):
            return None
        for module in self._outputs:
            found = [part.outputs[module] for part in (self, *others)]
            if not all(isinstance(output, Tensor) and output.dim() == 3 for output in found):
                return None
            outputs[module] = pad_and_concat(found, dim=1)
        return type(self)(self._earlier_blocks, self._layer_block, self._layer, self._allowed_modules, outputs)

    def batched_modules(self) -> set[nn.Module]:
        """Of a pass over one row of several tokens: the modules that put out something for each row."""
        firsts = {module: _main_output(output) for module, output in self._outputs.items()}
        return {module for module, first in firsts.items() if len(first) == 1}

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Forward passes inside, on the same input or what was not cut of it, leave all that out."""
        last = self._outputs.get(self._earlier_blocks[-1]) if self._earlier_blocks else None
        early = [] if last is None else self._earlier_blocks[:-1]
        unread = (
            _clone_output(last) if early else None
        )  # one copy for all of them: only the last block's output is read
        for module in early:
            module.forward = lambda *_args, **_kwargs: unread
        for module, output in self._outputs.items():
            module.forward = lambda *_args, _output=output, **_kwargs: _clone_output(_output)
        try:
            yield
        finally:
            for module in (*early, *self._outputs):
                del module.forward

    def _modules_before_layer(self) -> list[nn.Module]:
        """The modules of the block that may run before the layer: all but those that it is a part of; and itself."""
        assert self._layer_block is not None
        return [
            m
            for m in self._layer_block.modules()
            if m is self._layer or all(part is not self._layer for part in m.modules())
        ]

    def _store(self, recorded: dict[nn.Module, Any]) -> None:
        """Keep the outputs of tokens (B, T, X); of a module that is kept, what it is made of never runs."""
        self._outputs = {}
        covered: set[nn.Module] = set()
        for module in (*self._earlier_blocks[-1:], *([] if self._layer_block is None else self._layer_block.modules())):
            allowed = self._allowed_modules is None or module in self._allowed_modules
            if allowed and module in recorded and module not in covered and _is_token_output(recorded[module]):
                self._outputs[module] = recorded[module]
                covered.update(module.modules())


def pad_and_concat(tensors: Sequence[Tensor], dim: int, *, pad_left: bool = False, pad_value: int = 0) -> Tensor:
    """The rows of several tensors as one, padded along another dimension to the longest."""
    width = max(part.shape[dim] for part in tensors)
    padded = []
    for part in tensors:
        shape = list(part.shape)
        shape[dim] = width - part.shape[dim]
        more = part.new_full(shape, pad_value)
        padded.append(torch.cat([more, part] if pad_left else [part, more], dim=dim))
    return torch.cat(padded)


def _main_output(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _is_token_output(output: Any) -> bool:
    first = _main_output(output)
    return isinstance(first, Tensor) and first.dim() == 3


def _clone_output(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.clone()
    if type(output) in (tuple, list):
        return type(output)(_clone_output(part) for part in output)
    return output


def _slice_tokens(output: Any, tokens: slice) -> Any:
    if isinstance(output, tuple):
        return (output[0][:, tokens], *output[1:])
    return output[:, tokens]


def _select_rows(output: Any, indices: list[int]) -> Any:
    """Of what a module put out for some rows; what it put out once for all of them stays."""
    if type(output) in (tuple, list):
        count = len(output[0])
        return type(output)(
            part[indices] if isinstance(part, Tensor) and len(part) == count > 1 else part for part in output
        )
    return output[indices]
