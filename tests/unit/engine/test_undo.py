"""Undo: afterwards the codebook is what it would be, had that feedback never come."""

import cProfile
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from pipeline import editing, rewriting
from pipeline.codebook import DeltaFault
from pipeline.edited import correction
from pipeline.editing import Again, EditEngine
from pipeline.environment import environment
from pipeline.plan import Plan
from pipeline.sight import together
from pipeline.training import Recipe
from pipeline.undo import undo
from schemas.deltas import decode_delta
from schemas.messages import Feedback, Outcome
from tests.unit.engine.points import CLASSES, PointModel, answer, at, point
from tests.unit.engine.tiny import CODEBOOK, retuned

MANY = settings(deadline=None, max_examples=150)


@dataclass
class Story:
    """An engine, its log, and the feedback that it was given."""

    engine: EditEngine
    deltas: list[bytes] = field(default_factory=list)
    feedback: list[Feedback] = field(default_factory=list)
    told: list[Plan | int] = field(default_factory=list)
    """What came: the plan of each new term, the offset of each feedback."""
    corrections_read: int = 0

    def each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        all(map(on_record, self.deltas))

    def corrections(self, since: int) -> Mapping[int, Feedback]:
        self.corrections_read += 1
        return {at: one for at, one in enumerate(self.feedback) if at >= since and not one.undoes}

    def take(self, feedback: Feedback) -> Outcome:
        offset = len(self.feedback)
        self.feedback.append(feedback)
        self.told.append(offset)
        edited = undo(self.engine, feedback, offset, self) if feedback.undoes else self.engine.edit(feedback, offset)
        assert edited.outcome is not None
        if edited.record is not None:
            self.apply(edited.record)
        return edited.outcome

    def apply(self, record: bytes) -> None:
        self.deltas.append(record)
        self.engine.apply(record)

    def lead(self, plan: Plan) -> None:
        """A new term, under another plan."""
        self.engine.plan = plan
        self.told.append(plan)
        self.apply(self.engine.lead(environment(self.engine.model, plan)))

    def correct(self, name: str, place: tuple[float, ...], label: int, author: str | None = None) -> Outcome:
        one = correction(name, at(*place), str(label))
        return self.take(one if author is None else Feedback(**(fields_of(one) | {"author": author})))

    def undo(self, name: str, taken_back: str) -> Outcome:
        return self.take(Feedback(v=1, feedback_id=name, undo=taken_back))

    def undo_author(self, name: str, author: str) -> Outcome:
        return self.take(Feedback(v=1, feedback_id=name, undo_author=author))

    def served(self) -> dict[str, tuple[str, bytes]]:
        """Which entry serves each edit in force, and its query."""
        memory = self.engine.memory
        return {name: (memory.serving_entry(name), memory.query(name).tobytes()) for name in memory.feedback_ids}


def fields_of(message: Feedback) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def plan_of(**fields: Any) -> Plan:
    usual: dict[str, Any] = {"radius_unit": "absolute", "traffic": 8}
    return Plan(**(usual | fields))


def story(**plan: Any) -> Story:
    made = Story(EditEngine(PointModel(2), CODEBOOK, plan_of(**plan)))
    made.lead(made.engine.plan)
    return made


def without(told: Story, gone: set[str]) -> Story:
    """The same history but for this feedback, decided and trained anew; each decision sees the traffic that it saw."""
    made = Story(EditEngine(PointModel(2), CODEBOOK, told.engine.plan))
    causes = [delta.cause for delta in map(decode_delta, told.deltas) if delta.cause is not UNSET]
    seen = {cause.feedback_id: cause.seen for cause in causes if cause.seen is not UNSET}
    for name, later in told.engine.memory.decided.items():
        seen[name] = together(seen[name], later)
    for one in told.told:
        if isinstance(one, Plan):
            made.lead(one)
            continue
        feedback = told.feedback[one]
        if not feedback.undoes and feedback.feedback_id not in gone:
            edited = made.engine.edit(feedback, one, Again(seen[feedback.feedback_id]))
            assert edited.record is not None
            made.apply(edited.record)
    return made


