"""The editor's memory is a fold over deltas, and names exactly the edits that a decision would undo."""

import numpy as np
import pytest

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.edit_memory import EditMemory
from gracestream.pipeline.errors import HistoryError
from gracestream.schemas.deltas import Cause, EntryChange, Tensor
from tests.support.chosen_queries import point
from tests.support.tiny_models import added, new_codebook, sealed

NOISE = 2e-4


class Log:
    """A codebook and a memory that fold the same records."""

    def __init__(self) -> None:
        self.codebook, self.memory = new_codebook(), EditMemory()
        self.records: list[bytes] = []

    def write(self, *entries: EntryChange, cause: Cause | None = None) -> None:
        self.records.append(sealed(self.codebook, *entries, cause=cause))
        fold(self.records[-1], self.codebook, self.memory)

    def add(self, name: str, *key: float, radius: float = 1.0, label: int = 0) -> None:
        self.write(added(name, key, radius, (label,)), cause=Cause(feedback_id=name, offset=7, entry_id=name))

    def expand(self, name: str, entry: str, *query: float, supersedes: tuple[str, ...] = ()) -> None:
        cause = Cause(
            feedback_id=name, offset=8, entry_id=entry, query=Tensor.from_array(point(*query)), supersedes=supersedes
        )
        self.write(EntryChange(entry_id=entry, radius=2.0), cause=cause)

    def displaced(self, *key: float, **fields: object) -> list[str]:
        usual: dict[str, object] = {"keys": {"new": point(*key)} if key else {}, "shrunk": {}, "relabelled": ()}
        return self.memory.edits_needing_entry(**{"tolerance": NOISE, "ignore": (), **usual, **fields})  # type: ignore[arg-type]


def fold(record: bytes, codebook: Codebook, memory: EditMemory) -> None:
    applied = codebook.apply(record)
    assert applied is not None
    memory.apply_delta(applied.delta, codebook)


@pytest.fixture
def log() -> Log:
    """Edit `a` with a key of its own at 0, edit `b` at 1 that `a`'s entry serves."""
    made = Log()
    made.add("a", 0, 0)
    made.expand("b", "a", 1, 0)
    return made


def test_an_edit_is_remembered_with_its_query_entry_distance_and_offset(log: Log) -> None:
    assert log.memory.feedback_ids == ["a", "b"]
    assert (log.memory.serving_entry_id("a"), log.memory.serving_entry_id("b")) == ("a", "a")
    assert log.memory.query("b").tolist() == [1, 0]
    assert log.memory.distances_E.tolist() == [0, 1]
    assert log.memory.offsets == {"a": 7, "b": 8}


def test_a_lead_and_a_delta_without_feedback_are_no_edits(log: Log) -> None:
    log.write(EntryChange(entry_id="a", radius=0.5))
    fold(sealed(log.codebook, op="lead"), log.codebook, log.memory)
    assert log.memory.feedback_ids == ["a", "b"]


def test_a_superseded_edit_is_dropped_but_its_id_stays_used(log: Log) -> None:
    log.expand("c", "a", 0, 0, supersedes=("a",))
    assert "a" not in log.memory
    assert sorted(log.memory.feedback_ids) == ["b", "c"]
    assert log.memory.query("b").tolist() == [1, 0]
    assert log.memory.query("c").tolist() == [0, 0]
    assert log.memory.offsets["a"] == 7
    with pytest.raises(KeyError):
        log.memory.query("a")


def test_an_entry_of_its_own_serves_the_edit_of_its_name_from_then_on(log: Log) -> None:
    log.write(added("b", [1, 0], 0.5))
    assert log.memory.serving_entry_id("b") == "b"
    assert log.memory.distances_E.tolist() == [0, 0]


def test_edits_of_the_same_input_lie_within_noise(log: Log) -> None:
    assert log.memory.edits_of_input(point(1, NOISE / 2), NOISE) == ["b"]
    assert log.memory.edits_of_input(point(1, 2 * NOISE), NOISE) == []


