"""Ten thousand mutants of real deltas: each is rejected with a reason, and none is applied, not even in part."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.schemas.deltas import DIGEST_BYTES, EntryChange, chain_digest
from tests.support.hostile import mutated_bytes
from tests.support.tiny_models import CODEBOOK, LAYER, MODEL, added, sealed, with_radius

MUTANTS = 10_000
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**53, 2**63, 2**64 - 1, 0.5, float("nan"), float("inf"), -1e39, "", "e1", "\x00", b"",
    bytes(7), bytes(32), [], ["e1", "e1"], [0] * 9, {}, {"a": {}}, {"dtype": "float32", "shape": [2], "data": bytes(8)},
    {"dtype": "float32", "shape": [2**62, 4], "data": b""}, msgspec.msgpack.Ext(5, b"x"),
]  # fmt: skip


def history() -> list[bytes]:
    """A lead, entries, changed ones, one removed, and a new term."""
    codebook = Codebook(CODEBOOK, MODEL, LAYER)
    records = []
    makers: list[Callable[[], bytes]] = [
        lambda: sealed(codebook, op="lead"),
        lambda: sealed(codebook, added("e1", [1.0, 2.0], 0.5), added("e2", [3.0, -1.0], 0.25)),
        lambda: with_radius(codebook, "e1", 0.75, np.array([5.0, 6.0])),
        lambda: sealed(codebook, EntryChange(entry_id="e2", removed=True), op="undo"),
        lambda: sealed(codebook, op="lead", environment={"torch": "2"}),
        lambda: sealed(codebook, added("e3", [2.0, 2.0], 1.0, label=(4, 5))),
    ]
    for make in makers:
        records.append(make())
        codebook.apply(records[-1])
    return records


RECORDS = history()


def folded(count: int) -> Codebook:
    """The codebook after so many of them."""
    codebook = Codebook(CODEBOOK, MODEL, LAYER)
    for record in RECORDS[:count]:
        codebook.apply(record)
    return codebook


def with_odd_part(made: random.Random, record: bytes) -> bytes:
    """The record with one of its parts, at any depth, replaced, doubled or missing; its digest is still the last."""
    fields = msgspec.msgpack.decode(record)
    node: Any = fields
    while True:
        parts = [name for name in node if name != "digest"] if isinstance(node, dict) else list(range(len(node)))
        part = made.choice(parts)
        if not isinstance(node[part], dict | list) or not node[part] or made.random() < 0.3:
            break
        node = node[part]
    if isinstance(node, dict) and made.random() < 0.15:
        del node[part]
    else:
        node[part] = made.choice(ODD)
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_mutant_is_never_applied(seed: int) -> None:
    made = random.Random(seed)
    books = [folded(count) for count in range(len(RECORDS))]
    states = [(book.seq, book.term, book.digest, book.state_digest()) for book in books]
    met: Counter[str] = Counter()
    for _ in range(MUTANTS // 2):
        place = made.randrange(len(RECORDS))
        book, record = books[place], RECORDS[place]
        mutant = made.choice([mutated_bytes, with_odd_part])(made, record)
        if mutant == record:
            continue
        try:
            assert book.apply(mutant) is None, mutant
            met["of a lower term"] += 1
        except HistoryError as fault:
            met["rejected" if str(fault) else "without a reason"] += 1
        assert (book.seq, book.term, book.digest) == states[place][:3]
        assert book.state_digest() == states[place][3]
    assert met["rejected"] > MUTANTS / 4
    assert not met["without a reason"]
    for book, record in zip(books, RECORDS, strict=True):
        assert book.apply(record) is not None, "what is bit for bit the record is applied all the same"


def test_a_mutant_that_continues_the_chain_is_applied_whole_or_not_at_all() -> None:
    made = random.Random(3)
    met: Counter[str] = Counter()
    for _ in range(2_000):
        place = made.randrange(len(RECORDS))
        book = folded(place)
        before = book.state_digest()
        blank = with_odd_part(made, RECORDS[place])
        forged = blank[:-DIGEST_BYTES] + chain_digest(book.digest, blank)
        try:
            applied = book.apply(forged)
        except HistoryError:
            applied = None
        if applied is None:
            assert (book.seq, book.state_digest()) == (place, before)
            met["rejected"] += 1
            continue
        met["applied"] += 1
        assert book.seq == place + 1
        assert len(book.entry_ids) == len(book.labels) == len(book.keys_ND) == len(book.values_NV) == len(book.radii_N)
        assert np.isfinite(book.keys_ND).all()
        assert np.isfinite(book.values_NV).all()
        assert (book.radii_N >= 0).all()
        assert book.state_digest() != before or not applied.slots
    assert min(met["rejected"], met["applied"]) > 10
