"""What the codebook costs an inference, beside the unedited model and beside a textbook GRACE.

One forward pass over prompts (and for generators the first token), one thread, CPU seconds of the process; on a GPU
synchronised wall time. The three
take turns on each batch: a ratio is the median of those of single batches, and so is `lookup`, a difference. Prompts
are questions of people's for the models that are trained, and random tokens for those of random weights. Keys are
queries of other such prompts, and beyond `KEYS` of them points between two of these, so that they lie where queries do
(`real`); or drawn at random with their mean and spread, which leaves nothing to project on (`random`). A radius is 0.8
of the distance to the nearest of 512 other queries, and the median of those at most, as the editor's defaults have it.
`recall` is the share of prompts for which the answer is that of brute force in float64: the same entry, or none. The
goals are 1.03 times the unedited model at 10,000 keys, 1.05 at 100,000 and 1.15 at a million.

`lookup` is held against its floor: the time in which this machine multiplies a batch with what has to be read, and
looks at each product once. Of `real` keys that is a code of 64 bytes each, of `random` ones, which codes hardly rule
out, the key itself, in float32 or bfloat16. `empty` is a codebook with no keys: what the hook and its Python cost.

Goals that are missed: of a model that answers in 8 ms 3 % are 0.24 ms, which `empty` alone takes. Of random weights
most keys have to be read, and from 100,000 keys on that floor is more than the goal. Tried without gain: blocks of a
k-d tree, of which 60 to 80 % have to be looked at.
"""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import sub, truediv

import numpy as np
import torch

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.search.key_search import NO_SLOT
from gracestream.pipeline.search.quantized_bounds import int8_matmul
from gracestream.schemas.messages import Parameters
from tests.bench.codebooks import codebook_of, queries, stored
from tests.bench.device import copy_rate, timed
from tests.bench.framework import Options, Row
from tests.bench.models import MODELS, select_models
from tests.bench.textbook import TextbookGrace

REAL_KEYS, OTHER_QUERIES = 2048, 512
CHECKED_PROMPTS = 64
COUNTS = {"10k": 10_000, "100k": 100_000, "1M": 1_000_000}
BATCHES = (1, 32)
REPEATS = {1: 80, 32: 8}
TEXTBOOK_EVERY = 4
"""Of so many batches the textbook method runs one: at 100,000 keys it takes seconds."""
CODE_BYTES = 64
"""Bytes of a code, of which one is read of each key."""

FLOAT32_BYTES = 4
"""Bytes."""

MAX_FLOOR_KEYS = 100_000
"""Keys that a floor is measured on, at most."""

MAX_TEXTBOOK_KEYS = 100_000
"""Keys, at most, that the textbook method is measured with."""


def run(options: Options) -> Iterator[Row]:
    """Every model with 10k, 100k and 1M keys; `--quick`: two models with 10k."""
    counts = dict(list(COUNTS.items())[:1]) if options.quick else COUNTS
    for bench_model in select_models(options, MODELS[:1] + MODELS[-1:] if options.quick else MODELS):
        model = bench_model.load(options.device)
        prompts = bench_model.prompts(model, REAL_KEYS + OTHER_QUERIES + max(size * REPEATS[size] for size in BATCHES))
        others_RD = queries(model, prompts[REAL_KEYS : REAL_KEYS + OTHER_QUERIES])
        real_ND = queries(model, prompts[:REAL_KEYS])
        options.report(f"{bench_model.name}: {len(real_ND)} queries")
        test_prompts = prompts[REAL_KEYS + OTHER_QUERIES :]
        empty = Codebook("default", model.fingerprint, model.layer)
        for batch in BATCHES:
            path = f"overhead/{bench_model.name}/empty/batch{batch}"
            yield from _rows(path, test_prompts, model, empty, KeyIndex(empty, model.device), batch, None)
        for kind in ("real", "random"):
            for size, count in counts.items():
                keys_ND = stored(real_ND, count) if kind == "real" else _random_keys(real_ND, count)
                codebook = codebook_of(model, keys_ND, others_RD)
                del keys_ND
                index = KeyIndex(codebook, model.device)
                index.nearest_within_radius(torch.zeros(1, codebook.keys_ND.shape[1]))
                for batch in BATCHES:
                    name = f"overhead/{bench_model.name}/{kind}/{size}/batch{batch}"
                    floor = _floor(model.device, kind, count, codebook.keys_ND.shape[1], batch)
                    yield from _rows(name, test_prompts, model, codebook, index, batch, floor)
                del codebook, index
                gc.collect()


