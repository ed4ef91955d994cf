"""The noise of queries: how far a batch, its padding and the device move the query of one input.

A key is the query of an input that the editor ran alone. Queries within the tolerance of it count as the same input
(`pipeline.codebook.policy.ROUNDINGS`). This measures whether the tolerance covers the noise: on one device, or between
devices where an editor on a GPU serves replicas on CPUs.
"""

from collections.abc import Sequence
from itertools import cycle, islice

from msgspec import Struct
from torch import Tensor, cat, stack, tensor

from gracestream.pipeline.codebook import match_tolerance
from gracestream.pipeline.model import PROBE_TEXTS, EditableModel, Prompt
from gracestream.schemas.messages import Inputs

BATCH_SIZES = (1, 2, 32)
"""Rows of the batches that each input is queried in. In larger ones it stands beside longer and shorter inputs."""


class NumericalNoise(Struct, frozen=True):
    """What was measured.

    Attributes:
        dtype: Of the queries.
        devices: Of the models, the editor's first.
        inputs: How many were measured.
        relative: The largest distance of a query from the key of the same input, in parts of the key's norm.
        absolute: The largest such distance.
        of_tolerance: The largest such distance, in parts of the tolerance; above 1 the tolerance is too small.
    """

    dtype: str
    devices: tuple[str, ...]
    inputs: int
    relative: float
    absolute: float
    of_tolerance: float


def measure_query_noise(*models: EditableModel, inputs: Sequence[Inputs] = PROBE_TEXTS) -> NumericalNoise:
    """Measure the queries of these inputs, on one model or between copies of one model on several devices.

    The keys are those of the first model.

    Raises:
        InputError: an input that a model cannot take.
    """
    keys_ND, *ways = [way_ND for model in models for way_ND in _query_variants(model, inputs)]
    far_N = stack([(way_ND - keys_ND).norm(dim=1) for way_ND in ways]).amax(dim=0)
    norms_N = keys_ND.norm(dim=1)
    dtype = models[0].query_dtype
    shares = [far / match_tolerance(norm, dtype) for far, norm in zip(far_N.tolist(), norms_N.tolist(), strict=True)]
    return NumericalNoise(
        dtype=dtype,
        devices=tuple(model.device.type for model in models),
        inputs=len(inputs),
        relative=float((far_N / norms_N).max()),
        absolute=float(far_N.max()),
        of_tolerance=float(tensor(shares).max()),  # Python's max passes over what is not a number
    )


def _query_variants(model: EditableModel, inputs: Sequence[Inputs]) -> list[Tensor]:
    """The queries (N, D), float64, on the host: of each input alone, in batches, and beside the longest one."""
    prompts = [model.task.tokenize(one) for one in inputs]
    longest = max(prompts, key=len)
    batched = [
        cat([_compute_queries(model, batch)[:1] for batch in _cyclic_batches(prompts, size)]) for size in BATCH_SIZES
    ]
    return [*batched, cat([_compute_queries(model, [prompt, longest])[:1] for prompt in prompts])]


def _cyclic_batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """For each prompt a batch that it is the first of; the next ones follow, over and over."""
    return [list(islice(cycle([*prompts[place:], *prompts[:place]]), size)) for place in range(len(prompts))]


def _compute_queries(model: EditableModel, prompts: Sequence[Prompt]) -> Tensor:
    return model.queries(prompts).cpu().double()