def taken_back(feedback: Sequence[Feedback]) -> tuple[set[str], set[str]]:
    """What counts as never sent, and which undos had an effect; by what was sent alone, without the engine.

    Feedback counts unless a later undo that counts takes it back. An undo is idle, as if it had not been sent, where
    nothing that it takes back counts but undos of nothing else.
    """
    sent: list[Feedback] = []
    takes: list[set[str]] = []

    def counts(at: int) -> bool:
        later = range(at + 1, len(sent))
        return not any(sent[at].feedback_id in takes[after] and counts(after) for after in later)

    for one in feedback:
        names = {
            other.feedback_id
            for other in sent
            if one.undo == other.feedback_id or (one.undo_author is not UNSET and one.undo_author == other.author)
        }
        touched = [at for at, other in enumerate(sent) if other.feedback_id in names and counts(at)]
        if not one.undoes or any(not takes[at] or takes[at] - names for at in touched):
            sent.append(one)
            takes.append(names)
    gone = {one.feedback_id for at, one in enumerate(sent) if not counts(at)}
    return gone, {one.feedback_id for one in sent if one.undoes}


def assert_same(ours: Story, theirs: Story) -> None:
    assert ours.engine.codebook.state_digest() == theirs.engine.codebook.state_digest()
    assert ours.served() == theirs.served()


def see(told: Story, place: tuple[float, ...], offset: int) -> None:
    """Traffic that nobody flagged."""
    rank = told.engine.traffic.wants(0, offset, 0.0)
    assert rank is not None
    told.engine.observe(rank, point(*place))


@dataclass(frozen=True)
class Undo:
    """A step that takes back the feedback of an earlier step, by its number, or all of an author."""

    of: int | str
    author: str | None

    def feedback(self, number: int) -> Feedback:
        whose: dict[str, Any] = {} if self.author is None else {"author": self.author}
        what = {"undo_author": self.of} if isinstance(self.of, str) else {"undo": f"f{self.of % (number + 1)}"}
        return Feedback(v=1, feedback_id=f"f{number}", **what, **whose)


places = st.tuples(st.integers(0, 3), st.integers(0, 2))
jitters = st.sampled_from([0.0, 1e-4, 3e-4, 0.01, 0.3])
points = st.builds(lambda place, x, y: (place[0] + x, place[1] - y), places, jitters, jitters)
corrections = st.tuples(points, st.integers(0, CLASSES - 1), st.sampled_from(["ann", "bob"]))
undos = st.one_of(st.integers(0, 30), st.sampled_from(["ann", "bob"]))
streams = st.lists(st.one_of(corrections, corrections, corrections, undos), min_size=3, max_size=16)
traffic = st.tuples(st.sampled_from([0.55, 1.45]), st.sampled_from([0.55, 1.6]))
plans = st.builds(
    plan_of,
    radius=st.sampled_from([1e-3, 0.3, 1.0, 3.0]),
    policy=st.sampled_from(["nearest", "paper"]),
    expand=st.sampled_from(["cover", "paper"]),
    guard=st.booleans(),
    init=st.sampled_from(["layer", "label", "random"]),
    max_radius=st.sampled_from([math.inf, 0.2, 0.9]),
)
own_undos = st.builds(Undo, undos, st.sampled_from([None, "ann", "bob"]))
step = st.one_of(corrections, corrections, corrections, corrections, own_undos, own_undos, traffic, plans)


@MANY
@given(plans, st.lists(step, min_size=3, max_size=20))
def test_after_an_undo_the_codebook_equals_a_replay_without_that_feedback(first: Plan, stream: list[Any]) -> None:
    """Also after undos of undos, undos by author, under changing plans and traffic, and with edits that come after."""
    told = Story(EditEngine(PointModel(2), CODEBOOK, first))
    told.lead(first)
    undone = set()
    for number, step in enumerate(stream):
        if isinstance(step, Plan):
            told.lead(step)
        elif isinstance(step, Undo):
            outcome = told.take(step.feedback(number))
            undone |= {outcome.feedback_id} if outcome.status == "undone" else set()
        elif len(step) == 2:
            see(told, step, number)
        else:
            told.correct(f"f{number}", *step)
    gone, effective = taken_back(told.feedback)
    assert undone == effective
    assert_same(told, without(told, gone))


