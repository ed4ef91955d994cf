"""Names of a model's modules, as the paper writes them: `encoder.block[4].layer[1].DenseReluDense.wo`."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from gracestream.pipeline.errors import UserError


class LayerError(UserError):
    """No such layer, or one that cannot be edited; the text names the layers there are."""


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Modules that differ in nothing but the number of their block: `path` with `*` for the number, and how many."""

    path: str
    count: int
    kind: str
    shape: tuple[int, ...]


def normal_path(path: str) -> str:
    """`a.block[4].wo.weight` as torch names the module: `a.block.4.wo`."""
    return re.sub(r"\[(\d+)\]", r".\1", path.strip()).removesuffix(".weight").removesuffix(".bias")


def find_layer(model: nn.Module, path: str) -> nn.Module:
    """The module at `path`.

    Raises:
        LayerError: there is none; the text lists the nearest that exist.
    """
    normal = normal_path(path)
    try:
        module = model.get_submodule(normal) if normal else model
    except AttributeError:
        module = model
    if module is model:
        raise LayerError(f"layer {path!r} not found in {type(model).__name__}; it has {_alternatives(model, normal)}")
    if isinstance(module, nn.ModuleList):
        raise LayerError(f"layer {path!r} is a list of {len(module)} blocks; name one: {normal}.0 … .{len(module) - 1}")
    return module


