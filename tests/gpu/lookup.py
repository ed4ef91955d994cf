"""Look-ups against brute force in float64, and how long they take beside simple ones."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from pipeline.index import KeyIndex
from pipeline.key_search import NO_SLOT, KeySearch, TorchSearch, search_for
from tests.bench.codebooks import filled
from tests.bench.device import copy_rate, timed
from tests.bench.framework import Row
from tests.gpu.rig import Case, CheckError, Rig

REAL = ((10_000, 768), (100_000, 768), (100_000, 1536), (1_000_000, 1536))
SMALL = ((1000, 64), (4000, 64))
OFFSETS = {"centred": 0.0, "offset": 10.0}
"""How far the keys' mean is from the origin, in spreads of a coordinate: a bound by norms proves less far from it."""

COPIES = 7
"""Of the keys, that a case has room for: its own, those of two indexes with room to grow, and some to work in."""

BATCHES = (1, 32)
QUERIES = 32
REPEATS = 9
CANDIDATES = 8
CHUNK = 8192
"""Keys that brute force compares at a time."""

NEAR, RADIUS = 0.1, 0.2
"""Of a coordinate's spread, times the root of the width: how far a query is from its key, and a key's radius."""

ROUNDING = 1e-5
"""A distance by differences in float32 is off by less of itself."""


def cases(rig: Rig) -> Iterator[Case]:
    """Codebooks of growing size."""
    for count, width in REAL if rig.real else SMALL:
        for kind, offset in OFFSETS.items():
            copy = 4 * count * width
            run = partial(_case, rig, count, width, kind, offset)
            yield Case(f"{count // 1000}k-x-{width}/{kind}", run, COPIES * copy, COPIES * copy)


def _case(rig: Rig, count: int, width: int, kind: str, offset: float) -> Iterator[Row]:
    device = rig.device
    generator = torch.Generator(device).manual_seed(0)
    keys_ND = torch.randn(count, width, generator=generator, device=device).add_(offset)
    few = QUERIES // 2
    near_BD = keys_ND[:: count // few][:few] + NEAR * torch.randn(few, width, generator=generator, device=device)
    far_BD = torch.randn(QUERIES - few, width, generator=generator, device=device) + offset
    queries_BD = torch.cat([near_BD, far_BD])
    radii_N = np.full(count, RADIUS * width**0.5, np.float32)
    codebook = filled("0" * 64, "layer", keys_ND.cpu().numpy(), radii_N, 1)
    # What the product would not choose here is measured beside it; on a CPU that is the search that a GPU has.
    indexes = {"ours": KeyIndex(codebook, device)}
    indexes |= {name: KeyIndex(codebook, device, search) for name, search in _other_searches(device).items()}
    name, wrong = f"lookup/{count // 1000}k-x-{width}/{kind}", []
    for way, index in indexes.items():
        found = _wrong(index, queries_BD, keys_ND, radii_N)
        yield Row(f"{name}/wrong/{way}", len(found), "count", 0)
        wrong += [f"{way}: {one}" for one in found]
    floor = 1000 * keys_ND.nbytes / copy_rate(device)
    halves_N = torch.linalg.vector_norm(keys_ND, dim=1).square() / 2
    for batch in BATCHES:
        some_BD = queries_BD[:batch]
        ways: dict[str, Callable[[], object]] = {
            **{way: partial(index.covering, some_BD) for way, index in indexes.items()},
            "cdist": partial(_cdist, some_BD, keys_ND),
            "addmm": partial(_addmm, some_BD, keys_ND, halves_N),
        }
        for way, call in ways.items():
            spent = [timed(device, call)[0] for _ in range(2 + rig.turns(REPEATS))][2:]  # the first warm up
            yield Row(f"{name}/batch{batch}/{way}", 1000 * statistics.median(spent), "ms", floor)
    if wrong:
        raise CheckError(f"{len(wrong)} look-ups differ from brute force in float64: {'; '.join(wrong[:3])}")


def _other_searches(device: torch.device) -> dict[str, type[KeySearch]]:
    """That by torch, where the product chooses another one."""
    chosen = search_for(device)
    return {} if chosen is TorchSearch else {"torch": TorchSearch}


def _wrong(index: KeyIndex, queries_BD: torch.Tensor, keys_ND: torch.Tensor, radii_N: np.ndarray) -> list[str]:
    """Every look-up that brute force contradicts, in words."""
    nearest, covering = index.nearest(queries_BD), index.covering(queries_BD)
    wrong = []
    for row, query_D in enumerate(queries_BD):
        slot, distance = _brute_force(query_D, keys_ND)
        found, far, served = int(nearest.slots_B[row]), float(nearest.distances_B[row]), int(covering.slots_B[row])
        expected = slot if distance < radii_N[slot] else NO_SLOT
        if found == NO_SLOT or abs(far - distance) > ROUNDING * distance:
            wrong.append(f"query {row}: nearest key {found} at {far:.9g}, and not {slot} at {distance:.9g}")
        elif served != expected and abs(distance - radii_N[slot]) > ROUNDING * distance:
            wrong.append(f"query {row}: served by {served}, and not by {expected}")
    return wrong


def _brute_force(query_D: torch.Tensor, keys_ND: torch.Tensor) -> tuple[int, float]:
    """The nearest key and its distance, by differences in float64."""
    best = (float("inf"), NO_SLOT)
    for start in range(0, len(keys_ND), CHUNK):
        squares_M = (keys_ND[start : start + CHUNK].double() - query_D.double()).square().sum(dim=1)
        least, place = squares_M.min(dim=0)
        best = min(best, (float(least), start + int(place)))
    return best[1], best[0] ** 0.5


def _cdist(queries_BD: torch.Tensor, keys_ND: torch.Tensor) -> torch.Tensor:
    return torch.cdist(queries_BD, keys_ND).min(dim=1).indices


def _addmm(queries_BD: torch.Tensor, keys_ND: torch.Tensor, halves_N: torch.Tensor) -> torch.Tensor:
    return torch.addmm(-halves_N, queries_BD, keys_ND.T).topk(CANDIDATES, dim=1).indices
