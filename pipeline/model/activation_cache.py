"""Caches activations that do not depend on the injected value, so that later passes skip the modules that made them.

Shapes: B rows, T tokens, X width.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from gracestream.pipeline.model.layers import enclosing_blocks


class ActivationCache:
    """Outputs of the modules that run before the edited layer, recorded in one forward pass and reused in later ones.

    Cached are the outputs of:

    1. all earlier blocks of the stack (only the last one's output is stored; skipped blocks alone read the others);
    2. modules that run exactly once in the edited layer's own block, before that layer;
    3. the edited layer itself, whose output the injected value overwrites at the same tokens in every pass.

    None of them depends on the injected value. Outputs are copied when they are recorded and when they are reused,
    because some models add to a module's output in place.

    Not promised: that a model computes the same with a cache. `SuffixRunner` verifies that on a probe.
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
        """A cache for the layer at `path`; empty for a layer outside any stack of blocks.

        Args:
            model: The whole model.
            path: Path of the edited layer.
            allowed_modules: Only these modules may be cached; None allows all.
        """
        blocks, number = enclosing_blocks(model, path)
        return cls(blocks[:number], blocks[number], model.get_submodule(path), allowed_modules) if blocks else cls()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record outputs of the forward pass inside this context."""
        outputs_by_module: dict[nn.Module, list[Any]] = {}
        layer_calls: list[nn.Module] = []

        def record_output(module: nn.Module, _args: Any, output: Any) -> None:
            # None marks an output that may depend on the layer; its entry still counts the module's calls.
            before_layer = not layer_calls or module in (self._layer, *self._earlier_blocks)
            outputs_by_module.setdefault(module, []).append(_clone_output(output) if before_layer else None)

        block_modules = [] if self._layer_block is None else self._modules_before_layer()
        handles = [
            module.register_forward_hook(record_output) for module in (*self._earlier_blocks[-1:], *block_modules)
        ]
        if self._layer is not None:
            handles.append(self._layer.register_forward_pre_hook(lambda module, _args: layer_calls.append(module)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        # A module that ran several times would need a different output at each call.
        run_once = {module: outputs[0] for module, outputs in outputs_by_module.items() if len(outputs) == 1}
        self._store({module: output for module, output in run_once.items() if output is not None})

    def contains(self, module: nn.Module) -> bool:
        """True if this module's output is cached, so that the module does not run again."""
        return module in self._outputs

    def slice_tokens(self, tokens: slice) -> None:
        """Keep only these tokens of every output; later passes must contain the same tokens."""
        self._outputs = {module: _slice_tokens(output, tokens) for module, output in self._outputs.items()}

    def select_rows(self, indices: Sequence[int]) -> Self:
        """A cache of some rows, for later passes over these rows."""
        outputs = {module: _select_rows(output, list(indices)) for module, output in self._outputs.items()}
        return type(self)(self._earlier_blocks, self._layer_block, self._layer, self._allowed_modules, outputs)

    @property
    def outputs(self) -> Mapping[nn.Module, Any]:
        """The cached outputs by module."""
        return self._outputs

    def concatenate(self, others: Sequence[Self]) -> Self | None:
        """The rows of this and other caches in one, padded on the right; None if the outputs cannot be joined."""
        outputs: dict[nn.Module, Any] = {}
        if any(other.outputs.keys() != self._outputs.keys() for other in others):
            return None
        for module in self._outputs:
            parts = [part.outputs[module] for part in (self, *others)]
            if not all(isinstance(output, Tensor) and output.dim() == 3 for output in parts):
                return None
            outputs[module] = pad_and_concat(parts, dim=1)
        return type(self)(self._earlier_blocks, self._layer_block, self._layer, self._allowed_modules, outputs)

    def batched_modules(self) -> set[nn.Module]:
        """The cached modules whose output has one element per row, after a pass over one row of several tokens."""
        main_outputs = {module: _main_output(output) for module, output in self._outputs.items()}
        return {module for module, output in main_outputs.items() if len(output) == 1}

    @contextmanager
    def reuse(self) -> Iterator[None]:
        """Inside this context, forward passes return the cached outputs instead of running the cached modules.

        The input must be that of the recorded pass, reduced like the cache (`slice_tokens`, `select_rows`).
        """
        last_output = self._outputs.get(self._earlier_blocks[-1]) if self._earlier_blocks else None
        skipped_blocks = [] if last_output is None else self._earlier_blocks[:-1]
        # One copy for all earlier blocks but the last: nothing reads their outputs.
        shared_output = _clone_output(last_output) if skipped_blocks else None
        for module in skipped_blocks:
            module.forward = lambda *_args, **_kwargs: shared_output
        for module, output in self._outputs.items():
            # The default argument binds this module's output; the loop variable changes.
            module.forward = lambda *_args, _output=output, **_kwargs: _clone_output(_output)
        try:
            yield
        finally:
            for module in (*skipped_blocks, *self._outputs):
                del module.forward  # the attribute of the instance hid the method of the class

    def _modules_before_layer(self) -> list[nn.Module]:
        """The layer and the other modules of its block that may run before it: all but the modules that contain it."""
        assert self._layer_block is not None
        return [
            module
            for module in self._layer_block.modules()
            if module is self._layer or all(part is not self._layer for part in module.modules())
        ]

    def _store(self, recorded: dict[nn.Module, Any]) -> None:
        """Store outputs of shape (B, T, X). Parts of a cached module are left out, because they never run."""
        self._outputs = {}
        covered: set[nn.Module] = set()
        for module in (*self._earlier_blocks[-1:], *([] if self._layer_block is None else self._layer_block.modules())):
            allowed = self._allowed_modules is None or module in self._allowed_modules
            if allowed and module in recorded and module not in covered and _is_token_output(recorded[module]):
                self._outputs[module] = recorded[module]
                covered.update(module.modules())


def pad_and_concat(tensors: Sequence[Tensor], dim: int, *, pad_left: bool = False, pad_value: int = 0) -> Tensor:
    """The rows of several tensors as one tensor, padded along dimension `dim` to the longest."""
    width = max(part.shape[dim] for part in tensors)
    padded = []
    for part in tensors:
        shape = list(part.shape)
        shape[dim] = width - part.shape[dim]
        padding = part.new_full(shape, pad_value)
        padded.append(torch.cat([padding, part] if pad_left else [part, padding], dim=dim))
    return torch.cat(padded)


def _main_output(output: Any) -> Any:
    """The hidden states of a module's output: the first element of a tuple, or the output itself."""
    return output[0] if isinstance(output, tuple) and output else output


def _is_token_output(output: Any) -> bool:
    main_output = _main_output(output)
    return isinstance(main_output, Tensor) and main_output.dim() == 3


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
    """These rows of a module's output. Parts without one element per row, such as shared masks, stay as they are."""
    if type(output) in (tuple, list):
        count = len(output[0])
        return type(output)(
            part[indices] if isinstance(part, Tensor) and len(part) == count > 1 else part for part in output
        )
    return output[indices]
