"""The codebook is the fold of its records: equal records, equal bits; a faulty record changes nothing at all."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.schemas.deltas import GENESIS_DIGEST, Delta, EntryChange, Tensor, decode_delta
from tests.support.examples import examples
from tests.support.tiny_models import CODEBOOK, LAYER, MODEL, added, filled, new_codebook, sealed

KEYS = np.arange(12, dtype=np.float32).reshape(4, 3)


def state(codebook: Codebook) -> tuple[Any, ...]:
    """All that a codebook is, as values that can be compared."""
    arrays = (codebook.keys_ND, codebook.values_NV, codebook.radii_N)
    place = (codebook.seq, codebook.term, codebook.digest, len(codebook), codebook.state_digest())
    return (*place, list(codebook.entry_ids), list(codebook.labels), *(array.tobytes() for array in arrays))


def raw(numbers: list[float]) -> Tensor:
    """A tensor whose numbers nobody checked."""
    array = np.array(numbers, "<f4")
    return Tensor(dtype="float32", shape=array.shape, data=array.tobytes())


def altered(change: EntryChange, **fields: Any) -> EntryChange:
    return msgspec.structs.replace(change, **fields)


NEW = added("new", [1, 2, 3], 1.0)
GOOD = EntryChange(entry_id="e0", radius=9.0)
FAULTS: dict[str, Callable[[Codebook], bytes]] = {
    "a gap": lambda c: sealed(c, NEW, seq=c.seq + 2),
    "the same seq again": lambda c: sealed(c, NEW, seq=c.seq),
    "a higher term without a lead": lambda c: sealed(c, NEW, term=c.term + 1),
    "a lead of the present term": lambda c: sealed(c, op="lead", term=c.term),
    "another model": lambda c: sealed(c, NEW, model="0" * 64),
    "another model of the layer's queries": lambda c: sealed(
        c, op="lead", model="0" * 64, environment={"query": "last"}
    ),
    "another model of unknown queries": lambda c: sealed(c, op="lead", model="0" * 64, environment={"query": "own"}),
    "another layer": lambda c: sealed(c, NEW, layer="layer.1"),
    "another codebook": lambda c: sealed(c, NEW, codebook="other"),
    "a digest of another chain": lambda _: sealed(new_codebook(), NEW, seq=3),
    "a flipped byte": lambda c: sealed(c, NEW).replace(b"new", b"now", 1),
    "a wrong digest": lambda c: sealed(c, NEW)[:-1] + bytes([sealed(c, NEW)[-1] ^ 1]),
    "a record cut short": lambda c: sealed(c, NEW)[:-1],
    "no record": lambda _: b"",
    "a key of another width": lambda c: sealed(c, altered(NEW, key=raw([1, 2]))),
    "a value of another width": lambda c: sealed(c, altered(NEW, value=raw([1, 2, 3, 4]))),
    "a key of two dimensions": lambda c: sealed(c, altered(NEW, key=Tensor.from_array(np.ones((1, 3))))),
    "a key of no numbers": lambda c: sealed(c, altered(NEW, key=raw([]))),
    "fewer bytes than the shape says": lambda c: sealed(
        c, altered(NEW, key=Tensor(dtype="float32", shape=(3,), data=bytes(8)))
    ),
    "a key of more bytes than the shape says": lambda c: sealed(
        c, altered(NEW, key=Tensor(dtype="float32", shape=(3,), data=bytes(16)))
    ),
    "a value whose shape is larger than any memory": lambda c: sealed(
        c, altered(NEW, value=Tensor(dtype="float32", shape=(2**31, 2**31), data=bytes(12)))
    ),
    "a value whose shape is larger than any memory and empty": lambda c: sealed(
        c, altered(NEW, value=Tensor(dtype="float32", shape=(2**31, 0, 2**31), data=b""))
    ),
    "a key of no dimension": lambda c: sealed(c, altered(NEW, key=Tensor(dtype="float32", shape=(), data=bytes(4)))),
    "numbers of another type": lambda c: sealed(
        c,
        altered(NEW, key=Tensor(dtype="float64", shape=(3,), data=bytes(24))),  # type: ignore[arg-type]
    ),
    "a key that is not a number": lambda c: sealed(c, altered(NEW, key=raw([1, np.nan, 3]))),
    "an infinite value": lambda c: sealed(c, altered(NEW, value=raw([1, np.inf, 3]))),
    "a negative radius": lambda c: sealed(c, altered(NEW, radius=-1.0)),
    "a radius that is not a number": lambda c: sealed(c, altered(NEW, radius=np.nan)),
    "an infinite radius": lambda c: sealed(c, altered(NEW, radius=np.inf)),
    "a radius of minus zero": lambda c: sealed(c, altered(NEW, radius=-0.0)),
    "a radius beyond float32": lambda c: sealed(c, altered(NEW, radius=1e39)),
    "a radius of a known entry that is not a number": lambda c: sealed(c, altered(GOOD, radius=np.nan)),
    "a label without end": lambda c: sealed(c, altered(NEW, label=tuple(range(2**16 + 1)))),
    "an id without end": lambda c: sealed(c, altered(NEW, entry_id="x" * 10_000_000)),
    "an id of nothing": lambda c: sealed(c, altered(NEW, entry_id="")),
    "an id without end removed": lambda c: sealed(c, EntryChange(entry_id="x" * 10_000_000, removed=True)),
    "an unknown entry removed": lambda c: sealed(c, EntryChange(entry_id="nobody", removed=True)),
    "a new entry without a key": lambda c: sealed(c, altered(NEW, key=msgspec.UNSET)),
    "a new entry without a value": lambda c: sealed(c, altered(NEW, value=msgspec.UNSET)),
    "a new entry without a radius": lambda c: sealed(c, altered(NEW, radius=msgspec.UNSET)),
    "a new entry without a label": lambda c: sealed(c, altered(NEW, label=msgspec.UNSET)),
    "one entry removed twice": lambda c: sealed(c, *[EntryChange(entry_id="e1", removed=True)] * 2),
    "an entry removed and then changed": lambda c: sealed(c, EntryChange(entry_id="e0", removed=True), GOOD),
}


REASONS = {
    "delta 4 of term 1 follows 2": ["a gap"],
    "delta 2 of term 1 follows 2": ["the same seq again"],
    "is of term 2 after term 1": ["a higher term without a lead"],
    "(lead) is of term 1 after term 1": ["a lead of the present term"],
    "GRACESTREAM_INJECT_TOKENS) as it was, or another GRACESTREAM_TOPIC_PREFIX": [
        "another model",
        "another model of unknown queries",
    ],
    "as it was (GRACESTREAM_QUERY_SOURCE=last in that history), or": ["another model of the layer's queries"],
    "set GRACESTREAM_LAYER": ["another layer"],
    "set GRACESTREAM_CODEBOOK": ["another codebook"],
    "does not continue the chain": ["a digest of another chain", "a flipped byte", "a wrong digest"],
    "truncated": ["a record cut short", "no record"],
    "has a key of shape": [
        *("a key of another width", "a key of two dimensions", "a key of no numbers", "a key of no dimension"),
    ],
    "has a value of shape (4,), not (3,)": ["a value of another width"],
    "do not fill a float32 tensor": [
        *("fewer bytes than the shape says", "a key of more bytes than the shape says"),
        "a value whose shape is larger than any memory",
    ],
    "array is too big": ["a value whose shape is larger than any memory and empty"],
    "'float64'": ["numbers of another type"],
    "a number that is not finite": ["a key that is not a number", "an infinite value"],
    ">= 0.0 - at `$.entries[0].radius`": [
        *("a negative radius", "a radius that is not a number", "a radius of a known entry that is not a number"),
    ],
    "e+38 - at `$.entries[0].radius`": ["an infinite radius", "a radius beyond float32"],
    "has the radius -0.0": ["a radius of minus zero"],
    "a label of 65537 numbers": ["a label without end"],
    "not 1 to 256": ["an id without end", "an id of nothing", "an id without end removed"],
    "cannot be removed: it is not there": ["an unknown entry removed"],
    "lacks its key, value, radius or label": [
        f"a new entry without a {name}" for name in ("key", "value", "radius", "label")
    ],
    "names an entry twice": ["one entry removed twice", "an entry removed and then changed"],
}
"""The reason for which each is rejected."""


@pytest.mark.parametrize(
    ("reason", "fault"), [(reason, fault) for reason, faults in REASONS.items() for fault in faults]
)
def test_a_faulty_record_raises_and_leaves_the_codebook_as_it_was(reason: str, fault: str) -> None:
    codebook = filled(KEYS)
    before = state(codebook)
    with pytest.raises(HistoryError, match=re.escape(reason)) as caught:
        codebook.apply(FAULTS[fault](codebook))
    assert len(str(caught.value)) < 400, "the reason is short, whatever the record holds"
    assert state(codebook) == before
    assert codebook.apply(sealed(codebook, NEW)) is not None


def test_every_fault_has_a_reason() -> None:
    assert sorted(FAULTS) == sorted(fault for faults in REASONS.values() for fault in faults)


@pytest.mark.parametrize("bad", [altered(NEW, entry_id="two", key=raw([1.0])), altered(NEW, radius=np.nan)])
def test_a_fault_in_a_later_change_undoes_the_earlier_ones_of_its_record(bad: EntryChange) -> None:
    codebook = filled(KEYS)
    before = state(codebook)
    with pytest.raises(HistoryError):
        codebook.apply(
            sealed(codebook, GOOD, EntryChange(entry_id="e1", removed=True), altered(NEW, entry_id="x"), bad)
        )
    assert state(codebook) == before


def test_the_first_entries_of_a_codebook_agree_in_width_too() -> None:
    codebook = new_codebook()
    before = state(codebook)
    with pytest.raises(HistoryError):
        codebook.apply(sealed(codebook, added("a", [1, 2], 1.0), added("b", [1, 2, 3], 1.0, value=[1, 2])))
    assert state(codebook) == before


def test_a_record_of_a_lower_term_is_dropped_without_a_fault() -> None:
    codebook = filled(KEYS)
    late = sealed(codebook, NEW)
    codebook.apply(sealed(codebook, op="lead"))
    before = state(codebook)
    assert codebook.apply(late) is None
    assert codebook.apply(sealed(codebook, NEW, term=codebook.term - 1, seq=99)) is None
    assert state(codebook) == before


def test_a_lead_takes_the_term_and_changes_no_entry() -> None:
    codebook = filled(KEYS)
    entries = codebook.state_digest()
    applied = codebook.apply(sealed(codebook, op="lead"))
    assert applied is not None
    assert (codebook.term, codebook.seq, applied.slots) == (2, 3, ())
    assert codebook.state_digest() == entries


def test_folding_the_same_records_twice_gives_the_same_bits() -> None:
    generator = np.random.default_rng(0)
    codebook, records = new_codebook(), []
    for step in range(200):
        if len(codebook) > 5 and generator.random() < 0.4:
            change = EntryChange(entry_id=str(generator.choice(codebook.entry_ids)), removed=True)
        else:
            change = added(f"e{step}", generator.standard_normal(5), float(generator.random()), (step, 2))
        records.append(sealed(codebook, change))
        codebook.apply(records[-1])
    again = new_codebook()
    for record in records:
        again.apply(record)
    assert state(again) == state(codebook)


def test_a_delta_that_removes_several_and_adds_does_all_of_it() -> None:
    codebook = filled(KEYS)
    gone = [EntryChange(entry_id=name, removed=True) for name in ("e3", "e0")]
    applied = codebook.apply(sealed(codebook, *gone, NEW, EntryChange(entry_id="e1", radius=5.0), op="undo"))
    assert applied is not None
    assert set(codebook.entry_ids) == {"e1", "e2", "new"}
    assert codebook.entry(codebook.slot("e1")).radius == 5.0
    assert codebook.entry(codebook.slot("e2")).key_D.tolist() == KEYS[2].tolist()
    assert codebook.entry(codebook.slot("new")).key_D.tolist() == [1, 2, 3]
    assert all(slot < len(codebook) for slot in applied.slots)
    assert "e0" not in codebook


def test_the_state_digest_does_not_depend_on_slots() -> None:
    forth, back = new_codebook(), new_codebook()
    entries = [added(f"e{row}", key_D, 1.0, (row,)) for row, key_D in enumerate(KEYS)]
    forth.apply(sealed(forth, *entries))
    back.apply(sealed(back, *reversed(entries)))
    assert forth.entry_ids != back.entry_ids
    assert forth.state_digest() == back.state_digest()
    assert forth.digest != back.digest


OTHERS = {"entry_id": "other", "key": raw([1, 2, 4]), "value": raw([1, 2, 4]), "radius": 2.0, "label": (0, 0)}


@pytest.mark.parametrize(("field", "other"), OTHERS.items(), ids=list(OTHERS))
def test_the_state_digest_feels_every_field(field: str, other: Any) -> None:
    one, two = new_codebook(), new_codebook()
    one.apply(sealed(one, NEW))
    two.apply(sealed(two, altered(NEW, **{field: other})))
    assert one.state_digest() != two.state_digest()


def test_the_state_digest_knows_where_a_name_ends_and_a_label_begins() -> None:
    digests = set()
    for changes in ([added("a", [1], 1, (1, 2))], [added("a", [1], 1, (1,)), added("b", [1], 1, (2,))]):
        codebook = new_codebook()
        codebook.apply(sealed(codebook, *changes))
        digests.add(codebook.state_digest())
    assert len(digests) == 2


def test_an_entry_copied_out_stays_as_it_was() -> None:
    codebook = filled(KEYS)
    entry = codebook.entry(codebook.slot("e1"))
    codebook.apply(sealed(codebook, EntryChange(entry_id="e1", key=raw([9, 9, 9]), radius=3.0), op="split"))
    assert entry.key_D.tolist() == KEYS[1].tolist()
    assert dataclasses.asdict(entry)["radius"] == 1.0


def test_an_empty_codebook_begins_the_chain_at_genesis() -> None:
    codebook = Codebook(CODEBOOK, MODEL, LAYER)
    assert (codebook.seq, codebook.term, codebook.digest, len(codebook)) == (0, 0, GENESIS_DIGEST, 0)
    record = sealed(codebook, op="lead")
    codebook.apply(record)
    assert codebook.digest == decode_delta(record).digest


class Folding(RuleBasedStateMachine):
    """Any sequence of records against a plain dict of entries."""

    names = st.sampled_from([f"e{number}" for number in range(12)])
    numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3)
    radii = st.floats(0, 1e3, width=32)
    labels = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple)

    @initialize()
    def start(self) -> None:
        self.codebook = new_codebook()
        self.oracle: dict[str, dict[str, Any]] = {}

    def _apply(self, *changes: EntryChange) -> None:
        seq = self.codebook.seq
        applied = self.codebook.apply(sealed(self.codebook, *changes))
        assert applied is not None
        assert isinstance(applied.delta, Delta)
        assert self.codebook.seq == seq + 1

    @rule(name=names, key=numbers, value=numbers, radius=radii, label=labels)
    def put(self, name: str, key: list[float], value: list[float], radius: float, label: tuple[int, ...]) -> None:
        self._apply(added(name, key, radius, label, value))
        self.oracle[name] = {"key": key, "value": value, "radius": radius, "label": label}

    @precondition(lambda self: self.oracle)
    @rule(data=st.data(), radius=radii)
    def change_radius(self, data: st.DataObject, radius: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.oracle)))
        self._apply(EntryChange(entry_id=name, radius=radius))
        self.oracle[name]["radius"] = radius

    @precondition(lambda self: self.oracle)
    @rule(data=st.data(), key=numbers)
    def remove_some_and_add_one(self, data: st.DataObject, key: list[float]) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.oracle)), unique=True, min_size=1))
        self._apply(*[EntryChange(entry_id=name, removed=True) for name in names], added("one", key, 1.0)) if (
            "one" not in names
        ) else self._apply(*[EntryChange(entry_id=name, removed=True) for name in names])
        for name in names:
            del self.oracle[name]
        if "one" not in names:
            self.oracle["one"] = {"key": key, "value": key, "radius": 1.0, "label": (0,)}

    @rule()
    def lead(self) -> None:
        self.codebook.apply(sealed(self.codebook, op="lead"))

    @invariant()
    def holds_what_the_dict_holds(self) -> None:
        assert set(self.codebook.entry_ids) == set(self.oracle)
        for slot, name in enumerate(self.codebook.entry_ids):
            entry, expected = self.codebook.entry(slot), self.oracle[name]
            assert self.codebook.slot(name) == slot
            assert entry.key_D.tolist() == expected["key"]
            assert entry.value_V.tolist() == expected["value"]
            assert (entry.radius, entry.label) == (expected["radius"], expected["label"])


Folding.TestCase.settings = settings(examples(0.5), stateful_step_count=20)
TestFolding = Folding.TestCase


def test_the_facts_are_of_now_whatever_was_told_before() -> None:
    codebook = filled(KEYS)
    changes: list[Callable[[], object]] = [
        lambda: codebook.apply(sealed(codebook, NEW)),
        lambda: codebook.replace_with(filled(KEYS + 1)),
    ]
    for change in changes:
        described = codebook.describe()
        assert described == codebook.describe()
        assert described["state_digest"] == codebook.state_digest()
        change()
        assert codebook.describe()["state_digest"] == codebook.state_digest() != described["state_digest"]


def test_a_copy_is_equal_and_goes_its_own_way() -> None:
    codebook = filled(KEYS)
    copied = codebook.copy()
    assert state(copied) == state(codebook)
    before = state(copied)
    codebook.apply(sealed(codebook, EntryChange(entry_id="e0", removed=True), NEW, op="undo"))
    codebook.apply(sealed(codebook, altered(GOOD, entry_id="e1"), op="split"))
    assert state(copied) == before
    assert copied.apply(sealed(copied, NEW)) is not None


def test_facts_come_without_a_state_that_changes_too_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    codebook = filled(KEYS)
    digest = codebook.state_digest

    def slowly() -> str:
        codebook.apply(sealed(codebook, altered(GOOD, entry_id="e1"), op="split"))
        return digest()

    monkeypatch.setattr(codebook, "state_digest", slowly)
    described = codebook.describe()
    assert (described["state_digest"], described["seq"], described["digest"]) == (
        None,
        codebook.seq,
        codebook.digest.hex(),
    )
    monkeypatch.undo()
    assert codebook.describe()["state_digest"] == codebook.state_digest()