@settings(deadline=None, max_examples=25)
@given(streams, st.sampled_from([0.3, 1.0]), st.sampled_from(["nearest", "paper"]))
def test_folding_the_log_gives_the_codebook_and_the_memory_after_undos(
    stream: list[Any], radius: float, policy: str
) -> None:
    told = story(radius=radius, policy=policy)
    for number, step in enumerate(stream):
        if isinstance(step, tuple):
            told.correct(f"f{number}", step[0], step[1], step[2])
        else:
            told.undo(f"f{number}", f"f{number // 2}")
    folded = EditEngine(told.engine.model, told.engine.codebook.name, told.engine.plan)
    for record in told.deltas:
        folded.apply(record)
    assert_same(Story(folded), told)
    assert folded.memory.undoes == told.engine.memory.undoes
    assert folded.memory.decided == told.engine.memory.decided
    assert folded.memory.authors == told.engine.memory.authors


def test_an_undone_correction_is_answered_as_before_it() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    assert answer(told.engine, 1, 1) == 2
    outcome = told.undo("u", "a")
    assert (outcome.status, outcome.seq) == ("undone", 3)
    assert answer(told.engine, 1, 1) == 0
    assert len(told.engine.codebook) == 0


def test_the_value_and_radius_that_an_edit_changed_come_back() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    before = told.engine.codebook.entry(0)
    told.correct("b", (1, 1.5), 2)
    told.correct("c", (1, 1), 3)
    told.undo("u", "c")
    told.undo("v", "b")
    after = told.engine.codebook.entry(0)
    assert (after.radius, after.label) == (before.radius, before.label)
    assert after.value_V.tobytes() == before.value_V.tobytes()


def test_a_correction_that_rested_on_the_undone_one_gets_an_entry_of_its_own() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    assert told.correct("b", (1, 1.5), 2).status == "unchanged"
    told.undo("u", "a")
    assert told.engine.codebook.entry_ids == ["b"]
    assert answer(told.engine, 1, 1.5) == 2


def test_an_undo_can_be_undone() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    state = told.engine.codebook.state_digest()
    told.undo("u", "a")
    assert told.undo("v", "u").status == "undone"
    assert told.engine.codebook.state_digest() == state
    assert told.undo("w", "v").status == "undone"
    assert len(told.engine.codebook) == 0


def test_a_value_that_started_from_the_undone_ones_is_trained_anew() -> None:
    told = story(init="label")
    told.correct("a", (0, 0), 1)
    told.correct("b", (9, 0), 1)
    told.correct("c", (19, 0), 1)
    assert [decode_delta(record).cause.seen.start for record in told.deltas[1:]] == [UNSET, "a", "b"]  # type: ignore[union-attr]
    warm = told.engine.codebook.values_NV.copy()
    told.undo("u", "a")
    assert told.engine.codebook.entry_ids == ["c", "b"]
    assert not np.array_equal(told.engine.codebook.values_NV[1], warm[1])
    assert_same(told, without(told, {"a"}))
    told.undo("v", "u")
    assert told.engine.codebook.values_NV.tobytes() == warm[[2, 1, 0]].tobytes()


def test_a_value_is_trained_anew_where_only_its_start_has_gone() -> None:
    told = story(init="label")
    told.correct("other", (15, 0), 3)
    told.correct("a", (0, 0), 1)
    told.correct("b", (20, 0), 2)
    told.correct("c", (25, 0), 1)
    seen = decode_delta(told.deltas[-1]).cause.seen  # type: ignore[union-attr]
    assert (seen.nearest, seen.start) == ("b", "a")  # type: ignore[union-attr]
    told.undo("u", "a")
    assert set(decode_delta(told.deltas[-1]).decided) == {"c"}
    assert_same(told, without(told, {"a"}))


def test_a_value_that_would_start_from_one_that_came_back_is_trained_anew() -> None:
    told = story(init="label")
    told.correct("other", (15, 0), 3)
    told.correct("a", (0, 0), 1)
    told.undo("u", "a")
    told.correct("b", (20, 0), 2)
    told.correct("c", (25, 0), 1)
    told.undo("v", "u")
    assert set(decode_delta(told.deltas[-1]).decided) == {"c"}
    assert_same(told, without(told, {"u"}))


def test_values_that_started_from_others_are_not_trained_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    told = story(init="label")
    for number in range(6):
        told.correct(f"f{number}", (9 * number, 0), 1 + number % 2)
    monkeypatch.setattr(editing, "train_value", None)
    assert told.undo("u", "f5").status == "undone"
    assert told.engine.codebook.entry_ids == ["f0", "f1", "f2", "f3", "f4"]


