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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from gracestream.deploy.demo.cases import DemoCase, load_script
from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel, Prefill
from gracestream.pipeline.model.engines.base import Finished
from gracestream.pipeline.model.engines.batch import BatchEngine
from gracestream.pipeline.model.engines.continuous import ContinuousEngine
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.schemas.deltas import GENESIS_DIGEST
from gracestream.schemas.messages import Parameters
from gracestream.workers.bootstrap import load_model
from tests.bench.codebooks import queries, radii_of, stored
from tests.bench.framework import Options, Row
from tests.bench.models import questions

ENTRIES = 100_000
NUM_REQUESTS, NUM_CORRECTED, NUM_LOADED = 16, 12, 48
BUDGET, SHORT_BUDGET, MEDIAN_TOKENS = 64, 8, 16
ROUNDS = 3
LOADS = (0.5, 0.8, 0.95)
MAX_OF_BARE, MAX_OF_BATCH, MAX_SHORT_OF_BATCH, MAX_OF_PLAIN, MAX_DECODE_OF_PLAIN = 1.05, 0.6, 0.1, 1.02, 1.0
RADIUS_QUERIES = 512


@dataclass(frozen=True, slots=True, eq=False)
class BenchRequest:
    """A request, the clock at which it arrives, and the target if it is corrected."""

    prompt: Prompt
    parameters: Parameters
    batch_key: object
    arrival: float = 0.0
    target: str = ""


@dataclass(slots=True)
class Answered:
    """What a contender did.

    Attributes:
        cpu: CPU seconds.
        decode_cpu: CPU seconds of the steps that no request joined.
        latencies: Seconds from arrival to answer, by the identity of the request.
        texts: Answers, by the identity of the request; of engines with a codebook only.
    """

    cpu: float = 0.0
    decode_cpu: float = 0.0
    latencies: dict[int, float] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)


Contender = Callable[[Sequence[BenchRequest]], Answered]
"""Answers all requests."""


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
    model, edited = engine.model, engine.codebook
    prompts = [model.task.tokenize(text) for text in itertools.islice(questions(), 2048 + RADIUS_QUERIES)]
    found_ND = queries(model, prompts)
    keys_ND = stored(found_ND[RADIUS_QUERIES:], count)
    total = len(edited) + count
    codebook = Codebook("default", model.fingerprint, model.layer)
    codebook.restore(
        seq=total, term=1, digest=GENESIS_DIGEST,
        entry_ids=[*edited.entry_ids, *(f"e{number}" for number in range(count))],
        labels=[*edited.labels, *[(0,)] * count], wordings=[*edited.wordings, *[""] * count],
        keys_ND=np.concatenate([edited.keys_ND, keys_ND]),
        values_NV=np.concatenate([edited.values_NV, np.zeros((count, edited.values_NV.shape[1]), np.float32)]),
        radii_N=np.concatenate([edited.radii_N, radii_of(keys_ND, found_ND[:RADIUS_QUERIES])]),
    )  # fmt: skip
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
    cpu = contenders["continuous"](backlog).cpu
    for load in LOADS[:1] if options.quick else LOADS:
        gaps = np.random.default_rng(3).exponential(cpu / NUM_LOADED / load, NUM_LOADED)
        arrivals = np.cumsum(gaps).tolist()
        requests = [
            BenchRequest(one.prompt, one.parameters, one.batch_key, arrival)
            for one, arrival in zip(backlog, arrivals, strict=True)
        ]
        yield from _setting_rows(f"serving/smollm2/load-{load:g}", contenders, requests, options)


