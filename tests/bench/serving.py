"""Engines on mixes of short and long answers, and under load that arrives at random.

SmolLM2 answers on one thread, in the benchmark's process, with the default settings. 12 requests ask for corrected
facts, whose answers have a few words. The codebook has 100,000 further entries. Contenders:

- `continuous`, `batch`: the engines of a replica.
- `bare`: the continuous engine without codebook and encoder.
- `generate`: transformers' `generate`, 16 requests at a time in order of arrival, each batch to its longest answer.
- `transformers`: transformers' continuous batching manager, without codebook. It takes part where all requests arrive
  at once.
- `vllm`, `vllm-plain`: vLLM for CPUs with gracestream, and alone. They take part in vLLM's environment:
  `make bench NAME=serving BIN=.venv-vllm/bin`.

The clock is the CPU time of the process, so other processes of the machine do not count. A request's latency is the
clock between its arrival and its answer. Contenders take turns for three rounds. Values are medians, and ratios medians
of the ratios of single rounds.

- `correct`: the share of corrected requests that got their target; the least of all rounds.
- `cpu`: CPU seconds of all requests. `p50`, `p99`: latency in seconds. `short-p50`: that of the corrected requests.
- `of-bare`, `of-batch`: CPU time of the continuous engine divided by that of `bare` and `batch`. In the first two
  settings `bare` has longer answers, because its facts are not corrected.
- `of-plain`: CPU time of `vllm` divided by that of `vllm-plain`. `decode-of-plain`: the same in steps that no request
  joins.
- `short-of-batch`: `short-p50` of the continuous engine divided by that of the batch engine.

Settings:

- `equal-budgets`: 16 requests with the default budget, 12 of them corrected.
- `own-budgets`: the same; the corrected requests ask for at most eight tokens.
- `backlog`: the requests of `load-X`, all at once.
- `load-X`: 48 requests arrive at random (Poisson), at X of the rate at which the continuous engine answers a backlog.
  Their answers have log-normal lengths: 16 tokens in the median, 64 at most.
"""

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from gracestream.deploy.demo.cases import DemoCase, load_script
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.engines.batch import BatchEngine
from gracestream.pipeline.model.engines.continuous import ContinuousEngine
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.workers.bootstrap import load_model
from tests.bench.codebooks import extended, queries, radii_of, stored
from tests.bench.contenders import (
    Answered,
    BenchRequest,
    Contender,
    Generate,
    WithoutCodebook,
    make_request,
    run_engine,
    run_manager,
)
from tests.bench.framework import Options, Row
from tests.bench.models import questions

ENTRIES = 100_000
NUM_REQUESTS, NUM_CORRECTED, NUM_LOADED = 16, 12, 48
BUDGET, SHORT_BUDGET, MEDIAN_TOKENS = 64, 8, 16
ROUNDS = 3
LOADS = (0.5, 0.8, 0.95)
MAX_OF_BARE, MAX_OF_BATCH, MAX_SHORT_OF_BATCH, MAX_OF_PLAIN, MAX_DECODE_OF_PLAIN = 1.05, 0.6, 0.1, 1.02, 1.0
RADIUS_QUERIES = 512


def run(options: Options) -> Iterator[Row]:
    """The rows of all settings. `--quick` has 1,000 entries, one round and one load."""
    settings = load_settings(model="smollm2", default_max_new_tokens=BUDGET, threads=1, device=options.device)
    torch.set_num_threads(1)
    model = load_model(settings.model, settings.editing.policy)
    engine = EditEngine(model, "default")
    engine.apply(engine.lead_delta({}))
    corrected = _correct(engine, options)
    lookup = _with_entries(engine, 1000 if options.quick else ENTRIES)
    vllm: dict[str, Contender] = {}
    if find_spec("vllm") is not None:
        options.report("starting vLLM")
        vllm = _vllm_contenders(model, lookup, settings)
    yield from serving_rows(model, lookup, corrected, options, vllm)


def _correct(engine: EditEngine, options: Options) -> list[DemoCase]:
    """Correct facts of the demo until enough of them are edited."""
    corrected: list[DemoCase] = []
    for number, case in enumerate(load_script("smollm2", complete=True).cases):
        options.report(f"correction {len(corrected) + 1} of {NUM_CORRECTED}")
        result = engine.edit(make_correction(f"f{number}", case.inputs, case.target), number)
        if result.delta_record is not None:
            engine.apply(result.delta_record)
            corrected.append(case)
        if len(corrected) == NUM_CORRECTED:
            return corrected
    raise AssertionError("the demo has too few facts")


def _with_entries(engine: EditEngine, count: int) -> CodebookLookup:
    """The engine's entries with many others, whose keys lie where queries lie."""
    model = engine.model
    prompts = [model.task.tokenize(text) for text in itertools.islice(questions(), 2048 + RADIUS_QUERIES)]
    found_ND = queries(model, prompts)
    keys_ND = stored(found_ND[RADIUS_QUERIES:], count)
    codebook = extended(engine.codebook, keys_ND, radii_of(keys_ND, found_ND[:RADIUS_QUERIES]))
    return CodebookLookup(codebook, KeyIndex(codebook, model.device))


