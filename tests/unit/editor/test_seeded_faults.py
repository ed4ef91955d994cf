"""Random stories of editors that are killed, paused, cut off and doubled; a checker reads how each ends.

`make chaos` tells a thousand, the ordinary tests one of ten parts of them (`tests.support.rotation`).
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from msgspec import UNSET

from gracestream.schemas.deltas import decode_delta
from tests.support.doubles.checker import faults
from tests.support.doubles.world import FAULTS, PASSAGES, Story
from tests.support.rotation import PARTS, parts

SEEDS = 1000
AT_ONCE = 25
"""Seeds of one test, so that a run shows how far it has come."""


OPERATIONS = {
    *("begin", "begin done", "send", "send done", "write", "send offsets", "send offsets done"),
    *("commit", "committed", "commit done", "fence", "fence done"),
    *("poll", "end offsets", "redis", "redis done"),
}
"""At which each editor is killed in some story, and each call fails in some."""

REQUESTS = {"fence", "add partition", "write", "send offsets", "commit"}
"""Each arrives twice in some story, and too late in some."""


@pytest.fixture(scope="module")
def struck() -> Counter[tuple[str, str]]:
    """Counts the faults of editors in all stories so far by kind and operation, and the seeds under `seeds`."""
    return Counter()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """So many stories say too much."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The seeds of the parts that this run has, a portion for each test."""
    if "seeds" in metafunc.fixturenames:
        seeds = [seed for part in parts(metafunc.config) for seed in range(part, SEEDS, PARTS)]
        portions = [seeds[start : start + AT_ONCE] for start in range(0, len(seeds), AT_ONCE)]
        metafunc.parametrize("seeds", portions, ids=[f"from-{portion[0]}-by-{PARTS}" for portion in portions])


@pytest.mark.slow
def test_whatever_happens_each_feedback_record_is_done_once_and_all_agree(
    seeds: list[int], struck: Counter[tuple[str, str]]
) -> None:
    for seed in seeds:
        story = Story(seed)
        try:
            story.play()
            left = story.left()
            found, outlived = faults(left), story.outlived()
        finally:
            story.finish()
        assert not found, (seed, story.happened)
        assert not story.errors(), (seed, story.happened)
        assert not outlived, (seed, story.happened)
        assert not story.kafka.unplaced, (seed, story.happened)
        assert not story.kafka.torn, (seed, story.happened)
        struck.update((kind, operation) for _, kind, operation in story.happened)
        struck["", "seeds"] += 1
        struck["", "trained together"] += any(map(trained_together, left.deltas))
        struck["", "saw traffic"] += any(len(process.engine.traffic_sample) for process in story.processes)


def trained_together(record: Any) -> bool:
    cause = decode_delta(record.value).cause
    return cause is not UNSET and len(cause.together) > 1


def test_the_stories_spare_no_step(struck: Counter[tuple[str, str]]) -> None:
    if struck["", "seeds"] < SEEDS:
        pytest.skip("one process runs only a part of the stories; `make chaos` runs all of them")
    wanted = {(kind, operation) for kind in ("kill", "fail") for operation in OPERATIONS}
    wanted |= {(passage, operation) for passage in PASSAGES for operation in REQUESTS}
    assert wanted - {what for what, times in struck.items() if times > 2} == set()
    assert {kind for kind, _ in struck} - {""} == set(FAULTS) | set(PASSAGES)
    assert struck["", "trained together"] > SEEDS / 10
    assert struck["", "saw traffic"] > SEEDS / 2


def test_the_stories_tear_transactions_of_a_producer_that_keeps_its_epoch() -> None:
    """Such is kafka-python alone. So the stories above would show a product that lets a late end take effect."""

    def tears(seed: int) -> bool:
        story = Story(seed, "per producer", torn=0.3)
        try:
            story.play()
            return story.kafka.torn > 0
        finally:
            story.finish()

    assert any(map(tears, range(200)))