def make_request(model: EditableModel, inputs: Any, target: str = "", **fields: int) -> BenchRequest:
    prompt, parameters = model.task.tokenize(inputs), Parameters(**fields)
    return BenchRequest(prompt, parameters, model.task.batch_key(prompt, parameters), target=target)


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
    figures = {"cpu": answered.cpu, "decode": answered.decode_cpu} | _percentiles(
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
        return lambda requests: run_engine(made(), requests)

    limits: dict[str, Any] = {"max_rows": NUM_REQUESTS, "check_answers": True}
    bare: Any = _WithoutCodebook(model)
    return {
        "continuous": engine(lambda: ContinuousEngine(model, lookup, **limits)),
        "batch": engine(lambda: BatchEngine(model, lookup, **limits)),
        "bare": engine(lambda: ContinuousEngine(bare, lookup, **limits)),
        "generate": engine(lambda: _Generate(model)),
        "transformers": lambda requests: _run_manager(model, requests),
    }


def _vllm_contenders(model: EditableModel, lookup: CodebookLookup, settings: Settings) -> dict[str, Contender]:
    from tests.bench.vllm_contenders import VllmContenders  # noqa: PLC0415 - vLLM has an environment of its own

    vllm = VllmContenders(model, settings, NUM_REQUESTS)

    def plain(requests: Sequence[BenchRequest]) -> Answered:
        with vllm.plain(lookup) as engine:
            return run_engine(engine, requests)

    return {"vllm": lambda requests: run_engine(vllm.corrected(lookup), requests), "vllm-plain": plain}


class _WithoutCodebook:
    """A model whose prompts are not looked up."""

    def __init__(self, model: EditableModel) -> None:
        self.task, self.device, self._model = model.task, model.device, model

    def prefill(self, prompts: Sequence[Prompt], _lookup: CodebookLookup | None) -> Prefill:
        prefill = self._model.prefill(prompts, None)
        return Prefill(prefill.logits_BC, prefill.cache, [None] * len(prompts))


class _Generate:
    """`generate` as an engine: a batch in order of arrival, up to its longest answer."""

    active = 0

    def __init__(self, model: EditableModel) -> None:
        self._model = model

    def select(self, waiting: Sequence[BenchRequest]) -> list[int]:
        return list(range(min(len(waiting), NUM_REQUESTS)))

    def step(self, joining: Sequence[BenchRequest]) -> list[Finished[BenchRequest]]:
        task: Any = self._model.task
        longest = max((request.parameters for request in joining), key=task.max_generated_tokens)
        with torch.inference_mode():
            task.run(task.batch([request.prompt for request in joining]), [longest])
        return [Finished(request, None, None) for request in joining]


def run_engine(engine: Any, requests: Sequence[BenchRequest]) -> Answered:
    """Answer requests that arrive by the clock. While an engine has nothing to do, the clock jumps to the next one."""
    clock, answered = 0.0, Answered()
    arriving = sorted(requests, key=lambda request: request.arrival)
    waiting: list[BenchRequest] = []
    while len(answered.latencies) < len(requests):
        if not waiting and not engine.active:
            clock = max(clock, arriving[0].arrival)
        while arriving and arriving[0].arrival <= clock:
            waiting.append(arriving.pop(0))
        started = time.process_time()
        chosen = set(engine.select(waiting)) if waiting else set()
        finished = engine.step([waiting[index] for index in sorted(chosen)])
        seconds = time.process_time() - started
        clock, answered.cpu = clock + seconds, answered.cpu + seconds
        answered.decode_cpu += 0.0 if chosen else seconds
        waiting = [request for index, request in enumerate(waiting) if index not in chosen]
        for one in finished:
            answered.latencies[id(one.request)] = clock - one.request.arrival
            if one.served is not None:
                answered.texts[id(one.request)] = one.served.answer.outputs.text
    return answered


def _run_manager(model: EditableModel, requests: Sequence[BenchRequest]) -> Answered:
    """Answer requests with transformers' manager, which runs in a thread of its own."""
    from transformers.generation import ContinuousBatchingConfig  # noqa: PLC0415 - only this contender needs it

    config = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    manager = model.module.init_continuous_batching(
        generation_config=model.module.generation_config, continuous_batching_config=config
    )
    manager.start()
    started = time.process_time()
    try:
        for number, request in enumerate(requests):
            manager.add_request(
                list(request.prompt.token_ids), request_id=str(number), max_new_tokens=request.parameters.max_new_tokens
            )
        answered = Answered()
        while len(answered.latencies) < len(requests):
            result = manager.get_result(timeout=300)
            if result is None:
                raise TimeoutError("transformers' manager gave no result for 300 s")
            if result.is_finished():
                answered.latencies[id(requests[int(result.request_id)])] = time.process_time() - started
        answered.cpu = time.process_time() - started
        return answered
    finally:
        manager.stop(block=True)
