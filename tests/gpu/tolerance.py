"""Movement of a query with the rest of its batch, and between devices, compared with the product's tolerance."""

import copy
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from gracestream.pipeline.codebook.policy import DTYPE_TOLERANCES
from gracestream.pipeline.editing.tolerance import measure_query_noise
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from tests.bench.framework import Row
from tests.bench.random_models import RandomModel, texts
from tests.gpu.rig import Case, CheckError, Rig, smollm2

DTYPES = ("float32", "bfloat16", "float16")
TOKENS, LONG_TOKENS = 20, 60
INPUTS = 24
CPU_INPUTS = 4
"""Inputs that also run on the CPU, which takes far longer."""

MIN_RADIUS = 2
"""Every radius is at least this many tolerances. A query within one tolerance counts as the same input."""


def cases(rig: Rig) -> Iterator[Case]:
    """Each model in each data type. SmolLM2 has trained weights."""
    for dtype in DTYPES:
        for shape in rig.models():
            yield Case(f"{shape.name}/{dtype}", partial(_random, rig, shape, dtype))
        if rig.real:
            yield Case(f"smollm2/{dtype}", partial(_trained, rig, dtype))


def _random(rig: Rig, shape: RandomModel, dtype: str) -> Iterator[Row]:
    module = shape.module(rig.device, getattr(torch, dtype))
    models = [shape.editable(module)]
    if rig.cuda:
        models.append(shape.editable(copy.deepcopy(module).cpu()))
    inputs = texts(models[0], rig.count(INPUTS), TOKENS) + texts(models[0], 1, LONG_TOKENS)
    yield from _case(shape.name, models, inputs)


def _trained(rig: Rig, dtype: str) -> Iterator[Row]:
    devices = ["cuda", "cpu"] if rig.cuda else ["cpu"]
    models = [smollm2(torch.device(device), dtype=dtype) for device in devices]
    yield from _case("smollm2", models, PROBE_TEXTS[:INPUTS])


def _case(name: str, models: Sequence[EditableModel], inputs: Sequence[str]) -> Iterator[Row]:
    """The rows of a model on the device, and of its copy on the CPU if there is one."""
    dtype, errors = models[0].query_dtype, []
    noise_by_comparison = {"own-device": measure_query_noise(models[0], inputs=inputs)}
    if len(models) > 1:
        noise_by_comparison["with-cpu"] = measure_query_noise(*models, inputs=inputs[-CPU_INPUTS:])
    for comparison, noise in noise_by_comparison.items():
        path = f"tolerance/{name}/{dtype}/{comparison}"
        yield Row(f"{path}/relative", noise.relative, "relative", DTYPE_TOLERANCES[dtype])
        yield Row(f"{path}/of-tolerance", noise.of_tolerance, "x", 1)
        if not noise.of_tolerance <= MIN_RADIUS:  # also true for NaN
            errors.append(
                f"{comparison}: a query moves by {noise.relative:.3g} of its norm, {noise.of_tolerance:.3g} times the"
                f" tolerance; raise DTYPE_TOLERANCES[{dtype!r}] (now {DTYPE_TOLERANCES[dtype]:.3g})"
            )
    if errors:
        raise CheckError("; ".join(errors))
