"""Measure the numerical noise of queries: how far batches, padding and devices move the query of one input.

A key is the query of an input that the editor ran alone. Queries within the numerical tolerance of it count as the same
input (`pipeline.codebook.policy.DTYPE_TOLERANCES`). This module measures whether the tolerance covers the noise. It
compares batches on one device, or several devices, such as an editor on a GPU with replicas on CPUs.

Not promised: a bound. Other inputs, thread counts and processors may move a query farther than these.
"""

from collections.abc import Sequence
from itertools import cycle, islice

from msgspec import Struct
from torch import Tensor, cat, stack, tensor

from gracestream.pipeline.codebook import match_tolerance
from gracestream.pipeline.model import PROBE_TEXTS, EditableModel, Prompt
from gracestream.schemas.messages import Inputs

BATCH_SIZES = (1, 2, 32)
"""Sizes of the batches in which each input is queried. Larger ones mix longer and shorter inputs."""


class NumericalNoise(Struct, frozen=True):
    """The measured distances between queries and keys of the same inputs.

    Attributes:
        dtype: The dtype of the queries.
        devices: The device types of the models; the first model provides the keys, as an editor does.
        inputs: The number of inputs.
        relative: The largest distance, relative to the norm of the key.
        absolute: The largest distance.
        of_tolerance: The largest distance, relative to the tolerance; above 1 the tolerance is too small.
    """

    dtype: str
    devices: tuple[str, ...]
    inputs: int
    relative: float
    absolute: float
    of_tolerance: float


def measure_query_noise(*models: EditableModel, inputs: Sequence[Inputs] = PROBE_TEXTS) -> NumericalNoise:
    """Measure the queries of these inputs on one model, or between copies of one model on several devices.

    The keys are the queries of the first model in batches of one.

    Raises:
        InputError: a model cannot take one of the inputs.
    """
    keys_ND, *variants = [variant_ND for model in models for variant_ND in _query_variants(model, inputs)]
    far_N = stack([(variant_ND - keys_ND).norm(dim=1) for variant_ND in variants]).amax(dim=0)
    norms_N = keys_ND.norm(dim=1)
    dtype = models[0].query_dtype
    shares = [far / match_tolerance(norm, dtype) for far, norm in zip(far_N.tolist(), norms_N.tolist(), strict=True)]
    return NumericalNoise(
        dtype=dtype,
        devices=tuple(model.device.type for model in models),
        inputs=len(inputs),
        relative=float((far_N / norms_N).max()),
        absolute=float(far_N.max()),
        of_tolerance=float(tensor(shares).max()),  # Python's max may skip a NaN; the tensor's returns it
    )


def _query_variants(model: EditableModel, inputs: Sequence[Inputs]) -> list[Tensor]:
    """The queries (N, D; float64, on the CPU) of each input alone, in larger batches, and padded to the longest one."""
    prompts = [model.task.tokenize(prompt_inputs) for prompt_inputs in inputs]
    longest = max(prompts, key=len)
    batched = [
        cat([_compute_queries(model, batch)[:1] for batch in _cyclic_batches(prompts, size)]) for size in BATCH_SIZES
    ]
    return [*batched, cat([_compute_queries(model, [prompt, longest])[:1] for prompt in prompts])]


def _cyclic_batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """For each prompt a batch that starts with it and goes on with the following prompts, cyclically."""
    return [list(islice(cycle([*prompts[start:], *prompts[:start]]), size)) for start in range(len(prompts))]


def _compute_queries(model: EditableModel, prompts: Sequence[Prompt]) -> Tensor:
    """The queries (N, D) of one batch in float64, so that differences add no rounding of their own."""
    return model.queries(prompts).cpu().double()
