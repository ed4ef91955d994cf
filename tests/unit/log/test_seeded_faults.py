"""A thousand random stories of editors that are killed, paused, cut off and doubled; a checker reads how each ends."""

from collections.abc import Iterator

import pytest
import structlog

from tests.doubles.checker import faults
from tests.doubles.world import Story

SEEDS = 1000
AT_ONCE = 50
"""Seeds of one test, so that a run shows how far it has come."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A thousand stories say too much."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_whatever_happens_each_feedback_record_is_done_once_and_all_agree(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        story = Story(seed)
        try:
            story.tell()
            found, outlived = faults(story.left()), story.outlived()
        finally:
            story.finish()
        assert not found, (seed, story.happened)
        assert not story.errors(), (seed, story.happened)
        assert not outlived, (seed, story.happened)
        assert not story.kafka.unplaced, (seed, story.happened)