def test_folding_the_log_anew_gives_the_same_memory(log: Log) -> None:
    for number in range(100):
        log.add(f"e{number}", number, 5)
        supersedes = (f"e{number - 1}",) if number % 3 == 1 else ()
        log.expand(f"x{number}", f"e{number}", number + 0.5, 5, supersedes=supersedes)
    codebook, memory = new_codebook(), EditMemory()
    for record in log.records:
        fold(record, codebook, memory)
    assert memory.feedback_ids == log.memory.feedback_ids
    assert memory.entry_ids == log.memory.entry_ids
    assert memory.offsets == log.memory.offsets
    assert memory.queries_ED.tobytes() == log.memory.queries_ED.tobytes()
    assert memory.distances_E.tobytes() == log.memory.distances_E.tobytes()


def test_an_edit_is_displaced_where_a_new_key_is_nearer_to_its_query(log: Log) -> None:
    assert log.displaced(1.5, 0) == ["b"]
    assert log.displaced(2.5, 0) == []


def test_an_edit_is_displaced_where_two_keys_are_as_near_as_noise_can_tell(log: Log) -> None:
    assert log.displaced(2 + NOISE, 0) == ["b"]


def test_an_edit_is_displaced_where_its_entrys_radius_no_longer_contains_it(log: Log) -> None:
    assert log.displaced(shrunk={"a": 1.0}) == ["b"]
    assert log.displaced(shrunk={"a": 1.1}) == []
    assert log.displaced(shrunk={"other": 0.0}) == []


def test_an_edit_is_displaced_where_its_entry_gets_another_value(log: Log) -> None:
    assert log.displaced(relabelled={"a"}) == ["b"]


def test_the_edits_of_the_same_input_are_left_to_the_decision(log: Log) -> None:
    assert log.displaced(relabelled={"a"}, ignore={"b", "unknown"}) == []


def test_an_edit_with_a_key_of_its_own_is_never_displaced(log: Log) -> None:
    assert log.displaced(3 * NOISE, 0, shrunk={"a": 0.0}, relabelled={"a"}) == ["b"]


def test_an_edit_at_its_serving_key_gets_no_second_key_in_the_same_place(log: Log) -> None:
    """Two keys in one place would leave it to their names which of them answers."""
    log.expand("c", "a", 0, 0, supersedes=("a",))
    assert log.displaced(1.5 * NOISE, 0) == ["b"]


def test_a_displaced_edits_own_key_can_displace_the_next(log: Log) -> None:
    for number, place in enumerate((2, 3, 4)):
        log.expand(f"c{number}", "a", place, 0)
    assert set(log.displaced(4.9, 0)) == {"b", "c0", "c1", "c2"}
    assert log.displaced(4.9, 0) == log.displaced(4.9, 0)
    assert log.displaced(9.1, 0) == []


def test_an_empty_memory_has_nothing_to_lose() -> None:
    memory = EditMemory()
    assert memory.edits_of_input(point(0, 0), NOISE) == []
    assert memory.edits_needing_entry({"new": point(0, 0)}, {}, (), NOISE, ()) == []


def test_the_memory_holds_more_edits_than_its_first_room() -> None:
    log = Log()
    for number in range(200):
        log.add(f"e{number}", number, -number)
    np.testing.assert_array_equal(log.memory.queries_ED[:, 0], np.arange(200))
    assert log.memory.distances_E.tolist() == [0.0] * 200


@pytest.mark.parametrize(
    "cause",
    [
        Cause(feedback_id="c", offset=9, entry_id="nobody"),
        Cause(feedback_id="c", offset=9, entry_id="a", supersedes=("nobody",)),
        Cause(feedback_id="c", offset=9, entry_id="a", query=Tensor.from_array(point(1, 2, 3))),
        Cause(feedback_id="c", offset=9, query=Tensor(dtype="float32", shape=(2,), data=b"?")),
    ],
)
def test_a_delta_that_does_not_fit_the_edits_before_it_is_a_fault(log: Log, cause: Cause) -> None:
    with pytest.raises(HistoryError, match="delta 4 does not fit the edits before it"):
        log.write(cause=cause)
