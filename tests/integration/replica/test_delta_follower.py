"""`DeltaFollower`: its buffer is bounded, and a truncated log is an error."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.replica.delta_follower import MAX_BUFFERED_BYTES, DeltaFollower
from gracestream.pipeline.settings import Settings
from tests.support.running import wait_until
from tests.support.tiny_models import added
from tests.support.written_history import History, same


@pytest.fixture
def history(deployment: Settings) -> Iterator[History]:
    made = History(deployment)
    yield made
    made.close()


def test_a_log_larger_than_the_buffer_is_read_completely(
    history: History, codebook_replica_of: Callable[..., CodebookReplica]
) -> None:
    history.lead()
    wide = np.arange(1_500_000, dtype=np.float32)
    for number in range(7):  # of 12 MB each
        history.step(added(f"e{number}", wide + number, 1.0))
    follower = DeltaFollower(history.settings.kafka)
    follower.start()
    wait_until(lambda: follower._buffered_bytes > MAX_BUFFERED_BYTES)
    time.sleep(1)
    assert follower.latest_seq < 8
    assert not follower.at_end
    follower.close()
    codebook_replica = codebook_replica_of(history.settings)
    assert codebook_replica.catch_up(60)
    assert same(codebook_replica.codebook, history.codebook)


def test_a_start_beyond_the_end_of_a_truncated_log_is_an_error(history: History) -> None:
    history.lead()
    history.add("a", [1.0])
    history.lead()
    history.add("b", [2.0])
    follower = DeltaFollower(history.settings.kafka)
    follower.start(10**6, history.codebook.seq, history.codebook.term)
    try:
        _, first = wait_until(lambda: follower.poll(10**6, 0.1))[0]
        with pytest.raises(HistoryError, match="delta 3 of term 2 follows 4 of term 2: a gap"):
            history.codebook.apply(first)
    finally:
        follower.close()
