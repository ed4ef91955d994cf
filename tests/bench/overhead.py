"""Cost of the codebook in inference, compared with the unedited model and with a textbook GRACE.

Each method runs one forward pass over the prompts (generators: to the first token) on one thread. Times are CPU seconds
of the process, and synchronised wall time on a GPU. The methods take turns on each batch. A ratio is the median of the
ratios of single batches, and `lookup` the median of the differences.

- `edited-of-unedited`: time of the edited model divided by that of the unedited model. The baseline is the same ratio
  of the textbook GRACE (`textbook-of-unedited`).
- `unedited`: milliseconds of the unedited model per batch. `lookup`: milliseconds added by the codebook; the baseline
  is its floor.
- `served`: the share of prompts that an entry serves.
- `recall`: the share of prompts with the same result as brute force in float64: the same entry, or none.

Prompts are people's questions for trained models, and random tokens for random weights. A radius is 0.8 of the distance
to the nearest of 512 other queries, as with the editor's defaults. It is at most the median of these distances.
Codebooks:

- `empty`: no keys. It shows the cost of the hook and its Python code.
- `real`: keys are queries of other such prompts. Beyond 2,048 of them (`REAL_KEYS`), keys are points between two of
  these, so that they lie where queries lie.
- `random`: keys are random, with the mean and the spread of queries. No projection captures them.

The floor of `lookup` is a measured time: the machine multiplies a batch with all data that a lookup must read, and
compares each product once. For `real` keys that is a code of 64 bytes per key. Codes exclude few of the `random` keys,
so there it is the key itself, in float32 or bfloat16.

The goals are 1.03 times the unedited model at 10,000 keys, 1.05 at 100,000 and 1.15 at a million. They are missed in
two cases:

- For a model that answers in 8 ms, 3 % are 0.24 ms. `empty` alone takes as long.
- With random weights most keys must be read. From 100,000 keys on, that floor exceeds the goal.

The table `lookup` has the lookup alone, beside two simple baselines and without each of its parts. Its columns are
described in `tests/bench/lookup.py`.

Blocks of a k-d tree were tried without gain: a lookup has to read 60 to 80 % of them.
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
from tests.bench import lookup
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
"""The textbook method runs one in this many batches: at 100,000 keys a batch takes seconds."""

CODE_BYTES = 64
"""Bytes of the code that a lookup reads for each key."""

FLOAT32_BYTES = 4
"""Bytes of one number."""

MAX_FLOOR_KEYS = 100_000
"""Most keys on which a floor is measured."""

MAX_TEXTBOOK_KEYS = 100_000
"""Most keys with which the textbook method is measured."""


def run(options: Options) -> Iterator[Row]:
    """The rows of every model with 10k, 100k and 1M keys, and of the lookup alone (`--only lookup`).

    `--quick` measures two models with 10k keys.
    """
    if options.only != "lookup":
        yield from _model_rows(options)
    if options.only in ("", "lookup") and options.device == "cpu":
        yield from lookup.run(options)


def _model_rows(options: Options) -> Iterator[Row]:
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
        return sum(
            served.served_by is not None for served in model.answer(some, parameters, CodebookLookup(codebook, index))
        )

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
    seconds, served_count = _take_turns(ways, batches, model.device)
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
    yield Row(f"{name}/served", served_count / len(prompts), "share")
    if batch == BATCHES[-1]:
        yield Row(f"{name}/recall", _recall(model, prompts[:CHECKED_PROMPTS], codebook, index), "share", 1)


def _take_turns(
    ways: Mapping[str, Callable[[Sequence[Prompt]], int]], batches: Sequence[Sequence[Prompt]], device: torch.device
) -> tuple[dict[str, list[float]], int]:
    """Seconds (see `timed`) of each method for each batch that it ran, and the number of served prompts."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    served_count = 0
    for number in range(-TEXTBOOK_EVERY, len(batches)):
        for way, call in ways.items():
            if way == "textbook" and number % TEXTBOOK_EVERY:
                continue
            spent, found = timed(device, partial(call, batches[number % len(batches)]))
            if number >= 0:  # earlier rounds warm up
                seconds[way].append(spent)
                served_count += found
    return seconds, served_count


def _floor(device: torch.device, kind: str, count: int, width: int, batch: int) -> float:
    """A lower bound of a lookup, in milliseconds.

    On a CPU: multiply all codes (`real`) or all keys (`random`) with the batch, and compare each product once. At most
    `MAX_FLOOR_KEYS` keys are multiplied, and the time is scaled up. On a GPU: read all keys at its copy rate.
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