@pytest.mark.parametrize(
    "steps",
    [
        # The edit that `q` superseded was the undone one, and left no other trace.
        [("e", (0, 0), 1), ("x", (0.5, 0), 1), ("q", (0.5, 0), 2)],
        # The key of `y` would have taken `x` over, which so got an entry of its own.
        [("e", (0, 0), 1), ("x", (0.5, 0), 1), ("y", (0.6, 0), 2)],
        # Without `x` the entry of `e` serves `o`, and shrinks for `y` under another plan.
        [("e", (0, 0), 1), ("x", (-0.6, 0), 2), ("o", (-0.5, 0), 1), plan_of(policy="paper"), ("y", (0.9, 0), 3)],
        # Without `x` the entry of `e` serves `o`, and the key of `y` would take `o` over.
        [("z", (0.5, 0.8), 2), ("e", (0, 0), 1), ("x", (0.6, 0), 2), ("o", (0.5, 0), 1), ("y", (0.5, 0.45), 3)],
        # The bare model gives `x` right, so the radius of `a` keeps clear of it.
        [("x", (1, 0), 0), ("a", (0, 0), 1)],
        # Without `x` the bare model gives `o` right, so the radius of `a` keeps clear of that.
        [("x", (0, 9), 1), ("o", (0.5, 9), 0), ("a", (0.5, 8), 2)],
    ],
)
def test_a_decision_is_made_again_where_it_rested_on_the_undone_one_in_this_way_alone(steps: list[Any]) -> None:
    told = story()
    for step in steps:
        if isinstance(step, Plan):
            told.lead(step)
        else:
            told.correct(*step)
    told.undo("u", "x")
    assert_same(told, without(told, {"x"}))
    told.undo("v", "u")
    assert_same(told, without(told, {"u"}))


def test_a_decision_is_made_again_where_a_nearer_key_came_back() -> None:
    told = story()
    told.correct("x", (0.6, 0), 2)
    told.undo("u", "x")
    told.correct("e", (-0.9, 0), 1)
    assert told.correct("q", (0, 0), 2).status == "split"
    told.undo("v", "u")
    assert_same(told, without(told, {"u"}))
    assert sorted(told.engine.codebook.entry_ids) == ["e", "x"]


def test_of_two_keys_in_one_place_the_same_one_counts_after_an_undo() -> None:
    """Which slot they have depends on the entry that went."""
    told = story(policy="paper", guard=False, radius=1e-3)
    for name, place, label in (("a", (0, 0), 1), ("b", (1, 0), 1), ("c", (1, 0), 2)):
        told.correct(name, place, label)
    told.undo("u", "a")
    told.correct("d", (1, 0), 1)
    assert_same(told, without(told, {"a"}))


def test_an_edit_was_superseded_only_by_what_the_undone_one_made_of_its_entry() -> None:
    """Without the guard another key may lie nearer to an edit than that of the entry which serves it by the record."""
    told = story(guard=False)
    told.correct("e", (0, 0), 1)
    assert told.correct("o", (0.5, 0), 1).status == "unchanged"
    told.correct("n", (0.6, 0), 2)
    assert told.correct("x", (0, 0), 3).status == "replaced"
    told.correct("q", (0.5, 0), 1)
    assert "o" not in told.engine.memory
    told.undo("u", "x")
    assert_same(told, without(told, {"x"}))
    assert told.engine.memory.serving_entry("o") == "e"


def test_a_radius_that_was_retuned_stays_so_where_its_entry_does() -> None:
    told = story()
    told.correct("a", (0, 0), 1)
    told.correct("b", (5, 5), 1)
    told.apply(retuned(told.engine.codebook, "b", 0.25))
    told.apply(retuned(told.engine.codebook, "a", 0.5))
    told.undo("u", "a")
    assert told.engine.codebook.entry_ids == ["b"]
    assert told.engine.codebook.radii_N.tolist() == [0.25]
    told.undo("v", "u")
    radii = dict(zip(told.engine.codebook.entry_ids, told.engine.codebook.radii_N.tolist(), strict=True))
    assert radii == {"a": 0.5, "b": 0.25}


