"""Publishing deltas in Redis, on the real Redis and on its test double, which the seeded fault tests use."""

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
from gracestream.pipeline.stores import redis_head
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import Head, RedisHeadStore, StaleHeadError
from gracestream.schemas.deltas import EntryChange
from tests.support.doubles.redis import MemoryRedis
from tests.support.running import settings_for
from tests.support.tiny_models import LAYER, MODEL, added, sealed

Between = Callable[[int, Callable[[], object]], None]


@pytest.fixture(params=["double", pytest.param("redis", marks=pytest.mark.kafka)])
def client(request: pytest.FixtureRequest, prefix: str) -> Iterator[Redis]:
    """A client of the test double, and one of the real Redis."""
    if request.param == "double":
        yield MemoryRedis().client()
        return
    with redis_client(settings_for("unused", request.getfixturevalue("redis_url"), prefix).redis) as made:
        yield made


@pytest.fixture
def store(client: Redis, prefix: str) -> RedisHeadStore:
    """The head and radii of one codebook."""
    return RedisHeadStore(client, prefix, "default")


def new_codebook(term: int = 1) -> Codebook:
    made = Codebook("default", MODEL, LAYER)
    made.apply(sealed(made, op="lead", term=term))
    return made


def add_entry(codebook: Codebook, entry_id: str, radius: float) -> AppliedDelta:
    """Apply a delta that adds one entry."""
    applied = codebook.apply(sealed(codebook, added(entry_id, [1.0], radius)))
    assert applied is not None
    return applied


class TestRadii:
    def test_a_delta_is_published_with_its_radii(self, store: RedisHeadStore) -> None:
        assert store.read_head(0) is None
        book = new_codebook()
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

    def test_the_head_never_goes_back(self, store: RedisHeadStore) -> None:
        book, newer = new_codebook(), new_codebook(term=2)
        newer.apply(sealed(newer, added("e", [1.0], 1.0)))
        store.rebuild(newer)
        with pytest.raises(StaleHeadError):
            store.rebuild(book)
        assert store.read_radii() == {"e": 1.0}

    def test_a_delta_of_an_older_term_changes_nothing(self, store: RedisHeadStore) -> None:
        newer, stale = new_codebook(term=2), new_codebook(term=1)
        add_entry(newer, "e", 1.0)
        for number in range(3):
            late = add_entry(stale, f"stale-{number}", 5.0)
        assert stale.seq > newer.seq
        self.is_not_published(store, newer, stale, late)

    def test_a_delta_of_an_older_seq_changes_nothing(self, store: RedisHeadStore) -> None:
        newer = new_codebook(term=2)
        stale = newer.copy()
        late = add_entry(stale, "e", 5.0)
        for number, entry_id in enumerate("ef"):
            add_entry(newer, entry_id, float(number))
        self.is_not_published(store, newer, stale, late)

    def is_not_published(self, store: RedisHeadStore, newer: Codebook, stale: Codebook, late: AppliedDelta) -> None:
        """Head and radii stay those of `newer`, although `late`, the newest delta of `stale`, is sent."""
        store.rebuild(newer)
        before = store.read_head(0), store.read_radii()
        with pytest.raises(StaleHeadError, match=f"delta {stale.seq} of term {stale.term} is not published"):
            store.publish(late, stale)
        assert (store.read_head(0), store.read_radii()) == before
        assert before[0] == Head(newer.term, newer.seq, newer.digest.hex(), {**before[1]})
        assert before[1].keys() == set(newer.entry_ids)

    def test_a_radius_that_is_not_in_the_log_is_removed(self, store: RedisHeadStore) -> None:
        book = new_codebook()
        book.apply(sealed(book, added("gone", [1.0], 1.0)))
        store.rebuild(book)
        other = new_codebook(term=2)
        other.apply(sealed(other, added("kept", [1.0], 2.0)))
        store.rebuild(other)
        assert store.read_radii() == {"kept": 2.0}
        head = store.read_head(1)
        assert head is not None
        assert head.changed_radii == {"kept": 2.0}


