"""`CodebookReplica`: it holds the published deltas, never goes back, and stops where the history does not continue."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracestream.deploy.local.processes import find_free_port
from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.observability.metrics import RADIUS_MISMATCH
from gracestream.pipeline.replica.codebook_replica import DELTA_WAIT_SECONDS, CodebookReplica
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import RedisHeadStore, StaleHeadError
from gracestream.schemas.deltas import Delta
from tests.support.examples import examples
from tests.support.running import wait_until
from tests.support.tiny_models import LAYER, MODEL, added, sealed
from tests.support.written_history import History, same


@pytest.fixture
def history(quick: Settings) -> Iterator[History]:
    made = History(quick)
    yield made
    made.close()


def step(codebook_replica: CodebookReplica) -> int:
    """Synchronise as before each batch; returns the replica's seq."""
    codebook_replica.sync_to_head(codebook_replica.read_head())
    return codebook_replica.codebook.seq


def lost(settings: Settings) -> Settings:
    """The same deployment with a Redis that does not answer."""
    return settings.replace(redis=f"redis://127.0.0.1:{find_free_port()}/0")


class TestFollowing:
    def test_it_holds_the_published_deltas_and_no_more(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        history.lead()
        history.add("a", [1.0, 0.0])
        history.publish()
        history.add("b", [0.0, 1.0])
        wait_until(lambda: codebook_replica._follower.latest_seq == 3)
        assert step(codebook_replica) == 2
        assert codebook_replica.codebook.entry_ids == ["a"]
        history.publish()
        assert step(codebook_replica) == 3
        assert same(codebook_replica.codebook, history.codebook)
        nearest = codebook_replica.index.nearest(torch.tensor([[0.1, 0.9]]))
        assert codebook_replica.codebook.entry_ids[int(nearest.slots_B[0])] == "b"

    def test_each_delta_is_decoded_and_checked_once_in_many_polls(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        history.lead()
        history.add("a", [1.0, 0.0])
        history.publish()
        history.add("b", [0.0, 1.0])
        history.add("c", [1.0, 1.0])
        decoded, checked = list[int](), list[int]()
        decode, check_position = msgspec.msgpack.decode, Codebook._check_position

        def counted_decode(*args: Any, **options: Any) -> Any:
            found = decode(*args, **options)
            decoded.append(found.seq)
            return found

        def counted_check(codebook: Codebook, delta: Delta, record: bytes) -> None:
            checked.append(delta.seq)
            check_position(codebook, delta, record)

        monkeypatch.setattr(msgspec.msgpack, "decode", counted_decode)
        monkeypatch.setattr(Codebook, "_check_position", counted_check)
        codebook_replica = codebook_replica_of(history.settings)
        assert codebook_replica.catch_up(30)
        wait_until(lambda: codebook_replica._follower.latest_seq == 4)
        assert [step(codebook_replica) for _ in range(20)] == [2] * 20
        assert checked == [1, 2, 3], "the next delta is checked before it is published"
        history.publish()
        assert step(codebook_replica) == 4
        assert (decoded, checked) == ([1, 2, 3, 4], [1, 2, 3, 4])

    def test_it_never_goes_back(self, history: History, codebook_replica_of: Callable[..., CodebookReplica]) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        history.lead()
        for entry_id in "abc":
            history.add(entry_id, [1.0, 0.0])
        history.publish()
        assert step(codebook_replica) == 4
        older = Codebook(history.settings.model.codebook, MODEL, LAYER)
        older.apply(sealed(older, op="lead"))
        history.empty_redis()
        history.store.rebuild(older)
        assert step(codebook_replica) == 4
        assert not codebook_replica.degraded
        history.publish()
        with pytest.raises(StaleHeadError, match="delta 1 of term 1 is not published: Redis has a newer one"):
            history.store.rebuild(older)

    def test_a_record_of_a_lower_term_is_skipped(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        history.lead()
        history.add("a", [1.0, 0.0])
        stale = Codebook(history.settings.model.codebook, MODEL, LAYER)
        stale.apply(sealed(stale, op="lead"))
        history.lead()
        for _ in range(4):  # as an editor without fencing would write
            record = sealed(stale, added(f"stale-{stale.seq}", [5.0, 5.0], 1.0))
            stale.apply(record)
            history.write(record)
        history.add("b", [0.0, 1.0])
        history.publish()
        wait_until(lambda: step(codebook_replica) == history.codebook.seq, 8, "the head")
        assert same(codebook_replica.codebook, history.codebook)

    def test_radii_in_redis_that_are_not_the_logs_are_counted_and_not_served(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        history.lead()
        history.add("a", [1.0, 0.0], radius=0.1)
        history.publish()
        history.redis.hset(history.redis_key("radii"), "a", "99")
        before = RADIUS_MISMATCH._value.get()
        assert step(codebook_replica) == 2
        assert RADIUS_MISMATCH._value.get() == before + 1
        assert codebook_replica.codebook.radii_N.tolist() == [np.float32(0.1)]

    def test_the_wait_for_a_min_seq_is_longer_once_its_delta_was_read(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        history.lead()
        history.publish()
        history.add("a", [1.0, 0.0])
        wait_until(lambda: codebook_replica._follower.latest_seq == 2)
        assert [codebook_replica.should_wait_for(2, waited) for waited in (0.0, 1.9, 2.1)] == [True, True, False]
        assert [codebook_replica.should_wait_for(3, waited) for waited in (0.0, 0.4, 0.6)] == [True, True, False]

    def test_an_unreadable_published_delta_is_reported_and_waited_for_once(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        history.lead()
        unwritten = sealed(history.codebook, added("a", [1.0, 0.0], 1.0))
        history.codebook.apply(unwritten)
        history.store.rebuild(history.codebook)
        waits: list[float] = []
        take = codebook_replica._follower.poll

        def noted(seq: int, timeout: float) -> list[tuple[int, bytes]]:
            waits.append(timeout)
            return take(seq, min(timeout, 0.5))

        monkeypatch.setattr(codebook_replica._follower, "poll", noted)
        wait_until(lambda: codebook_replica._follower.latest_seq == 1)
        assert [step(codebook_replica), step(codebook_replica)] == [1, 1]
        assert codebook_replica.unread_head_seq == 2
        assert len(waits) == 3, "for the deltas already read, once for the others, and not again"
        assert waits[0] <= DELTA_WAIT_SECONDS
        assert 0 < waits[1] <= waits[0]
        assert waits[2] == 0
        history.write(unwritten)
        wait_until(lambda: step(codebook_replica) == 2)
        assert codebook_replica.unread_head_seq == 0


class TestStart:
    @pytest.mark.parametrize("redis", ["with a head", "empty", "lost"])
    def test_it_has_caught_up_once_it_has_read_the_log(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica], redis: str
    ) -> None:
        history.lead()
        for number in range(50):
            history.add(f"e{number}", [float(number), 0.0])
        if redis == "with a head":
            history.publish()
        codebook_replica = codebook_replica_of(lost(history.settings) if redis == "lost" else history.settings)
        assert codebook_replica.catch_up(20)
        assert same(codebook_replica.codebook, history.codebook)

    def test_it_has_caught_up_with_an_empty_log(
        self, quick: Settings, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(quick)
        assert codebook_replica.catch_up(20)
        assert codebook_replica.codebook.seq == 0
        codebook_replica.sync_to_head(codebook_replica.read_head())
        assert not codebook_replica.degraded

    def test_an_unreadable_first_record_is_an_error(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        history.write(b"no delta")
        with pytest.raises(HistoryError, match="the record at offset 0 of deltas cannot be read: not a valid delta"):
            codebook_replica_of(history.settings).catch_up(20)

    def test_a_start_reads_the_log_before_it_waits_for_a_head_beyond_the_log(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        history.lead()
        ahead = Codebook(history.settings.model.codebook, MODEL, LAYER)
        ahead.apply(sealed(ahead, op="lead"))
        ahead.apply(sealed(ahead, added("a", [1.0], 1.0)))
        history.store.rebuild(ahead)
        codebook_replica = codebook_replica_of(history.settings.replace(redis_outage_grace=600.0))
        assert not codebook_replica.catch_up(1), "within the grace period the delta may still arrive"
        codebook_replica = codebook_replica_of(history.settings)
        assert codebook_replica.catch_up(20)
        assert codebook_replica.degraded
        assert codebook_replica.codebook.seq == 1


class TestWithoutRedis:
    def test_it_keeps_its_codebook_for_the_grace_period_then_follows_the_log(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        history.lead()
        history.publish()
        assert step(codebook_replica) == 1
        with_redis = codebook_replica._store
        codebook_replica._store = RedisHeadStore(
            redis_client(lost(history.settings).redis),
            history.settings.kafka.topic_prefix,
            history.settings.model.codebook,
        )
        history.add("a", [1.0, 0.0])
        wait_until(lambda: codebook_replica._follower.latest_seq == 2)
        lost_at = time.monotonic()
        assert step(codebook_replica) == 1
        assert codebook_replica.degraded
        wait_until(lambda: step(codebook_replica) == 2)
        assert time.monotonic() - lost_at > history.settings.redis.outage_grace
        assert codebook_replica.degraded
        codebook_replica._store = with_redis
        assert step(codebook_replica) == 2, "Redis answers again, one delta behind"
        assert not codebook_replica.degraded
        history.publish()
        assert step(codebook_replica) == 2

    def test_an_empty_redis_counts_as_lost(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        history.lead()
        history.publish()
        assert step(codebook_replica) == 1
        history.empty_redis()
        assert step(codebook_replica) == 1
        assert codebook_replica.degraded

    def test_data_that_no_editor_writes_are_no_head(
        self, history: History, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(history.settings)
        history.lead()
        history.publish()
        assert step(codebook_replica) == 1
        history.redis.hset(history.redis_key("head"), "seq", "many")
        assert codebook_replica.read_head() == "lost"
        history.redis.set(history.redis_key("head"), "of another type")
        assert codebook_replica.read_head() == "lost"
        assert step(codebook_replica) == 1
        assert codebook_replica.degraded

    def test_a_lost_redis_delays_no_batch(
        self, quick: Settings, codebook_replica_of: Callable[..., CodebookReplica]
    ) -> None:
        codebook_replica = codebook_replica_of(lost(quick))
        assert codebook_replica.read_head() == "lost"
        assert codebook_replica.redis_unavailable
        assert codebook_replica.wait_for_head(None) == "lost"


finite = st.floats(min_value=0, width=32, allow_nan=False, allow_infinity=False)


@examples(0.3)
@given(radii=st.lists(finite, min_size=1, max_size=200))
def test_radii_in_redis_are_exact(redis_url: str, radii: list[float]) -> None:
    settings = load_settings(redis=redis_url, topic_prefix="bits-")
    codebook = Codebook(settings.model.codebook, MODEL, LAYER)
    codebook.apply(sealed(codebook, op="lead"))
    codebook.apply(sealed(codebook, *(added(f"e{n}", [1.0], radius) for n, radius in enumerate(radii))))
    with redis_client(settings.redis) as client:
        store = RedisHeadStore(client, settings.kafka.topic_prefix, settings.model.codebook)
        client.delete(*store._keys)
        store.rebuild(codebook)
        head = store.read_head(0)
        assert head is not None
        for found in (store.read_radii(), head.changed_radii):
            bits = [np.float32(found[f"e{n}"]).tobytes() for n in range(len(radii))]
            assert bits == [radius.tobytes() for radius in codebook.radii_N]
        client.delete(*store._keys)