def _rows(
    name: str,
    test_prompts: Sequence[Prompt],
    model: EditableModel,
    codebook: Codebook,
    index: KeyIndex,
    batch: int,
    floor: float | None,
) -> Iterator[Row]:
    prompts = test_prompts[: batch * REPEATS[batch]]
    batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    parameters = [Parameters()] * batch
    everywhere = model.adaptor.replace == "all"
    token = {"first": 0, "last": -1}[model.adaptor.query]

    def run_unedited(some: Sequence[Prompt]) -> int:
        with torch.inference_mode():
            model.task.run(model.task.batch(some), parameters)
        return 0

    def run_edited(some: Sequence[Prompt]) -> int:
        return sum(served.hit is not None for served in model.answer(some, parameters, CodebookLookup(codebook, index)))

    ways: dict[str, Callable[[Sequence[Prompt]], int]] = {"unedited": run_unedited, "edited": run_edited}
    if 0 < len(codebook) <= MAX_TEXTBOOK_KEYS:
        arrays = codebook.keys_ND, codebook.values_NV, codebook.radii_N
        module = model.module.get_submodule(model.layer)
        on_device = [torch.from_numpy(array).to(model.device) for array in arrays]

        def textbook(some: Sequence[Prompt]) -> int:
            grace = TextbookGrace(module, *on_device, token=token, everywhere=everywhere)
            try:
                return run_unedited(some)
            finally:
                grace.remove()

        ways["textbook"] = textbook
    seconds, hits = _take_turns(ways, batches, model.device)
    unedited = seconds["unedited"]
    ratios = {way: statistics.median(map(truediv, some, unedited[:: TEXTBOOK_EVERY if way == "textbook" else 1]))
              for way, some in seconds.items()}  # fmt: skip
    textbook_ratio = ratios.get("textbook")
    yield Row(f"{name}/edited-of-unedited", ratios["edited"], "x", baseline=textbook_ratio)
    if textbook_ratio is not None:
        yield Row(f"{name}/textbook-of-unedited", textbook_ratio, "x")
    yield Row(f"{name}/unedited", 1000 * statistics.median(unedited), "ms")
    yield Row(f"{name}/lookup", 1000 * statistics.median(map(sub, seconds["edited"], unedited)), "ms", floor)
    if not len(codebook):
        return
    yield Row(f"{name}/hits", hits / len(prompts), "share")
    if batch == BATCHES[-1]:
        yield Row(f"{name}/recall", _recall(model, prompts[:CHECKED_PROMPTS], codebook, index), "share", 1)


def _take_turns(
    ways: Mapping[str, Callable[[Sequence[Prompt]], int]], batches: Sequence[Sequence[Prompt]], device: torch.device
) -> tuple[dict[str, list[float]], int]:
    """Seconds (`timed`) of each way for each of the batches that it ran, and the hits of all."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    hits = 0
    for number in range(-TEXTBOOK_EVERY, len(batches)):
        for way, call in ways.items():
            if way == "textbook" and number % TEXTBOOK_EVERY:
                continue
            spent, found = timed(device, partial(call, batches[number % len(batches)]))
            if number >= 0:  # those before warm up
                seconds[way].append(spent)
                hits += found
    return seconds, hits


def _floor(device: torch.device, kind: str, count: int, width: int, batch: int) -> float:
    """Milliseconds that a look-up needs at least.

    On a CPU: of the products of all codes (`real`) or keys (`random`) with a batch, and a look at each of them. Of very
    many keys a part is multiplied, since the time is theirs in proportion. On a GPU, which looks at all keys: of
    reading them at its copy rate.
    """
    if device.type != "cpu":
        return 1000 * count * width * FLOAT32_BYTES / copy_rate(device)
    some, step = min(count, MAX_FLOOR_KEYS), max(1024, 2**17 // batch)
    if kind == "real":
        keys = torch.randint(-127, 127, (some, CODE_BYTES), dtype=torch.int8)
        inputs = torch.randint(-127, 127, (CODE_BYTES, batch), dtype=torch.int8)
        ways = [lambda chunk: int8_matmul(chunk, inputs)]
    else:
        keys, inputs = torch.rand(some, width), torch.rand(width, batch)
        inputs_bf16 = inputs.bfloat16()
        ways = [lambda chunk: chunk @ inputs, lambda chunk: chunk.bfloat16() @ inputs_bf16]

    def inspect(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for start in range(0, some, step):
            (way(keys[start : start + step]) > 0).any()

    def spent(way: Callable[[torch.Tensor], torch.Tensor]) -> float:
        return timed(device, partial(inspect, way))[0]

    return 1000 * min(statistics.median(spent(way) for _ in range(7)) for way in ways) * count / some


def _recall(model: EditableModel, prompts: Sequence[Prompt], codebook: Codebook, index: KeyIndex) -> float:
    queries_BD = queries(model, prompts)
    squares_BN = np.empty((len(queries_BD), len(codebook)))
    wide_BD = queries_BD.astype(np.float64)
    for start in range(0, len(codebook), 8192):
        keys_MD = codebook.keys_ND[start : start + 8192].astype(np.float64)
        lengths_M = np.einsum("md,md->m", keys_MD, keys_MD)
        squares_BN[:, start : start + 8192] = lengths_M - 2 * wide_BD @ keys_MD.T
    nearest_B = squares_BN.argmin(axis=1)
    distances_B = np.linalg.norm(wide_BD - codebook.keys_ND[nearest_B], axis=1)
    expected_B = np.where(distances_B < codebook.radii_N[nearest_B], nearest_B, NO_SLOT)
    found_B = index.nearest_within_radius(torch.from_numpy(queries_BD)).slots_B.numpy()
    return float((found_B == expected_B).mean())


def _random_keys(real_ND: np.ndarray, count: int) -> np.ndarray:
    keys_ND = np.random.default_rng(2).standard_normal((count, real_ND.shape[1]), np.float32)
    keys_ND *= real_ND.std(axis=0)
    keys_ND += real_ND.mean(axis=0)
    return keys_ND