class TestSeveralScriptCalls:
    """A write that takes more than one call of the script."""

    @pytest.fixture(autouse=True)
    def _two_radii_per_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(redis_head, "RADII_PER_SCRIPT", 2)

    @pytest.fixture
    def other(self, client: Redis, prefix: str) -> RedisHeadStore:
        """The same head and radii, for another writer or reader."""
        return RedisHeadStore(client, prefix, "default")

    @pytest.fixture
    def between(self, store: RedisHeadStore, monkeypatch: pytest.MonkeyPatch) -> Between:
        """Runs a function before the store's next script call after a number of calls."""

        def run_before(calls: int, function: Callable[[], object]) -> None:
            write, made = store._publish, itertools.count()

            def interrupted(**given: Any) -> Any:
                if next(made) == calls:
                    function()
                return write(**given)

            monkeypatch.setattr(store, "_publish", interrupted)

        return run_before

    def test_nothing_is_published_before_the_last_call(
        self, store: RedisHeadStore, other: RedisHeadStore, between: Between
    ) -> None:
        book = new_codebook()
        book.apply(sealed(book, *(added(f"e{number}", [1.0], number + 0.5) for number in range(5))))
        reads = []
        for calls in (1, 2):
            between(calls, lambda: reads.append((other.read_head(0), other.count_radii())))
        store.rebuild(book)
        assert reads == [(None, 2), (None, 4)]
        assert is_published(other, book)

    @pytest.mark.parametrize("calls", [1, 2])
    @pytest.mark.parametrize("successor", [False, True], ids=["by the same editor", "by the next editor"])
    def test_an_interrupted_write_is_not_served_and_is_completed(
        self, store: RedisHeadStore, other: RedisHeadStore, between: Between, calls: int, *, successor: bool
    ) -> None:
        book, copy, follower = new_codebook(), new_codebook(), DeltaFollower(load_settings().kafka)
        replica = CodebookReplica(copy, KeyIndex(copy, torch.device("cpu")), other, follower, load_settings())
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
        head, served = Head(1, 2, book.digest.hex(), {"kept": 1.0}), book.state_digest()
        assert copy.state_digest() == served

        new = [added(f"e{number}", [2.0], 0.25) for number in range(3)]
        applied = commit(EntryChange(entry_id="moved", radius=0.5), EntryChange(entry_id="gone", removed=True), *new)
        between(calls, lose_connection)
        editor.publish(applied)
        assert not editor.in_sync
        assert other.read_head(0) == head
        replica.sync_to_head(replica.read_head())
        assert copy.state_digest() == served

        if successor:
            commit(op="lead", term=2)
            editor = RedisPublisher(other, book, 0.0, retry_seconds=0.0)
        editor.reconcile()
        assert editor.in_sync
        assert is_published(other, book)
        replica.sync_to_head(replica.read_head())
        assert copy.state_digest() == book.state_digest() != served
        assert RADIUS_MISMATCH._value.get() == mismatches

    def test_a_writer_stops_after_a_newer_head(
        self, store: RedisHeadStore, other: RedisHeadStore, between: Between
    ) -> None:
        book = new_codebook()
        applied = book.apply(sealed(book, *(added(f"e{number}", [1.0], 1.0) for number in range(5))))
        assert applied is not None
        newer = book.copy()
        newer.apply(sealed(newer, op="lead", term=2))
        newer.apply(sealed(newer, *(EntryChange(entry_id=f"e{number}", radius=0.5) for number in range(5))))
        between(1, lambda: other.rebuild(newer))
        with pytest.raises(StaleHeadError):
            store.publish(applied, book)
        assert is_published(other, newer)


def lose_connection() -> None:
    raise RedisConnectionError("connection lost")


def is_published(store: RedisHeadStore, codebook: Codebook) -> bool:
    """True if head and radii are those of a codebook."""
    head = Head(codebook.term, codebook.seq, codebook.digest.hex(), {})
    radii = {entry_id: codebook.radii_N[codebook.slot(entry_id)] for entry_id in codebook.entry_ids}
    return store.read_head(codebook.seq) == head and store.read_radii() == radii
