"""The checker of the fault tests finds each kind of fault that is planted, and none where there is none."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.stores.redis_head import Head
from gracestream.schemas.deltas import Cause
from gracestream.schemas.messages import AppliedEdit, Outcome, Prediction, encode
from tests.support.doubles.checker import Follower, Left, faults
from tests.support.doubles.kafka import Stored
from tests.support.tiny_models import LAYER, MODEL, added, sealed


def record(topic: str, offset: int, value: bytes | None, **headers: int) -> Stored:
    pairs = [(name, str(number).encode()) for name, number in headers.items()]
    return Stored(topic, offset, None, value, pairs, "committed")


def outcome(offset: int, feedback_id: str, at: int, **fields: Any) -> Stored:
    value = encode(Outcome(v=1, feedback_id=feedback_id, status="added" if fields else "unchanged", **fields))
    return record("edits", at, value, feedback_offset=offset)


def answer(seq: int, term: int = 1, **edit: Any) -> Stored:
    """A prediction; `edit` describes the entry that answered."""
    applied = AppliedEdit(**edit) if edit else UNSET
    made = Prediction(
        v=1, request_id="q", codebook_seq=seq, term=term, edit=applied, model=MODEL, replica="r", latency_ms=1.0
    )
    return record("predictions", 0, encode(made))


@pytest.fixture
def left() -> Left:
    """Three feedback records: one was added, one is unreadable, one changed nothing. Answers from every state."""
    book = Codebook("default", MODEL, LAYER)
    lead = sealed(book, op="lead")
    book.apply(lead)
    add = sealed(book, added("f0", [1.0], 0.5), cause=Cause(feedback_id="f0", offset=0, entry_id="f0"))
    book.apply(add)
    feedback = [encode(make_correction("f0", "a", "b")), b"what is this", encode(make_correction("f2", "c", "d"))]
    return Left(
        feedback=[record("feedback", offset, value) for offset, value in enumerate(feedback)],
        edits=[outcome(0, "f0", 0, seq=2), outcome(2, "f2", 2)],
        deltas=[record("deltas", 0, lead), record("deltas", 2, add)],
        dead_letters=[record("feedback.dlq", 0, b"what is this", source_offset=1)],
        position=3,
        head=Head(1, 2, book.digest.hex(), {}),
        radii={"f0": 0.5},
        followers=[Follower("a replica", 2, book.digest.hex(), book.state_digest())],
        read={"a replica": [(0, lead), (2, add)]},
        predictions=[answer(0, term=0), answer(1), answer(2), answer(2, entry_id="f0", distance=0.25, radius=0.5)],
    )


def test_what_is_well_has_no_fault(left: Left) -> None:
    assert faults(left) == []


def test_nor_has_a_deployment_in_which_nothing_happened() -> None:
    assert faults(Left([], [], [], [], None, None, {})) == []


PLANTED: dict[str, tuple[str, Callable[[Left], dict[str, Any]]]] = {
    "an outcome is missing": ("lost", lambda left: {"edits": left.edits[:1]}),
    "what Kafka took is not in the topic": ("lost", lambda _: {"taken": ["f0", "f2", "f9"]}),
    "an unreadable record was not dead-lettered": ("lost", lambda _: {"dead_letters": []}),
    "an outcome stands twice": ("doubled", lambda left: {"edits": [*left.edits, outcome(2, "f2", 4)]}),
    "a record was dead-lettered twice": (
        "doubled",
        lambda left: {"dead_letters": [*left.dead_letters, *left.dead_letters]},
    ),
    "a record made two deltas": ("doubled", lambda left: {"deltas": [*left.deltas, left.deltas[1]]}),
    "a reader read a delta twice": ("doubled", lambda left: {"read": {"x": [*left.read["a replica"]] * 2}}),
    "a reader read what was aborted": ("aborted", lambda _: {"read": {"x": [(1, b"half")]}}),
    "the group is behind": ("offset", lambda _: {"position": 2}),
    "the group has no offset": ("offset", lambda _: {"position": None}),
    "an outcome names another's offset": (
        "offset",
        lambda left: {"edits": [left.edits[0], outcome(1, "f2", 2), outcome(2, "f2", 3)]},
    ),
    "outcomes are out of order": ("offset", lambda left: {"edits": left.edits[::-1]}),
    "an outcome names no delta of its own": (
        "offset",
        lambda left: {"edits": [left.edits[0], outcome(2, "f2", 2, seq=2)]},
    ),
    "a delta has no outcome that names it": ("offset", lambda left: {"edits": [outcome(0, "f0", 0), left.edits[1]]}),
    "a letter is another record's": (
        "offset",
        lambda _: {"dead_letters": [record("feedback.dlq", 0, b"another", source_offset=1)]},
    ),
    "a delta is missing": ("chain", lambda left: {"deltas": left.deltas[1:]}),
    "deltas are out of order": ("chain", lambda left: {"deltas": left.deltas[::-1]}),
    "a reader holds another state": (
        "digest",
        lambda left: {"followers": [replace(left.followers[0], state_digest="0" * 64)]},
    ),
    "a reader is behind": ("digest", lambda left: {"followers": [replace(left.followers[0], seq=1)]}),
    "Redis is behind": ("digest", lambda left: {"head": replace(left.head, seq=1)}),  # type: ignore[type-var]
    "Redis knows nothing": ("digest", lambda _: {"head": None}),
    "Redis has another radius": ("digest", lambda _: {"radii": {"f0": 0.25}}),
    "Redis has an entry that is gone": ("digest", lambda _: {"radii": {"f0": 0.5, "gone": 1.0}}),
    "an answer names a term that was not yet": ("served", lambda _: {"predictions": [answer(2, term=2)]}),
    "an answer names a delta that is not there": ("served", lambda _: {"predictions": [answer(3)]}),
    "an answer names a term before the first": ("served", lambda _: {"predictions": [answer(0)]}),
    "an answer names an entry that is not there yet": (
        "served",
        lambda _: {"predictions": [answer(1, entry_id="f0", distance=0.25, radius=0.5)]},
    ),
    "an answer names an entry that never was": (
        "served",
        lambda _: {"predictions": [answer(2, entry_id="f9", distance=0.25, radius=0.5)]},
    ),
    "an answer names another radius": (
        "served",
        lambda _: {"predictions": [answer(2, entry_id="f0", distance=0.25, radius=0.75)]},
    ),
    "an answer's distance equals its radius": (
        "served",
        lambda _: {"predictions": [answer(2, entry_id="f0", distance=0.5, radius=0.5)]},
    ),
    "an answer's distance is none": (
        "served",
        lambda _: {"predictions": [answer(2, entry_id="f0", distance=-0.25, radius=0.5)]},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_it_finds(left: Left, name: str) -> None:
    kind, plant = PLANTED[name]
    assert kind in {fault.kind for fault in faults(replace(left, **plant(left)))}


def test_it_finds_a_correction_that_came_twice_and_was_made_twice(left: Left) -> None:
    book = Codebook("default", MODEL, LAYER)
    for delta in left.deltas:
        book.apply(delta.value)
    add = sealed(book, added("f0-again", [2.0], 0.5), cause=Cause(feedback_id="f0", offset=3, entry_id="f0-again"))
    twice = replace(
        left,
        feedback=[*left.feedback, record("feedback", 3, left.feedback[0].value)],
        edits=[*left.edits, outcome(3, "f0", 4, seq=3)],
        deltas=[*left.deltas, record("deltas", 4, add)],
        position=4,
    )
    assert [fault.text for fault in faults(twice) if fault.kind == "doubled"] == [
        "'f0' came more than once, and has made a delta at each of {0, 3}"
    ]


def test_it_finds_a_delta_of_a_fenced_editor(left: Left) -> None:
    book = Codebook("default", MODEL, LAYER)
    for delta in left.deltas:
        book.apply(delta.value)
    stale = sealed(book, added("late", [2.0], 0.5))
    lead = sealed(book, op="lead")
    written = [*left.deltas, record("deltas", 4, lead), record("deltas", 6, stale)]
    assert "chain" in {fault.kind for fault in faults(replace(left, deltas=written))}
