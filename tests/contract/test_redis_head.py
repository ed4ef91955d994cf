"""What becomes live in Redis, on the real one and on its double alike: so the seeded fault tests mean something."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from gracestream.pipeline.codebook.codebook import AppliedDelta, Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.editor.redis_publisher import RedisPublisher
from gracestream.pipeline.observability.metrics import RADIUS_MISMATCH
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.settings import load_settings
from gracestream.pipeline.stores import redis_head as radius_store
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import Head, RedisHeadStore, StaleHeadError
from gracestream.schemas.deltas import EntryChange
from tests.support.doubles.redis import MemoryRedis
from tests.support.running import settings_for
from tests.support.tiny_models import LAYER, MODEL, added, sealed

Between = Callable[[int, Callable[[], object]], None]


@pytest.fixture(params=["double", pytest.param("redis", marks=pytest.mark.kafka)])
def client(request: pytest.FixtureRequest, prefix: str) -> Iterator[Redis]:
    """Of the double, and of the real Redis."""
    if request.param == "double":
        yield MemoryRedis().client()
        return
    with redis_client(settings_for("unused", request.getfixturevalue("redis_url"), prefix).redis) as made:
        yield made


@pytest.fixture
def store(client: Redis, prefix: str) -> RedisHeadStore:
    """The radii of one codebook."""
    return RedisHeadStore(client, prefix, "default")


def led(term: int = 1) -> Codebook:
    made = Codebook("default", MODEL, LAYER)
    made.apply(sealed(made, op="lead", term=term))
    return made


def grown(codebook: Codebook, entry_id: str, radius: float) -> AppliedDelta:
    """One more entry."""
    applied = codebook.apply(sealed(codebook, added(entry_id, [1.0], radius)))
    assert applied is not None
    return applied


class TestRadii:
    def test_a_delta_becomes_live_with_its_radii(self, store: RedisHeadStore) -> None:
        assert store.read_head(0) is None
        book = led()
        store.rebuild(book)
        applied = book.apply(sealed(book, added("e1", [1.0], 0.5), added("e2", [2.0], 1.25)))
        assert applied is not None
        store.publish(applied, book)
        head = store.read_head(1)
        assert head is not None
        assert (head.term, head.seq, head.digest) == (1, 2, book.digest.hex())
        assert head.changed_radii == {"e1": 0.5, "e2": 1.25}
        assert store.read_radii() == {"e1": 0.5, "e2": 1.25}
        assert store.count_radii() == 2
        again = store.read_head(2)
        assert again is not None
        assert again.changed_radii == {}

    def test_it_never_goes_back(self, store: RedisHeadStore) -> None:
        book, newer = led(), led(term=2)
        newer.apply(sealed(newer, added("e", [1.0], 1.0)))
        store.rebuild(newer)
        with pytest.raises(StaleHeadError):
            store.rebuild(book)
        assert store.read_radii() == {"e": 1.0}

    def test_a_delta_of_an_older_term_changes_nothing(self, store: RedisHeadStore) -> None:
        live, stale = led(term=2), led(term=1)
        grown(live, "e", 1.0)
        for number in range(3):
            late = grown(stale, f"stale-{number}", 5.0)
        assert stale.seq > live.seq
        self.is_refused(store, live, stale, late)

    def test_a_delta_of_an_older_seq_changes_nothing(self, store: RedisHeadStore) -> None:
        live = led(term=2)
        stale = live.copy()
        late = grown(stale, "e", 5.0)
        for number, entry_id in enumerate("ef"):
            grown(live, entry_id, float(number))
        self.is_refused(store, live, stale, late)

    def is_refused(self, store: RedisHeadStore, live: Codebook, stale: Codebook, late: AppliedDelta) -> None:
        """Head and radii stay those of `live`, whatever `late` says, which is the newest delta of `stale`."""
        store.rebuild(live)
        before = store.read_head(0), store.read_radii()
        with pytest.raises(StaleHeadError, match=f"delta {stale.seq} of term {stale.term} is not published"):
            store.publish(late, stale)
        assert (store.read_head(0), store.read_radii()) == before
        assert before[0] == Head(live.term, live.seq, live.digest.hex(), {**before[1]})
        assert before[1].keys() == set(live.entry_ids)

    def test_what_the_log_does_not_know_goes(self, store: RedisHeadStore) -> None:
        book = led()
        book.apply(sealed(book, added("gone", [1.0], 1.0)))
        store.rebuild(book)
        other = led(term=2)
        other.apply(sealed(other, added("kept", [1.0], 2.0)))
        store.rebuild(other)
        assert store.read_radii() == {"kept": 2.0}
        head = store.read_head(1)
        assert head is not None
        assert head.changed_radii == {"kept": 2.0}


class TestSeveralBatches:
    """What takes more than one call of the script that writes."""

    @pytest.fixture(autouse=True)
    def _two_radii_a_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(radius_store, "RADII_PER_SCRIPT", 2)

    @pytest.fixture
    def other(self, client: Redis, prefix: str) -> RedisHeadStore:
        """The same radii, for whoever else writes or reads them."""
        return RedisHeadStore(client, prefix, "default")

    @pytest.fixture
    def between(self, store: RedisHeadStore, monkeypatch: pytest.MonkeyPatch) -> Between:
        """Lets something happen once the store has made so many calls of the script."""

        def happens(calls: int, what: Callable[[], object]) -> None:
            write, made = store._publish, itertools.count()

            def interrupted(**given: Any) -> Any:
                if next(made) == calls:
                    what()
                return write(**given)

            monkeypatch.setattr(store, "_publish", interrupted)

        return happens

    def test_nothing_is_live_before_the_last_one(
        self, store: RedisHeadStore, other: RedisHeadStore, between: Between
    ) -> None:
        book = led()
        book.apply(sealed(book, *(added(f"e{number}", [1.0], number + 0.5) for number in range(5))))
        seen = []
        for calls in (1, 2):
            between(calls, lambda: seen.append((other.read_head(0), other.count_radii())))
        store.rebuild(book)
        assert seen == [(None, 2), (None, 4)]
        assert is_live(other, book)

    @pytest.mark.parametrize("calls", [1, 2])
    @pytest.mark.parametrize("successor", [False, True], ids=["by the same editor", "by the next one"])
    def test_what_was_broken_off_is_not_served_and_is_completed(
        self, store: RedisHeadStore, other: RedisHeadStore, between: Between, calls: int, *, successor: bool
    ) -> None:
        book, mirrored, follower = led(), led(), DeltaFollower(load_settings().kafka)
        replica = CodebookReplica(mirrored, KeyIndex(mirrored, torch.device("cpu")), other, follower, load_settings())
        mismatches = RADIUS_MISMATCH._value.get()

        def commit(*entries: EntryChange, **fields: Any) -> AppliedDelta:
            record = sealed(book, *entries, **fields)
            applied = book.apply(record)
            assert applied is not None
            follower._buffer_records([(book.seq, record)])
            return applied

        commit(*(added(entry_id, [1.0], 1.0) for entry_id in ("kept", "moved", "gone")))
        editor = RedisPublisher(store, book, 0.0, retry_seconds=0.0)
        editor.reconcile()
        replica.sync_to_head(replica.read_head())
        live, served = Head(1, 2, book.digest.hex(), {"kept": 1.0}), book.state_digest()
        assert mirrored.state_digest() == served

        new = [added(f"e{number}", [2.0], 0.25) for number in range(3)]
        applied = commit(EntryChange(entry_id="moved", radius=0.5), EntryChange(entry_id="gone", removed=True), *new)
        between(calls, redis_is_lost)
        editor.publish(applied)
        assert not editor.in_sync
        assert other.read_head(0) == live
        replica.sync_to_head(replica.read_head())
        assert mirrored.state_digest() == served

        if successor:
            commit(op="lead", term=2)
            editor = RedisPublisher(other, book, 0.0, retry_seconds=0.0)
        editor.reconcile()
        assert editor.in_sync
        assert is_live(other, book)
        replica.sync_to_head(replica.read_head())
        assert mirrored.state_digest() == book.state_digest() != served
        assert RADIUS_MISMATCH._value.get() == mismatches

    def test_a_writer_that_was_overtaken_goes_no_further(
        self, store: RedisHeadStore, other: RedisHeadStore, between: Between
    ) -> None:
        book = led()
        applied = book.apply(sealed(book, *(added(f"e{number}", [1.0], 1.0) for number in range(5))))
        assert applied is not None
        newer = book.copy()
        newer.apply(sealed(newer, op="lead", term=2))
        newer.apply(sealed(newer, *(EntryChange(entry_id=f"e{number}", radius=0.5) for number in range(5))))
        between(1, lambda: other.rebuild(newer))
        with pytest.raises(StaleHeadError):
            store.publish(applied, book)
        assert is_live(other, newer)


def redis_is_lost() -> None:
    raise RedisConnectionError("connection lost")


def is_live(store: RedisHeadStore, codebook: Codebook) -> bool:
    """Whether the head and all radii are those of a codebook."""
    head = Head(codebook.term, codebook.seq, codebook.digest.hex(), {})
    radii = {entry_id: codebook.radii_N[codebook.slot(entry_id)] for entry_id in codebook.entry_ids}
    return store.read_head(codebook.seq) == head and store.read_radii() == radii
