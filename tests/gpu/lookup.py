"""Lookups: checked against brute force in float64, and timed beside simple methods."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.search.key_search import NO_SLOT, KeySearch, TorchSearch, search_class_for
from tests.bench.codebooks import filled
from tests.bench.device import copy_rate, timed
from tests.bench.framework import Row
from tests.gpu.rig import Case, CheckError, Rig

REAL = ((10_000, 768), (100_000, 768), (100_000, 1536), (1_000_000, 1536))
SMALL = ((1000, 64), (4000, 64))
OFFSETS = {"centred": 0.0, "offset": 10.0}
"""Distance of the keys' mean from the origin, in standard deviations. Bounds by norms are weaker far from it."""

KEY_COPIES = 5
"""Copies of the keys in memory: the case's own, an index with room to grow, and working space."""

BATCHES = (1, 32)
QUERIES = 32
REPEATS = 9
CANDIDATES = 8
CHUNK = 8192
"""Keys that brute force compares at once."""

QUERY_SPREAD, RADIUS = 0.1, 0.2
"""Distance of a query from its key, and radius, relative to a coordinate's spread times the root of the width."""

ROUNDING = 1e-5
"""Upper bound of the relative error of a distance by differences in float32."""


def cases(rig: Rig) -> Iterator[Case]:
    """The copy rate for the floors, then codebooks of growing size."""
    yield Case("copy", partial(_copy, rig.device))
    for count, width in REAL if rig.real else SMALL:
        for kind, offset in OFFSETS.items():
            copy = 4 * count * width
            run = partial(_case, rig, count, width, kind, offset)
            yield Case(f"{count // 1000}k-x-{width}/{kind}", run, host_bytes=2 * copy, device_bytes=KEY_COPIES * copy)


def _copy(device: torch.device) -> Iterator[Row]:
    yield Row("lookup/copy/gigabytes-per-second", copy_rate(device) / 1e9, "GB/s")


def _case(rig: Rig, count: int, width: int, kind: str, offset: float) -> Iterator[Row]:
    device = rig.device
    generator = torch.Generator(device).manual_seed(0)
    keys_ND = torch.randn(count, width, generator=generator, device=device).add_(offset)
    near_count = QUERIES // 2
    near_BD = keys_ND[:: count // near_count][:near_count] + QUERY_SPREAD * torch.randn(
        near_count, width, generator=generator, device=device
    )
    far_BD = torch.randn(QUERIES - near_count, width, generator=generator, device=device) + offset
    queries_BD = torch.cat([near_BD, far_BD])
    radii_N = np.full(count, RADIUS * width**0.5, np.float32)
    codebook = filled("0" * 64, "layer", keys_ND.cpu().numpy(), radii_N, 1)
    name, mismatches = f"lookup/{count // 1000}k-x-{width}/{kind}", []
    floor = 1000 * keys_ND.nbytes / copy_rate(device)
    for search_name, search in _searches(device).items():
        index = KeyIndex(codebook, device, search)
        found = _mismatches(index, queries_BD, keys_ND, radii_N)
        mismatches += [f"{search_name}: {one}" for one in found]
        yield Row(f"{name}/wrong/{search_name}", len(found), "count", 0)
        for batch in BATCHES:
            milliseconds = _milliseconds(rig, partial(index.nearest_within_radius, queries_BD[:batch]))
            yield Row(f"{name}/batch{batch}/{search_name}", milliseconds, "ms", floor)
        del index  # a device may lack room for two
    halves_N = torch.linalg.vector_norm(keys_ND, dim=1).square() / 2
    for batch in BATCHES:
        cdist = partial(_cdist, queries_BD[:batch], keys_ND)
        yield Row(f"{name}/batch{batch}/cdist", _milliseconds(rig, cdist), "ms", floor)
        addmm = partial(_addmm, queries_BD[:batch], keys_ND, halves_N)
        yield Row(f"{name}/batch{batch}/addmm", _milliseconds(rig, addmm), "ms", floor)
    if mismatches:
        raise CheckError(f"{len(mismatches)} lookups differ from brute force in float64: {'; '.join(mismatches[:3])}")


def _milliseconds(rig: Rig, call: Callable[[], object]) -> float:
    seconds = [timed(rig.device, call)[0] for _ in range(2 + rig.repeats(REPEATS))]
    return 1000 * statistics.median(seconds[2:])  # the first two warm up


def _searches(device: torch.device) -> dict[str, type[KeySearch] | None]:
    """The product's choice (None), and torch's search if the product chooses another one. GPUs use torch's."""
    return {"ours": None} if search_class_for(device) is TorchSearch else {"ours": None, "torch": TorchSearch}


def _mismatches(index: KeyIndex, queries_BD: torch.Tensor, keys_ND: torch.Tensor, radii_N: np.ndarray) -> list[str]:
    """A description of each lookup that differs from brute force."""
    nearest, match = index.nearest(queries_BD), index.nearest_within_radius(queries_BD)
    mismatches = []
    for row, query_D in enumerate(queries_BD):
        slot, distance = _brute_force(query_D, keys_ND)
        found, found_distance, served = (
            int(nearest.slots_B[row]),
            float(nearest.distances_B[row]),
            int(match.slots_B[row]),
        )
        expected = slot if distance < radii_N[slot] else NO_SLOT
        if found == NO_SLOT or abs(found_distance - distance) > ROUNDING * distance:
            mismatches.append(
                f"query {row}: nearest key {found} at {found_distance:.9g} instead of {slot} at {distance:.9g}"
            )
        elif served != expected and abs(distance - radii_N[slot]) > ROUNDING * distance:
            mismatches.append(f"query {row}: served by {served} instead of {expected}")
    return mismatches


def _brute_force(query_D: torch.Tensor, keys_ND: torch.Tensor) -> tuple[int, float]:
    """The nearest key and its distance, by differences in float64."""
    best = (float("inf"), NO_SLOT)
    for start in range(0, len(keys_ND), CHUNK):
        squares_M = (keys_ND[start : start + CHUNK].double() - query_D.double()).square().sum(dim=1)
        square, place = squares_M.min(dim=0)
        best = min(best, (float(square), start + int(place)))
    return best[1], best[0] ** 0.5


def _cdist(queries_BD: torch.Tensor, keys_ND: torch.Tensor) -> torch.Tensor:
    return torch.cdist(queries_BD, keys_ND).min(dim=1).indices


def _addmm(queries_BD: torch.Tensor, keys_ND: torch.Tensor, halves_N: torch.Tensor) -> torch.Tensor:
    return torch.addmm(-halves_N, queries_BD, keys_ND.T).topk(CANDIDATES, dim=1).indices
