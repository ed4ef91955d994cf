"""Finds a model's modules by path, as the GRACE paper writes them: `encoder.block[4].layer[1].DenseReluDense.wo`."""

import re
from dataclasses import dataclass

from torch import nn

from gracestream.pipeline.errors import UserError


class LayerError(UserError):
    """A layer that does not exist or cannot be edited. The message names existing layers or the reason."""


@dataclass(frozen=True, slots=True)
class RepeatedLayer:
    """Modules that differ only in the number of their block.

    Attributes:
        path: Their path with `*` in place of the block's number.
        count: Number of modules.
        kind: Class name of the modules.
        shape: Shape of the first module's weight.
    """

    path: str
    count: int
    kind: str
    shape: tuple[int, ...]


def normalize_path(path: str) -> str:
    """A path in torch's notation without the parameter's name: `a.block[4].wo.weight` becomes `a.block.4.wo`."""
    return re.sub(r"\[(\d+)\]", r".\1", path.strip()).removesuffix(".weight").removesuffix(".bias")


def find_layer(model: nn.Module, path: str) -> nn.Module:
    """The module at `path`.

    Raises:
        LayerError: no such module exists, or it is a list of blocks; the message lists existing paths.
    """
    normalized = normalize_path(path)
    try:
        module = model.get_submodule(normalized) if normalized else model
    except AttributeError:
        module = model
    if module is model:
        raise LayerError(
            f"layer {path!r} not found in {type(model).__name__}; it has {_suggest_paths(model, normalized)}"
        )
    if isinstance(module, nn.ModuleList):
        raise LayerError(
            f"layer {path!r} is a list of {len(module)} blocks; name one: {normalized}.0 … .{len(module) - 1}"
        )
    return module


def linear_layers(model: nn.Module) -> list[RepeatedLayer]:
    """The linear layers inside numbered blocks, which the paper and this project edit."""
    modules_by_path: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        # Conv1D is transformers' linear layer with a transposed weight (GPT-2).
        is_linear = "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"
        if is_linear and weight is not None and weight.dim() == 2 and re.search(r"\.\d+\.", name):
            modules_by_path.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1), []).append(module)
    return [
        RepeatedLayer(path, len(modules), type(modules[0]).__name__, tuple(modules[0].weight.shape))  # type: ignore[arg-type]
        for path, modules in modules_by_path.items()
    ]


def is_in_decoder(path: str) -> bool:
    """True if a layer of an encoder-decoder is in the decoder, which does not see the prompt's tokens."""
    return "decoder" in normalize_path(path).split(".")


def enclosing_blocks(model: nn.Module, path: str) -> tuple[list[nn.Module], int]:
    """The blocks of the stack that contains `path`, in order, and the index of the enclosing block.

    `([], 0)` for a module outside any stack of blocks.
    """
    module: nn.Module = model
    for part in normalize_path(path).split("."):
        if isinstance(module, nn.ModuleList):
            return list(module), int(part)
        module = module.get_submodule(part)
    return [], 0


def _suggest_paths(model: nn.Module, path: str) -> str:
    """The existing children at the first unknown part of `path`, or the stacks of blocks, as text for a message."""
    module, prefix = model, ""
    for part in path.split("."):
        children = dict(module.named_children())
        if part not in children:
            break
        module, prefix = children[part], f"{prefix}{part}."
    names = [prefix + name for name, _ in module.named_children()]
    if isinstance(module, nn.ModuleList) and names:
        return f"{names[0]} … {names[-1]}"
    if prefix or len(names) > 3:
        return ", ".join(names)
    stacks = [(name, child) for name, child in model.named_modules() if isinstance(child, nn.ModuleList)]
    return ", ".join(f"{name}.0 … {name}.{len(child) - 1}" for name, child in stacks[:4]) or ", ".join(names)
