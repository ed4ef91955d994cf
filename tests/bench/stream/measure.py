"""What is measured after some corrections: whether they hold, what they reach or must not reach, and the cost."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.edit_memory import UNEDITED_MODEL
from gracestream.pipeline.codebook.lookup import Hit
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.schemas.messages import Feedback
from tests.bench.device import held, timed
from tests.bench.framework import Row
from tests.bench.scope.verdicts import counted
from tests.bench.stream.corrections import SEED, Case, Data, chosen
from tests.bench.stream.edits import Texts, Way, answered_right, own_entry, served
from tests.bench.stream.log import Made

LAST = 100
"""Corrections whose mean cost is reported."""

ANSWERED = 300
"""Corrections that the model is asked again at a checkpoint."""

PARAPHRASES = 100
"""Paraphrases of each kind that the model is asked at a checkpoint."""

GOALS = {"other relation": 0.05, "CounterFact neighbour": 0.02, "unrelated": 0.0}
"""Shares captured, by kind, as in the benchmark `scope`."""


@dataclass
class Past:
    """A stream so far: its engine, its data, what came of each correction, and the bytes of each delta."""

    way: Way
    engine: EditEngine
    texts: Texts
    data: Data
    feedback: Sequence[Feedback]
    made: list[Made] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def setting(self) -> str:
        """How the stream so far is named."""
        return f"{self.way.name}, {len(self.made):,}"

    def accepted(self) -> list[int]:
        """The numbers of the corrections that were not rejected."""
        return [one.number for one in self.made if one.status != "rejected"]


def checkpoint(past: Past) -> Iterator[Row]:
    """All rows of a checkpoint."""
    yield from correction_rows(past)
    yield from case_rows(past)
    yield from cost_rows(past)


def correction_rows(past: Past) -> Iterator[Row]:
    """Whether corrections were right at once, and whether they are now."""
    setting, accepted = f"corrections/{past.setting}", past.accepted()
    yield Row(f"{setting}/made", len(past.made), "count")
    yield Row(f"{setting}/rejected", len(past.made) - len(accepted), "count")
    yield Row(f"{setting}/unchanged", sum(one.status == "unchanged" for one in past.made), "count")
    yield Row(f"{setting}/entries", len(past.engine.codebook), "count")
    yield _share(f"{setting}/ES", [one.right for one in past.made])
    at_once = _share(f"{setting}/at once", [past.made[number].right for number in accepted])
    yield at_once
    feedback = [past.feedback[number] for number in accepted]
    yield _share(f"{setting}/ERR", served(past.engine, past.texts, feedback), at_once.value)
    if past.way.answers:
        some = drawn(accepted, ANSWERED)
        before = mean(past.made[number].right for number in some) if some else 0.0
        now = [answered_right(past.engine, past.feedback[number]) for number in some]
        yield _share(f"{setting}/ERR, answered", now, before)


def case_rows(past: Past) -> Iterator[Row]:
    """Which cases an entry serves, of corrections that an entry serves."""
    cases = [case for case in chosen(past.data.cases, len(past.made)) if _counts(past, case)]
    by_kind: dict[str, list[Case]] = {}
    for case in cases:
        by_kind.setdefault(case.kind, []).append(case)
    for kind, some in by_kind.items():
        yield from kind_rows(past, kind, some)


def kind_rows(past: Past, kind: str, cases: Sequence[Case]) -> Iterator[Row]:
    """The rows of the cases of one kind."""
    setting = f"cases/{past.setting}, {kind}"
    hits = past.texts.hits(past.engine, [case.text for case in cases])
    own = [_own(past, case, hit) for case, hit in zip(cases, hits, strict=True)]
    yield Row(f"{setting}/cases", len(cases), "count")
    yield _share(f"{setting}/captured", [hit is not None for hit in hits], GOALS.get(kind))
    yield _share(f"{setting}/own", own)
    elsewhere = [hit is not None and not mine for hit, mine in zip(hits, own, strict=True)]
    yield _share(f"{setting}/elsewhere", elsewhere)
    if past.way.answers and cases[0].applies:
        yield _share(f"{setting}/correct", [_correct(past, case) for case in cases[:PARAPHRASES]])


def cost_rows(past: Past) -> Iterator[Row]:
    """What the last corrections took, what a look-up takes, and the memory."""
    setting, last = f"cost/{past.setting}", past.made[-LAST:]
    spent = [sum(one.seconds.values()) for one in last]
    yield Row(f"{setting}/seconds", mean(spent), "s")
    for part in sorted({name for one in last for name in one.seconds}):
        yield Row(f"{setting}/{part}", mean(one.seconds.get(part, 0.0) for one in last), "s")
    steps = [one.steps for one in last if one.steps]
    if steps:
        yield Row(f"{setting}/steps", mean(steps), "steps")
    sizes = [size for size in past.sizes[-LAST:] if size]
    if sizes:
        yield Row(f"{setting}/delta", mean(sizes), "B", _floor(past.engine.codebook))
    yield Row(f"{setting}/lookup", 1e6 * _lookup_seconds(past), "us")
    yield Row(f"{setting}/memory", held(torch.device("cpu")) / 1e6, "MB")


def drawn(numbers: Sequence[int], count: int) -> list[int]:
    """So many of the numbers at most; a number that is drawn of more of them may not be drawn of fewer."""
    return sorted(random.Random(SEED).sample(numbers, min(count, len(numbers))))


def _share(name: str, values: Sequence[bool], baseline: float | None = None) -> Row:
    share, interval, _ = counted(values)
    return Row(name, share, "share", baseline, interval)


def _counts(past: Past, case: Case) -> bool:
    """Whether the case's correction is served by an entry, if it has one, and the model can take the case."""
    if case.correction is not None and own_entry(past.engine, str(case.correction)) in (None, UNEDITED_MODEL):
        return False
    return past.texts.takes(case.text)


def _own(past: Past, case: Case, hit: Hit | None) -> bool:
    """Whether the entry that serves the case serves its correction, too."""
    return (
        hit is not None and case.correction is not None and hit.entry_id == own_entry(past.engine, str(case.correction))
    )


def _correct(past: Past, case: Case) -> bool:
    """Whether the edited model gives the correction's target."""
    assert case.correction is not None
    target = past.data.corrections[case.correction].target
    return past.engine.inspect(case.text, target).target_check.predicts_target


def _floor(codebook: Codebook) -> int:
    """The bytes of the numbers of one entry."""
    return 4 * int(codebook.keys_ND.shape[1] + codebook.values_NV.shape[1])


def _lookup_seconds(past: Past) -> float:
    """Of one prompt, in a batch, whose query is known."""
    prompts = [case.text for case in chosen(past.data.cases, len(past.made)) if past.texts.takes(case.text)]
    past.texts.hits(past.engine, prompts)
    seconds, _ = timed(past.engine.model.device, lambda: past.texts.hits(past.engine, prompts))
    return seconds / max(1, len(prompts))