def serving_rows(
    model: EditableModel,
    lookup: CodebookLookup,
    corrected: Sequence[DemoCase],
    options: Options,
    others: Mapping[str, Contender] = MappingProxyType({}),
) -> Iterator[Row]:
    """The rows of all settings for a model with corrected facts. `others` are further contenders."""
    contenders = {**_contenders(model, lookup), **others}
    texts = questions()[-NUM_LOADED:]
    for name, short_budget in (("equal-budgets", BUDGET), ("own-budgets", SHORT_BUDGET)):
        requests = [make_request(model, case.inputs, case.target, max_new_tokens=short_budget) for case in corrected]
        requests += [make_request(model, text, max_new_tokens=BUDGET) for text in texts[: NUM_REQUESTS - NUM_CORRECTED]]
        random.Random(1).shuffle(requests)
        yield from _setting_rows(f"serving/smollm2/{name}", contenders, requests, options)
    del contenders["transformers"]
    lengths = np.random.default_rng(2).lognormal(np.log(MEDIAN_TOKENS), 0.8, NUM_LOADED).clip(1, BUDGET).astype(int)
    backlog = [
        make_request(model, text, max_new_tokens=length, min_new_tokens=length)
        for text, length in zip(texts, lengths.tolist(), strict=True)
    ]
    yield from _setting_rows("serving/smollm2/backlog", contenders, backlog, options)
    cpu = contenders["continuous"](backlog).seconds
    for load in LOADS[:1] if options.quick else LOADS:
        gaps = np.random.default_rng(3).exponential(cpu / NUM_LOADED / load, NUM_LOADED)
        arrivals = np.cumsum(gaps).tolist()
        requests = [
            BenchRequest(one.prompt, one.parameters, one.batch_key, arrival)
            for one, arrival in zip(backlog, arrivals, strict=True)
        ]
        yield from _setting_rows(f"serving/smollm2/load-{load:g}", contenders, requests, options)


def _setting_rows(
    name: str, contenders: dict[str, Contender], requests: Sequence[BenchRequest], options: Options
) -> Iterator[Row]:
    """The rows of all contenders on the same requests."""
    measured: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
    for turn in range(1 if options.quick else ROUNDS):
        for contender, answer in contenders.items():
            options.report(f"{name}, round {turn + 1}: {contender}")
            measured[contender].append(_figures(answer(requests), requests))
    for contender, rounds in measured.items():
        for metric in ("cpu", "p50", "p99", "short-p50"):
            if metric in rounds[0]:
                yield Row(f"{name}/{contender}/{metric}", statistics.median(one[metric] for one in rounds), "s")
        if "correct" in rounds[0] and contender in ("continuous", "batch", "vllm"):
            yield Row(f"{name}/{contender}/correct", min(one["correct"] for one in rounds), "share", 1.0)

    def ratio(metric: str, contender: str, ours_name: str = "continuous") -> float:
        pairs = zip(measured[ours_name], measured[contender], strict=True)
        return statistics.median(ours[metric] / theirs[metric] for ours, theirs in pairs)

    yield Row(f"{name}/continuous/of-batch", ratio("cpu", "batch"), "x", MAX_OF_BATCH)
    if any(one.target for one in requests):
        yield Row(f"{name}/continuous/short-of-batch", ratio("short-p50", "batch"), "x", MAX_SHORT_OF_BATCH)
    else:
        yield Row(f"{name}/continuous/of-bare", ratio("cpu", "bare"), "x", MAX_OF_BARE)
        if "vllm" in measured:
            yield Row(f"{name}/vllm/of-plain", ratio("cpu", "vllm-plain", "vllm"), "x", MAX_OF_PLAIN)
            decode = ratio("decode", "vllm-plain", "vllm")
            yield Row(f"{name}/vllm/decode-of-plain", decode, "x", MAX_DECODE_OF_PLAIN)


def _figures(answered: Answered, requests: Sequence[BenchRequest]) -> dict[str, float]:
    """The figures of one contender in one round, by metric."""
    figures = {"cpu": answered.seconds, "decode": answered.decode_seconds} | _percentiles(
        "", [answered.latencies[id(one)] for one in requests]
    )
    if short := [one for one in requests if one.target]:
        figures |= _percentiles("short-", [answered.latencies[id(one)] for one in short])
        if answered.texts:
            figures["correct"] = statistics.fmean(answered.texts[id(one)] == one.target for one in short)
    return figures


def _percentiles(prefix: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{prefix}p50": float(np.percentile(seconds, 50)), f"{prefix}p99": float(np.percentile(seconds, 99))}


def _contenders(model: EditableModel, lookup: CodebookLookup) -> dict[str, Contender]:
    def engine(made: Callable[[], Any]) -> Contender:
        return lambda requests: run_engine(made(), requests, model.device)

    limits: dict[str, Any] = {"max_rows": NUM_REQUESTS, "check_answers": True}
    bare: Any = WithoutCodebook(model)
    return {
        "continuous": engine(lambda: ContinuousEngine(model, lookup, **limits)),
        "batch": engine(lambda: BatchEngine(model, lookup, **limits)),
        "bare": engine(lambda: ContinuousEngine(bare, lookup, **limits)),
        "generate": engine(lambda: Generate(model, NUM_REQUESTS)),
        "transformers": lambda requests: run_manager(model, requests),
    }


def _vllm_contenders(model: EditableModel, lookup: CodebookLookup, settings: Settings) -> dict[str, Contender]:
    from tests.bench.vllm_contenders import VllmContenders  # noqa: PLC0415 - vLLM has an environment of its own

    vllm = VllmContenders(model, settings, NUM_REQUESTS)

    def plain(requests: Sequence[BenchRequest]) -> Answered:
        with vllm.plain(lookup) as engine:
            return run_engine(engine, requests)

    return {"vllm": lambda requests: run_engine(vllm.corrected(lookup), requests), "vllm-plain": plain}