def test_what_an_author_has_taken_back_already_is_not_taken_back_again() -> None:
    """The author's own undo is in force, but it takes back nothing but what goes with it."""
    told = story()
    told.correct("a", (0, 0), 1, "ann")
    told.correct("b", (5, 5), 1, "bob")
    assert told.take(Feedback(v=1, feedback_id="u", undo_author="ann", author="ann")).status == "undone"
    deltas = len(told.deltas)
    for name, author in (("v", "ann"), ("w", None)):
        outcome = told.take(Feedback(v=1, feedback_id=name, undo_author="ann", author=author or UNSET))
        assert (outcome.status, outcome.seq) == ("unchanged", UNSET)
        assert outcome.reason == "nothing that the author 'ann' sent is in force"
    assert len(told.deltas) == deltas
    told.undo("x", "u")
    assert sorted(told.engine.codebook.entry_ids) == ["a", "b"]
    assert told.undo_author("y", "ann").status == "undone"
    assert told.engine.codebook.entry_ids == ["b"]


def test_an_undo_that_is_undone_is_not_undone_again() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    told.undo("u", "a")
    told.undo("v", "u")
    deltas = len(told.deltas)
    outcome = told.undo("w", "u")
    assert (outcome.status, outcome.reason) == ("unchanged", "it is undone already")
    assert len(told.deltas) == deltas


def test_a_rejected_correction_stays_rejected() -> None:
    """Nothing of it stands in the log, its author was told, and may send it again."""
    told = story()
    told.correct("a", (1, 1), 2)
    told.lead(plan_of(recipe=Recipe(max_steps=0)))
    assert told.correct("b", (1, 1), 3).status == "rejected"
    told.lead(plan_of())
    told.undo("u", "a")
    assert len(told.engine.codebook) == 0
    assert told.correct("b", (1, 1), 3).status == "added"


def test_all_that_an_author_did_is_undone_and_nothing_else() -> None:
    told = story()
    told.correct("a", (0, 0), 1, "ann")
    told.correct("b", (5, 5), 1, "bob")
    told.take(Feedback(v=1, feedback_id="c", undo="b", author="ann"))
    told.correct("d", (9, 9), 1, "ann")
    assert told.undo_author("u", "ann").status == "undone"
    assert told.engine.codebook.entry_ids == ["b"]
    assert told.undo_author("v", "carl").status == "rejected"
    assert told.undo_author("w", "ann").status == "unchanged"


@pytest.mark.parametrize(
    ("taken_back", "status", "reason"),
    [
        ("nobody", "rejected", "no feedback 'nobody' has had an effect, so there is nothing to undo"),
        ("u", "rejected", "no feedback 'u' has had an effect"),
        ("gone", "unchanged", "it is undone already"),
    ],
)
def test_an_undo_of_nothing_says_so(taken_back: str, status: str, reason: str) -> None:
    told = story()
    told.correct("gone", (1, 1), 2)
    told.undo("first", "gone")
    seq = told.engine.codebook.seq
    outcome = told.undo("u", taken_back)
    assert outcome.status == status
    assert reason in str(outcome.reason)
    assert told.engine.codebook.seq == seq


def test_an_id_is_used_once_also_by_an_undo() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    assert "its id was used at offset 0" in str(told.undo("a", "a").reason)
    told.undo("u", "a")
    assert "its id was used at offset 0" in str(told.correct("a", (1, 1), 2).reason)
    assert "its id was used at offset 2" in str(told.correct("u", (1, 1), 2).reason)


def test_only_decisions_near_the_undone_one_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told = story()
    generator = np.random.default_rng(0)
    for number in range(60):
        x, y = generator.uniform(0, 40, 2)
        told.correct(f"f{number}", (x, y), int(generator.integers(1, CLASSES)))
    again: list[str] = []
    edit = EditEngine.edit

    def counted(self: EditEngine, feedback: Feedback, *rest: Any) -> Any:
        again.append(feedback.feedback_id)
        return edit(self, feedback, *rest)

    monkeypatch.setattr(EditEngine, "edit", counted)
    told.undo("u", "f3")
    assert len(again) < 6
    monkeypatch.undo()
    assert_same(told, without(told, {"f3"}))


def test_an_undo_costs_in_proportion_to_the_history() -> None:
    """One of two authors whose edits take turns goes: nothing is looked through again for each of them."""
    calls = []
    for corrections in (100, 200):
        told = story(traffic=0)
        for number in range(corrections):
            told.correct(f"f{number}", (9 * number, 0), 1 + number % 3, ("ann", "bob")[number % 2])
        profile = cProfile.Profile()
        profile.runcall(told.undo_author, "u", "ann")
        calls.append(sum(entry.callcount for entry in profile.getstats()))
        assert len(told.engine.codebook) == corrections / 2
    assert calls[1] < 2.3 * calls[0]


