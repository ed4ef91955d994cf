"""Measurements at a checkpoint: corrections in force, cases captured or not, and the cost."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.edit_memory import UNEDITED_MODEL
from gracestream.pipeline.codebook.lookup import FoundEntry
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.schemas.messages import Feedback
from tests.bench.device import memory_in_use, timed
from tests.bench.framework import Row
from tests.bench.scope.verdicts import share_with_interval
from tests.bench.stream.corrections import SEED, Case, Data, select_cases
from tests.bench.stream.edits import PromptCache, StreamKind, answers_correctly, are_served, serving_entry_id
from tests.bench.stream.log import LoggedCorrection

COST_WINDOW = 100
"""The last corrections; their mean cost is reported."""

CHECKED_CORRECTIONS = 300
"""Corrections for which the model is checked at a checkpoint."""

CHECKED_PARAPHRASES = 100
"""Paraphrases of each kind for which the model is checked at a checkpoint."""

GOALS = {"other relation": 0.05, "CounterFact neighbour": 0.02, "unrelated": 0.0}
"""Goals for the share captured, by kind, as in the benchmark `scope`."""


@dataclass
class StreamState:
    """The state of a stream: engine, data, results of the corrections, and the size of each delta in bytes."""

    kind: StreamKind
    engine: EditEngine
    prompt_cache: PromptCache
    data: Data
    feedback: Sequence[Feedback]
    corrections: list[LoggedCorrection] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def setting(self) -> str:
        """The name of this state in rows, such as `keys, 1,000`."""
        return f"{self.kind.name}, {len(self.corrections):,}"

    def not_rejected(self) -> list[int]:
        """The numbers of the corrections that were not rejected."""
        return [one.number for one in self.corrections if one.status != "rejected"]


def checkpoint(state: StreamState) -> Iterator[Row]:
    """All rows of a checkpoint."""
    yield from correction_rows(state)
    yield from case_rows(state)
    yield from cost_rows(state)


def correction_rows(state: StreamState) -> Iterator[Row]:
    """Rows of corrections that were right at once, and that are in force now."""
    setting, not_rejected = f"corrections/{state.setting}", state.not_rejected()
    yield Row(f"{setting}/made", len(state.corrections), "count")
    yield Row(f"{setting}/rejected", len(state.corrections) - len(not_rejected), "count")
    yield Row(f"{setting}/unchanged", sum(one.status == "unchanged" for one in state.corrections), "count")
    yield Row(f"{setting}/entries", len(state.engine.codebook), "count")
    yield _share(f"{setting}/ES", [one.right for one in state.corrections])
    right_at_once = _share(f"{setting}/at once", [state.corrections[number].right for number in not_rejected])
    yield right_at_once
    feedback = [state.feedback[number] for number in not_rejected]
    yield _share(f"{setting}/ERR", are_served(state.engine, state.prompt_cache, feedback), right_at_once.value)
    if state.kind.gives_targets:
        sample = draw_sample(not_rejected, CHECKED_CORRECTIONS)
        before = mean(state.corrections[number].right for number in sample) if sample else 0.0
        now = [answers_correctly(state.engine, state.feedback[number]) for number in sample]
        yield _share(f"{setting}/ERR, answered", now, before)


def case_rows(state: StreamState) -> Iterator[Row]:
    """Rows of the cases of corrections that an entry serves."""
    cases = [case for case in select_cases(state.data.cases, len(state.corrections)) if _is_counted(state, case)]
    by_kind: dict[str, list[Case]] = {}
    for case in cases:
        by_kind.setdefault(case.kind, []).append(case)
    for kind, sample in by_kind.items():
        yield from kind_rows(state, kind, sample)


def kind_rows(state: StreamState, kind: str, cases: Sequence[Case]) -> Iterator[Row]:
    """The rows of the cases of one kind."""
    setting = f"cases/{state.setting}, {kind}"
    entries = state.prompt_cache.serving_entries(state.engine, [case.text for case in cases])
    own = [_is_own_entry(state, case, entry) for case, entry in zip(cases, entries, strict=True)]
    yield Row(f"{setting}/cases", len(cases), "count")
    yield _share(f"{setting}/captured", [entry is not None for entry in entries], GOALS.get(kind))
    yield _share(f"{setting}/own", own)
    elsewhere = [entry is not None and not mine for entry, mine in zip(entries, own, strict=True)]
    yield _share(f"{setting}/elsewhere", elsewhere)
    if state.kind.gives_targets and cases[0].applies:
        yield _share(f"{setting}/correct", [_gives_target(state, case) for case in cases[:CHECKED_PARAPHRASES]])


def cost_rows(state: StreamState) -> Iterator[Row]:
    """What the last corrections took, what a look-up takes, and the memory."""
    setting, last = f"cost/{state.setting}", state.corrections[-COST_WINDOW:]
    spent = [sum(one.seconds.values()) for one in last]
    yield Row(f"{setting}/seconds", mean(spent), "s")
    for part in sorted({name for one in last for name in one.seconds}):
        yield Row(f"{setting}/{part}", mean(one.seconds.get(part, 0.0) for one in last), "s")
    steps = [one.steps for one in last if one.steps]
    if steps:
        yield Row(f"{setting}/steps", mean(steps), "steps")
    sizes = [size for size in state.sizes[-COST_WINDOW:] if size]
    if sizes:
        yield Row(f"{setting}/delta", mean(sizes), "B", _floor(state.engine.codebook))
    yield Row(f"{setting}/lookup", 1e6 * _lookup_seconds(state), "us")
    yield Row(f"{setting}/memory", memory_in_use(torch.device("cpu")) / 1e6, "MB")


def draw_sample(numbers: Sequence[int], count: int) -> list[int]:
    """A random sample of at most `count` numbers, sorted. Samples of different lists are unrelated."""
    return sorted(random.Random(SEED).sample(numbers, min(count, len(numbers))))


def _share(name: str, values: Sequence[bool], baseline: float | None = None) -> Row:
    share, interval, _ = share_with_interval(values)
    return Row(name, share, "share", baseline, interval)


def _is_counted(state: StreamState, case: Case) -> bool:
    """Whether the model accepts the case, and an entry serves its correction if it has one."""
    if case.correction is not None and serving_entry_id(state.engine, str(case.correction)) in (None, UNEDITED_MODEL):
        return False
    return state.prompt_cache.accepts(case.text)


def _is_own_entry(state: StreamState, case: Case, entry: FoundEntry | None) -> bool:
    """Whether the entry that serves the case also serves its correction."""
    return (
        entry is not None
        and case.correction is not None
        and entry.entry_id == serving_entry_id(state.engine, str(case.correction))
    )


def _gives_target(state: StreamState, case: Case) -> bool:
    """Whether the edited model predicts the correction's target for the case."""
    assert case.correction is not None
    target = state.data.corrections[case.correction].target
    return state.engine.inspect(case.text, target).target_check.predicts_target


def _floor(codebook: Codebook) -> int:
    """Bytes of the key and the value of one entry: the floor of a delta."""
    return 4 * int(codebook.keys_ND.shape[1] + codebook.values_NV.shape[1])


def _lookup_seconds(state: StreamState) -> float:
    """Seconds of the lookup of one prompt in a batch, with a known query."""
    prompts = [
        case.text
        for case in select_cases(state.data.cases, len(state.corrections))
        if state.prompt_cache.accepts(case.text)
    ]
    state.prompt_cache.serving_entries(state.engine, prompts)
    seconds, _ = timed(state.engine.model.device, lambda: state.prompt_cache.serving_entries(state.engine, prompts))
    return seconds / max(1, len(prompts))
