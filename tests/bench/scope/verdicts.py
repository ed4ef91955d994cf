"""The verdict on an answer, and shares with confidence intervals."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gracestream.pipeline.tuning.evaluation import begins_with_target
from gracestream.pipeline.tuning.intervals import wilson_interval
from tests.bench.scope.cases import Case

REPEATED = re.compile(r"(\S+)(?:\s+\1){2,}(?!\S)|(\S{2,}?)\2{2,}")
"""A word three times in a row, or a group of letters three times without a space between."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one case. Each field is a column of the report, defined in the docstring of the package."""

    captured: bool
    answered: bool
    correct: bool
    near_miss: bool
    broken: bool
    repeats: bool
    elsewhere: bool


def repeats(text: str) -> bool:
    """Whether a text repeats a word or a group of letters three times in a row."""
    return REPEATED.search(text) is not None


def verdict(
    case: Case,
    answer: str,
    unedited: str,
    serving_target: str | None,
    *,
    near_miss: bool = False,
    elsewhere: bool = False,
) -> Verdict:
    """Judge one answer.

    Args:
        case: The case.
        answer: The edited model's answer.
        unedited: The unedited model's answer.
        serving_target: The target of the entry that serves the case; None if no entry does.
        near_miss: Whether that entry did not give its target, so the unedited model answered.
        elsewhere: Whether that entry belongs to another edit.
    """
    captured = serving_target is not None
    broken = captured and answer not in {unedited, serving_target, case.target}
    return Verdict(
        captured=captured,
        answered=(case.applies or captured) and bool(case.target) and begins_with_target(answer, case.target),
        correct=answer == (case.target if case.applies else unedited),
        near_miss=captured and near_miss,
        broken=broken,
        repeats=broken and repeats(answer),
        elsewhere=captured and elsewhere,
    )


def share_with_interval(values: Iterable[bool]) -> tuple[float, tuple[float, float], int]:
    """The share of true values, its interval, and the number of values."""
    listed = list(values)
    total = sum(listed)
    return total / max(1, len(listed)), wilson_interval(total, len(listed)), len(listed)
