"""How far a query moves with what else is in its batch, and between devices, beside what the product assumes."""

import copy
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from pipeline.batch import Prompt
from pipeline.maintenance import ROUNDINGS, batch_noise
from pipeline.model import EditableModel
from tests.bench.framework import Row
from tests.bench.random_models import RandomModel, prompts
from tests.gpu.rig import Case, CheckError, Rig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENS, LONGER = 20, 60
PROMPTS = 32
RADIUS = 2
"""Tolerances that every radius has at least; a query within one of them even counts as the same input."""

ON_CPU = 4
"""Prompts that the CPU sees too: GPT2-XL takes it seconds each in a type that it has no instructions for."""


def cases(rig: Rig) -> Iterator[Case]:
    """Each model in each type."""
    for model in rig.models():
        for name, dtype in DTYPES.items():
            yield Case(f"{model.name}/{name}", partial(_case, rig, model, name, dtype))


def _case(rig: Rig, shape: RandomModel, dtype: str, torch_dtype: torch.dtype) -> Iterator[Row]:
    module = shape.module(rig.device, torch_dtype)
    on_cpu = shape.editable(copy.deepcopy(module).cpu()) if rig.cuda else None
    model = shape.editable(module)
    asked = prompts(model, PROMPTS, TOKENS)
    (longer,) = prompts(model, 1, LONGER, seed=1)
    alone_BD = _in_batches(model, asked, 1)
    ways = {
        "batch-of-2": _in_batches(model, asked, 2),
        f"batch-of-{PROMPTS}": _in_batches(model, asked, PROMPTS),
        "padded": torch.cat([model.queries([prompt, longer])[:1] for prompt in asked]),
        "again": _in_batches(model, asked, 1),
    }
    name, too_far = f"tolerance/{shape.name}/{dtype}", []
    if on_cpu is not None:
        there_BD = _in_batches(on_cpu, asked[:ON_CPU], 1).to(rig.device)
        moved = [_moved(found_BD[:ON_CPU], there_BD, dtype) for found_BD in (alone_BD, *ways.values())]
        share, of_assumed = (max(numbers) for numbers in zip(*moved, strict=True))
        yield Row(f"{name}/cpu", share, "relative", ROUNDINGS[dtype])
        too_far += _complaint("on the CPU", share, of_assumed, dtype)
    for way, found_BD in ways.items():
        share, of_assumed = _moved(found_BD, alone_BD, dtype)
        yield Row(f"{name}/{way}", share, "relative", ROUNDINGS[dtype])
        too_far += _complaint(way, share, of_assumed, dtype)
    if too_far:
        raise CheckError("; ".join(too_far))


def _in_batches(model: EditableModel, asked: Sequence[Prompt], size: int) -> torch.Tensor:
    """The queries (B, D) of prompts that come so many at a time."""
    return torch.cat([model.queries(asked[start : start + size]) for start in range(0, len(asked), size)])


def _moved(found_BD: torch.Tensor, expected_BD: torch.Tensor, dtype: str) -> tuple[float, float]:
    """The largest distance as a share of the query's norm, and of the product's tolerance."""
    distances_B, norms_B = (found_BD - expected_BD).norm(dim=1).cpu(), expected_BD.norm(dim=1).cpu()
    allowed = [batch_noise(norm, dtype) for norm in norms_B.tolist()]
    return float((distances_B / norms_B).max()), float((distances_B / torch.tensor(allowed)).max())


def _complaint(way: str, share: float, of_assumed: float, dtype: str) -> list[str]:
    """One sentence where a query may move out of the radius of its own key, or is not finite."""
    if of_assumed <= RADIUS:  # which is false where it is not a number
        return []
    assumed = f"ROUNDINGS[{dtype!r}], which is {ROUNDINGS[dtype]:.3g}"
    return [f"{way}: a query moves by {share:.3g} of its norm, {of_assumed:.3g} times the tolerance; raise {assumed}"]
