"""Names of a model's modules, as the paper writes them: `encoder.block[4].layer[1].DenseReluDense.wo`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipeline.errors import UserError


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


def blocks_before(model: nn.Module, path: str) -> list[nn.Module]:
    """The blocks that run before the one that holds `path`, in order; their outputs never depend on a value there."""
    parts = normal_path(path).split(".")
    module: nn.Module = model
    for part in parts:
        if isinstance(module, nn.ModuleList):
            return list(module)[: int(part)]
        module = module.get_submodule(part)
    return []


class Prefix:
    """The outputs of the blocks before the edited one, taken from one forward pass and given back in later ones."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._output: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the last of the blocks puts out in the forward pass inside."""
        if not self._blocks:
            yield
            return

        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            self._output = output

        handle = self._blocks[-1].register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def cut(self, tokens: int) -> None:
        """Keep the last tokens only: later passes are over these."""
        if isinstance(self._output, tuple):
            self._output = (self._output[0][:, -tokens:], *self._output[1:])
        elif self._output is not None:
            self._output = self._output[:, -tokens:]

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Forward passes inside, on the same input or what was not cut of it, leave the blocks out."""
        if self._blocks and self._output is None:
            raise RuntimeError("nothing was recorded")
        for block in self._blocks:
            block.forward = lambda *_args, **_kwargs: self._output
        try:
            yield
        finally:
            for block in self._blocks:
                del block.forward


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