def linear_layers(model: nn.Module) -> list[LayerRange]:
    """The linear maps of the blocks: the layers that the paper and this project edit."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        linear = "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"
        if linear and weight is not None and weight.dim() == 2 and re.search(r"\.\d+\.", name):
            found.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1), []).append(module)
    return [
        LayerRange(path, len(modules), type(modules[0]).__name__, tuple(modules[0].weight.shape))  # type: ignore[arg-type]
        for path, modules in found.items()
    ]


def in_decoder(path: str) -> bool:
    """Whether a layer of an encoder-decoder lies in its decoder, which sees one token where the encoder sees all."""
    return "decoder" in normal_path(path).split(".")


def block_list(model: nn.Module, path: str) -> tuple[list[nn.Module], int]:
    """The blocks of the stack that holds `path`, in order, and the number of the one that does; none outside of one."""
    module: nn.Module = model
    for part in normal_path(path).split("."):
        if isinstance(module, nn.ModuleList):
            return list(module), int(part)
        module = module.get_submodule(part)
    return [], 0


class Prefix:
    """The outputs of what runs before the edited layer, taken from one forward pass and given back in later ones.

    That are the blocks before the one that holds it, what that block runs once and before it, and the layer's own
    output: they depend on no value there. (A value overwrites the same tokens of that output each time.) Copies are
    kept and given, since some models add to what a module put out.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module] = (),
        block: nn.Module | None = None,
        layer: Any = None,
        only: Collection[nn.Module] | None = None,
        outputs: Mapping[nn.Module, Any] | None = None,
    ) -> None:
        self._blocks, self._block, self._layer, self._only = blocks, block, layer, only
        self._outputs = dict(outputs or {})

    @classmethod
    def of(cls, model: nn.Module, path: str, only: Collection[nn.Module] | None = None) -> Self:
        """What runs before the layer at `path`, of these modules only; nothing, where that is in no stack of blocks."""
        blocks, number = block_list(model, path)
        return cls(blocks[:number], blocks[number], model.get_submodule(path), only) if blocks else cls()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what they put out in the forward pass inside."""
        found: dict[nn.Module, list[Any]] = {}
        reached: list[nn.Module] = []

        def keep(module: nn.Module, _args: Any, output: Any) -> None:
            early = not reached or module in (self._layer, *self._blocks)
            found.setdefault(module, []).append(_copied(output) if early else None)

        inner = [] if self._block is None else self._before()
        handles = [module.register_forward_hook(keep) for module in (*self._blocks[-1:], *inner)]
        if self._layer is not None:
            handles.append(self._layer.register_forward_pre_hook(lambda module, _args: reached.append(module)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        once = {module: outputs[0] for module, outputs in found.items() if len(outputs) == 1}
        self._take({module: output for module, output in once.items() if output is not None})

    def holds(self, module: nn.Module) -> bool:
        """Whether this module's output was recorded, so that it does not run again."""
        return module in self._outputs

    def cut(self, tokens: slice) -> None:
        """Keep these tokens only: later passes are over them."""
        self._outputs = {module: _cut(output, tokens) for module, output in self._outputs.items()}

    def rows(self, kept: Sequence[int]) -> Self:
        """Some of the rows: later passes are over them."""
        outputs = {module: _rows(output, list(kept)) for module, output in self._outputs.items()}
        return type(self)(self._blocks, self._block, self._layer, self._only, outputs)

    @property
    def kept(self) -> Mapping[nn.Module, Any]:
        """What was recorded, by the module that put it out."""
        return self._outputs

    def joined(self, others: Sequence[Self]) -> Self | None:
        """This pass and others as one, each row padded on the right; None where that cannot be done."""
        outputs: dict[nn.Module, Any] = {}
        if any(other.kept.keys() != self._outputs.keys() for other in others):
            return None
        for module in self._outputs:
            found = [part.kept[module] for part in (self, *others)]
            if not all(isinstance(output, Tensor) and output.dim() == 3 for output in found):
                return None
            outputs[module] = stacked(found, dim=1)
        return type(self)(self._blocks, self._block, self._layer, self._only, outputs)

    def of_rows(self) -> set[nn.Module]:
        """Of a pass over one row of several tokens: the modules that put out something for each row."""
        firsts = {module: _first(output) for module, output in self._outputs.items()}
        return {module for module, first in firsts.items() if len(first) == 1}

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Forward passes inside, on the same input or what was not cut of it, leave all that out."""
        last = self._outputs.get(self._blocks[-1]) if self._blocks else None
        early = [] if last is None else self._blocks[:-1]
        unread = _copied(last) if early else None  # one copy for all of them: only the last block's output is read
        for module in early:
            module.forward = lambda *_args, **_kwargs: unread
        for module, output in self._outputs.items():
            module.forward = lambda *_args, _output=output, **_kwargs: _copied(_output)
        try:
            yield
        finally:
            for module in (*early, *self._outputs):
                del module.forward

    def _before(self) -> list[nn.Module]:
        """The modules of the block that may run before the layer: all but those that it is a part of; and itself."""
        assert self._block is not None
        return [
            m for m in self._block.modules() if m is self._layer or all(part is not self._layer for part in m.modules())
        ]

    def _take(self, found: dict[nn.Module, Any]) -> None:
        """Keep the outputs of tokens (B, T, X); of a module that is kept, what it is made of never runs."""
        self._outputs = {}
        covered: set[nn.Module] = set()
        for module in (*self._blocks[-1:], *([] if self._block is None else self._block.modules())):
            allowed = self._only is None or module in self._only
            if allowed and module in found and module not in covered and _is_of_tokens(found[module]):
                self._outputs[module] = found[module]
                covered.update(module.modules())


def stacked(parts: Sequence[Tensor], dim: int, *, left: bool = False, padding: int = 0) -> Tensor:
    """The rows of several tensors as one, padded along another dimension to the longest."""
    width = max(part.shape[dim] for part in parts)
    padded = []
    for part in parts:
        shape = list(part.shape)
        shape[dim] = width - part.shape[dim]
        more = part.new_full(shape, padding)
        padded.append(torch.cat([more, part] if left else [part, more], dim=dim))
    return torch.cat(padded)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _is_of_tokens(output: Any) -> bool:
    first = _first(output)
    return isinstance(first, Tensor) and first.dim() == 3


def _copied(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.clone()
    if type(output) in (tuple, list):
        return type(output)(_copied(part) for part in output)
    return output


def _cut(output: Any, tokens: slice) -> Any:
    if isinstance(output, tuple):
        return (output[0][:, tokens], *output[1:])
    return output[:, tokens]


def _rows(output: Any, kept: list[int]) -> Any:
    """Of what a module put out for some rows; what it put out once for all of them stays."""
    if type(output) in (tuple, list):
        count = len(output[0])
        return type(output)(
            part[kept] if isinstance(part, Tensor) and len(part) == count > 1 else part for part in output
        )
    return output[kept]


def _alternatives(model: nn.Module, path: str) -> str:
    """The siblings at the first part of `path` that does not exist, in a form a person can pick from."""
    module, known = model, ""
    for part in path.split("."):
        children = dict(module.named_children())
        if part not in children:
            break
        module, known = children[part], f"{known}{part}."
    names = [known + name for name, _ in module.named_children()]
    if isinstance(module, nn.ModuleList) and names:
        return f"{names[0]} … {names[-1]}"
    if known or len(names) > 3:
        return ", ".join(names)
    lists = [(name, child) for name, child in model.named_modules() if isinstance(child, nn.ModuleList)]
    return ", ".join(f"{name}.0 … {name}.{len(child) - 1}" for name, child in lists[:4]) or ", ".join(names)