def test_deciding_everything_again_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decisions that are kept are those that would be made again."""
    digests = set()
    for shortcut in (True, False):
        told = story(radius=1.5)
        for number in range(12):
            told.correct(f"f{number}", (number % 4, (number * number) % 5), 1 + number % 3)
        if not shortcut:
            monkeypatch.setattr(rewriting.Rewritten, "_stays", lambda *_: False)
        told.undo("u", "f2")
        digests.add(told.engine.codebook.digest)
        assert_same(told, without(told, {"f2"}))
    assert len(digests) <= 2  # what the deltas say of the decisions made again differs, the state does not


def test_a_correction_that_cannot_be_made_without_it_falls_away_and_the_outcome_says_so() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    told.lead(plan_of(recipe=Recipe(max_steps=0)))
    told.correct("b", (1, 1.2), 2)
    outcome = told.undo("u", "a")
    assert outcome.status == "undone"
    assert "it takes back a; these corrections rested on that and cannot be made without: b (no value was found" in str(
        outcome.reason
    )
    assert len(told.engine.codebook) == 0
    assert "b" not in told.engine.memory


def test_a_decision_that_is_made_again_sees_the_traffic_of_its_time() -> None:
    told = story()
    told.correct("a", (0, 0), 1)
    see(told, (5, 1.0), 0)
    told.correct("b", (5, 0), 2)
    told.correct("c", (0.1, 0), 2)
    radius = float(told.engine.codebook.radii_N[told.engine.codebook.slot("b")])
    told.engine.traffic = type(told.engine.traffic)(8, 0)
    told.undo("u", "a")
    assert float(told.engine.codebook.radii_N[told.engine.codebook.slot("b")]) == radius == pytest.approx(0.8)


def test_what_an_earlier_undo_saw_is_not_forgotten_by_a_later_one() -> None:
    told = story(radius=0.5)
    told.correct("x", (0, 0), 1)
    told.correct("a", (1.2, 0), 1)
    told.correct("b", (0.9, 0), 1)
    told.undo("u", "a")
    state = told.engine.codebook.state_digest()
    told.undo("v", "x")
    see(told, (-0.6, 0), 0)
    told.undo("w", "v")
    assert told.engine.codebook.state_digest() == state


def test_decisions_are_made_again_under_the_plan_of_their_term() -> None:
    told = story(radius=0.5)
    told.correct("a", (0, 0), 1)
    told.correct("b", (0, 0.3), 1)
    told.lead(plan_of(radius=0.05, policy="paper", guard=False))
    told.undo("u", "a")
    assert told.engine.codebook.radii_N.tolist() == [0.5]


def test_a_decision_whose_correction_is_gone_leaves_the_undo_rejected() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    told.correct("b", (1, 1.5), 2)
    told.feedback[1] = Feedback(v=1, feedback_id="other", undo="nothing")
    outcome = told.undo("u", "a")
    assert outcome.status == "rejected"
    assert outcome.reason == "delta 3 rests on feedback at offset 1: it is not there"
    assert len(told.engine.codebook) == 1


def test_a_log_that_is_not_the_engines_own_is_a_fault() -> None:
    told = story()
    told.correct("a", (1, 1), 2)
    told.deltas.pop()
    with pytest.raises(DeltaFault, match=r"the log folds to delta 1 \(.*\), but the editor holds 2"):
        told.undo("u", "a")


def test_the_delta_of_an_undo_says_what_it_takes_back_and_for_whom() -> None:
    told = story()
    told.correct("a", (1, 1), 2, "ann")
    told.correct("b", (1, 1.5), 2)
    told.take(Feedback(v=1, feedback_id="u", undo="a", author="bob"))
    delta = decode_delta(told.deltas[-1])
    assert delta.op == "undo"
    assert (delta.cause.feedback_id, delta.cause.undoes, delta.cause.author) == ("u", ("a",), "bob")  # type: ignore[union-attr]
    assert [(edit.feedback_id, edit.removed) for edit in delta.edits] == [("a", True), ("b", False)]
    assert set(delta.decided) == {"b"}
