"""Names of a model's modules, as the paper writes them: `encoder.block[4].layer[1].DenseReluDense.wo`."""

import re
from dataclasses import dataclass

from torch import nn

from gracestream.pipeline.errors import UserError


class LayerError(UserError):
    """No such layer, or one that cannot be edited; the text names the layers there are."""


@dataclass(frozen=True, slots=True)
class RepeatedLayer:
    """Modules that differ in nothing but the number of their block: `path` with `*` for the number, and how many."""

    path: str
    count: int
    kind: str
    shape: tuple[int, ...]


def normalize_path(path: str) -> str:
    """`a.block[4].wo.weight` as torch names the module: `a.block.4.wo`."""
    return re.sub(r"\[(\d+)\]", r".\1", path.strip()).removesuffix(".weight").removesuffix(".bias")


def find_layer(model: nn.Module, path: str) -> nn.Module:
    """The module at `path`.

    Raises:
        LayerError: there is none; the text lists the nearest that exist.
    """
    normal = normalize_path(path)
    try:
        module = model.get_submodule(normal) if normal else model
    except AttributeError:
        module = model
    if module is model:
        raise LayerError(f"layer {path!r} not found in {type(model).__name__}; it has {_suggest_paths(model, normal)}")
    if isinstance(module, nn.ModuleList):
        raise LayerError(f"layer {path!r} is a list of {len(module)} blocks; name one: {normal}.0 … .{len(module) - 1}")
    return module


def linear_layers(model: nn.Module) -> list[RepeatedLayer]:
    """The linear maps of the blocks: the layers that the paper and this project edit."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        linear = "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"
        if linear and weight is not None and weight.dim() == 2 and re.search(r"\.\d+\.", name):
            found.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1), []).append(module)
    return [
        RepeatedLayer(path, len(modules), type(modules[0]).__name__, tuple(modules[0].weight.shape))  # type: ignore[arg-type]
        for path, modules in found.items()
    ]


def is_in_decoder(path: str) -> bool:
    """Whether a layer of an encoder-decoder lies in its decoder, which sees one token where the encoder sees all."""
    return "decoder" in normalize_path(path).split(".")


def enclosing_blocks(model: nn.Module, path: str) -> tuple[list[nn.Module], int]:
    """The blocks of the stack that holds `path`, in order, and the number of the one that does; none outside of one."""
    module: nn.Module = model
    for part in normalize_path(path).split("."):
        if isinstance(module, nn.ModuleList):
            return list(module), int(part)
        module = module.get_submodule(part)
    return [], 0


def _suggest_paths(model: nn.Module, path: str) -> str:
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
