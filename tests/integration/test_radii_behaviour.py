"""What becomes live in Redis, on the real one and on its double alike: so the seeded fault tests mean something."""

from collections.abc import Iterator

import pytest

from pipeline.clients import redis_client
from pipeline.codebook import Applied, Codebook
from pipeline.radius_store import Head, RadiusStore, StaleError
from pipeline.settings import load_settings
from tests.doubles.redis import MemoryRedis
from tests.integration.running import settings_for
from tests.unit.engine.tiny import LAYER, MODEL, added, sealed


@pytest.fixture(params=["double", pytest.param("redis", marks=pytest.mark.kafka)])
def store(request: pytest.FixtureRequest, prefix: str) -> Iterator[RadiusStore]:
    """The radii of one codebook, in the double and in the real Redis."""
    if request.param == "double":
        yield RadiusStore(MemoryRedis().client(), load_settings(prefix=prefix))
        return
    settings = settings_for("unused", request.getfixturevalue("redis_url"), prefix)
    client = redis_client(settings)
    yield RadiusStore(client, settings)
    client.close()


def led(term: int = 1) -> Codebook:
    made = Codebook("default", MODEL, LAYER)
    made.apply(sealed(made, op="lead", term=term))
    return made


def grown(codebook: Codebook, entry_id: str, radius: float) -> Applied:
    """One more entry."""
    applied = codebook.apply(sealed(codebook, added(entry_id, [1.0], radius)))
    assert applied is not None
    return applied


class TestRadii:
    def test_a_delta_becomes_live_with_its_radii(self, store: RadiusStore) -> None:
        assert store.head(0) is None
        book = led()
        store.rebuild(book)
        applied = book.apply(sealed(book, added("e1", [1.0], 0.5), added("e2", [2.0], 1.25)))
        assert applied is not None
        store.publish(applied, book)
        head = store.head(1)
        assert head is not None
        assert (head.term, head.seq, head.digest) == (1, 2, book.digest.hex())
        assert head.changed == {"e1": 0.5, "e2": 1.25}
        assert store.radii() == {"e1": 0.5, "e2": 1.25}
        assert store.count() == 2
        again = store.head(2)
        assert again is not None
        assert again.changed == {}

    def test_it_never_goes_back(self, store: RadiusStore) -> None:
        book, newer = led(), led(term=2)
        newer.apply(sealed(newer, added("e", [1.0], 1.0)))
        store.rebuild(newer)
        with pytest.raises(StaleError):
            store.rebuild(book)
        assert store.radii() == {"e": 1.0}

    def test_a_delta_of_an_older_term_changes_nothing(self, store: RadiusStore) -> None:
        live, stale = led(term=2), led(term=1)
        grown(live, "e", 1.0)
        for number in range(3):
            late = grown(stale, f"stale-{number}", 5.0)
        assert stale.seq > live.seq
        self.is_refused(store, live, stale, late)

    def test_a_delta_of_an_older_seq_changes_nothing(self, store: RadiusStore) -> None:
        live = led(term=2)
        stale = live.copy()
        late = grown(stale, "e", 5.0)
        for number, entry_id in enumerate("ef"):
            grown(live, entry_id, float(number))
        self.is_refused(store, live, stale, late)

    def is_refused(self, store: RadiusStore, live: Codebook, stale: Codebook, late: Applied) -> None:
        """Head and radii stay those of `live`, whatever `late` says, which is the newest delta of `stale`."""
        store.rebuild(live)
        before = store.head(0), store.radii()
        with pytest.raises(StaleError, match=f"delta {stale.seq} of term {stale.term} is not made live"):
            store.publish(late, stale)
        assert (store.head(0), store.radii()) == before
        assert before[0] == Head(live.term, live.seq, live.digest.hex(), {**before[1]})
        assert before[1].keys() == set(live.entry_ids)

    def test_what_the_log_does_not_know_goes(self, store: RadiusStore) -> None:
        book = led()
        book.apply(sealed(book, added("gone", [1.0], 1.0)))
        store.rebuild(book)
        other = led(term=2)
        other.apply(sealed(other, added("kept", [1.0], 2.0)))
        store.rebuild(other)
        assert store.radii() == {"kept": 2.0}
        head = store.head(1)
        assert head is not None
        assert head.changed == {"gone": None, "kept": 2.0}
