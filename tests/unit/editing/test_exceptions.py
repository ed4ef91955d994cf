"""An exception keeps one prompt from one edit, for good, and nothing else from anything."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gracestream.pipeline.codebook.edit_memory import UNEDITED_MODEL
from gracestream.pipeline.codebook.file import load_codebook, save_codebook
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.codebook.prompt_exceptions import exception_query
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.exceptions import NoNewException, build_exception, decide_exception
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model.editable import ServedAnswer
from gracestream.schemas.deltas import EntryChange, ExceptionChange, Standing, Tensor, decode_delta
from gracestream.schemas.messages import Feedback, Outcome, Parameters
from tests.support.chosen_queries import PointModel, answer, at, point
from tests.support.editing_stories import Story, assert_same, new_story, plan_of, without
from tests.support.tiny_models import CODEBOOK, added, correct, editable, index_of, new_codebook, sealed, texts

EDITED, OTHER, THIRD = texts(3, seed=11)
FAR = 1e6
"""A radius that holds every prompt."""


def wide(**plan: Any) -> Story:
    """The unedited model answers class 0 everywhere; `a` gives class 1 within 3."""
    story = new_story(radius=3.0, traffic_sample_size=0, **plan)
    assert story.correct("a", (0, 0), 1).status == "added"
    assert answer(story.engine, 1, 0) == 1
    return story


def started(kind: str, **plan: Any) -> EditEngine:
    engine = EditEngine(
        editable(kind), CODEBOOK, EditConfig(radius=FAR, radius_unit="absolute", traffic_sample_size=0, **plan)
    )
    engine.apply(engine.lead_delta({}))
    return engine


def ask(engine: EditEngine, *inputs: str) -> list[ServedAnswer]:
    prompts = [engine.model.task.tokenize(text) for text in inputs]
    return engine.model.answer(prompts, [Parameters()] * len(prompts), engine.lookup)


def excepted(engine: EditEngine, name: str, inputs: str, edit: str, standing: Any = UNSET) -> Outcome:
    feedback = Feedback(v=1, feedback_id=name, inputs=inputs, except_from=edit)
    edited = decide_exception(engine, feedback, engine.codebook.seq, standing)
    assert edited.outcome is not None
    if edited.delta_record is not None:
        engine.apply(edited.delta_record)
    return edited.outcome


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5-encoder", "t5-decoder", "bert"])
def test_the_prompt_gets_the_unedited_answer_and_no_near_miss(kind: str) -> None:
    engine = started(kind, check_wording=False)
    before = ask(engine, EDITED, OTHER, THIRD)
    names = list(getattr(engine.model.module.config, "id2label", {}).values())
    target = "train" if kind != "bert" else next(name for name in names if name != before[0].answer.outputs.label)
    correct(engine, "a", EDITED, target)
    assert all(served.served_by is not None for served in ask(engine, EDITED, OTHER, THIRD))
    outcome = excepted(engine, "x", OTHER, "a")
    assert (outcome.status, outcome.seq) == ("excepted", engine.codebook.seq)
    edited, other, third = ask(engine, EDITED, OTHER, THIRD)
    assert (other.served_by, other.near_miss) == (None, None)
    assert other.answer.outputs == before[1].answer.outputs
    assert edited.served_by is not None
    assert third.served_by is not None
    (alone,) = ask(engine, OTHER)
    assert alone.served_by is None


def test_a_near_miss_is_none_any_more() -> None:
    engine = started("llama")
    correct(engine, "a", EDITED, "train")
    assert ask(engine, OTHER)[0].near_miss is not None
    assert excepted(engine, "x", OTHER, "a").status == "excepted"
    (other,) = ask(engine, OTHER)
    assert (other.served_by, other.near_miss) == (None, None)


def test_the_next_entry_that_agrees_answers() -> None:
    story = wide()
    story.correct("b", (1.5, 0), 2)
    assert answer(story.engine, 1.2, 0) == 2
    assert story.except_from("x", (1.2, 0), "b").status == "excepted"
    assert answer(story.engine, 1.2, 0) == 1
    assert story.except_from("y", (1.2, 0), "a").status == "excepted"
    assert answer(story.engine, 1.2, 0) == 0
    assert (answer(story.engine, 0, 0), answer(story.engine, 1.5, 0)) == (1, 2)


def test_it_is_of_every_key_of_the_edit() -> None:
    story = new_story(radius=1.0, traffic_sample_size=0)
    story.correct("a", (0, 0), 1, rephrases=[(1.5, 0)])
    assert answer(story.engine, 0.8, 0) == 1
    assert story.except_from("x", (0.8, 0), "a#1").status == "excepted"
    assert answer(story.engine, 0.8, 0) == 0
    (exception,) = story.engine.codebook.exceptions
    assert exception.entry_ids == ("a", "a#1")


def test_it_is_of_the_entry_that_serves_the_correction_it_names() -> None:
    story = wide()
    assert story.correct("b", (2.9, 0), 1).entry_id == "a"
    assert story.except_from("x", (1, 0), "b").status == "excepted"
    assert answer(story.engine, 1, 0) == 0


class TestRejections:
    def test_an_unknown_edit(self) -> None:
        outcome = wide().except_from("x", (1, 0), "nothing")
        assert outcome.status == "rejected"
        assert "no edit 'nothing' is in force" in str(outcome.reason)

    def test_inputs_that_the_edit_does_not_reach(self) -> None:
        outcome = wide().except_from("x", (7, 0), "a")
        assert outcome.status == "rejected"
        assert "lies 7 away, and has the radius 3" in str(outcome.reason)

    @pytest.mark.parametrize("place", [(0, 0), (2.9, 0)])
    def test_inputs_that_the_edit_was_made_for(self, place: tuple[float, float]) -> None:
        story = wide()
        story.correct("b", (2.9, 0), 1)
        outcome = story.except_from("x", place, "a")
        assert outcome.status == "rejected"
        assert "corrected these very inputs; undo it" in str(outcome.reason)

    def test_inputs_within_the_tolerance_of_these(self) -> None:
        rejection = build_exception(wide().engine, "x", "a", point(5e-4, 0), "")
        assert isinstance(rejection, NoNewException)
        assert rejection.status == "rejected"
        assert "not distinguished" in rejection.reason

    def test_a_used_id(self) -> None:
        story = wide()
        assert "its id was used" in str(story.except_from("a", (1, 0), "a").reason)
        story.correct("r", (9, 9), 1, rephrases=[(8, 8)])
        assert "key of feedback 'r'" in str(story.except_from("r#1", (1, 0), "a").reason)

    def test_an_author_who_may_not_propose(self) -> None:
        story = wide()
        feedback = Feedback(v=1, feedback_id="x", inputs=at(1, 0), except_from="a", author="ann")
        outcome = story.take(feedback, Standing(roles=("undo_own",), signed=True))
        assert outcome.status == "rejected"
        assert "author 'ann' may not make exceptions" in str(outcome.reason)
        assert story.take(feedback, Standing(roles=("propose",), signed=True)).status == "excepted"

    def test_inputs_that_the_model_cannot_take(self) -> None:
        engine = started("llama")
        correct(engine, "a", EDITED, "train")
        assert excepted(engine, "x", " ".join([EDITED] * 20), "a").status == "rejected"


def test_the_same_record_again_changes_nothing() -> None:
    story = wide()
    story.except_from("x", (1, 0), "a")
    outcome = story.except_from("x", (1, 0), "a")
    assert outcome.status == "unchanged"
    assert "by this feedback" in str(outcome.reason)
    assert len(story.deltas) == 3


def test_an_exception_that_two_reviewers_asked_for_outlives_an_undo_of_one() -> None:
    story = wide()
    for name in ("x", "y"):
        assert story.except_from(name, (1, 0), "a").status == "excepted"
    story.undo("u", "x")
    assert answer(story.engine, 1, 0) == 0
    assert_same(story, without(story, {"x"}))
    story.undo("v", "y")
    assert answer(story.engine, 1, 0) == 1


def test_a_near_miss_outside_the_radius_that_two_reviewers_except_outlives_an_undo_of_one() -> None:
    """The lookup skips the entry once the first exception exists, but the edit reaches the prompt as before."""
    model, near = editable("llama"), f"{EDITED} people"
    queries_BD = model.queries([model.task.tokenize(text) for text in (EDITED, near)])
    radius = float((queries_BD[0] - queries_BD[1]).norm()) / 1.3
    config = EditConfig(radius=radius, radius_unit="absolute", traffic_sample_size=0)
    story = Story(EditEngine(model, CODEBOOK, config))
    story.lead(config)
    assert story.take(Feedback(v=1, feedback_id="a", inputs=EDITED, target="train")).status == "added"
    (served,) = ask(story.engine, near)
    assert served.near_miss is not None
    assert served.near_miss.is_outside_radius
    for name in ("x", "y"):
        assert story.take(Feedback(v=1, feedback_id=name, inputs=near, except_from="a")).status == "excepted"
    story.undo("u", "x")
    assert ask(story.engine, near)[0].near_miss is None
    assert_same(story, without(story, {"x"}))
    story.undo("v", "y")
    assert ask(story.engine, near)[0].near_miss is not None


@pytest.mark.parametrize("label", [0, 1, 2])
def test_an_exception_that_a_correction_ended_stays_ended_in_a_history_without_others(label: int) -> None:
    story = new_story(radius=3.0)
    story.correct("w", (90, 0), 2, author="bob")
    story.correct("a", (0, 0), 1)
    story.except_from("x", (1, 0), "a")
    story.correct("b", (1, 0), 1)  # ends it
    assert len(story.engine.codebook.exceptions) == 0
    story.correct("z", (1.3, 0), 2, author="bob")
    story.correct("d", (1, 0), label)
    assert story.undo_author("u", "bob").status == "undone"
    assert_same(story, without(story, {"w", "z"}))


class TestLaterCorrections:
    @pytest.mark.parametrize("label", [1, 2])
    def test_one_of_the_prompt_itself_wins(self, label: int) -> None:
        """Also with the target of the entry that it was an exception from, which would serve it."""
        story = wide()
        story.except_from("x", (1, 0), "a")
        assert story.correct("b", (1, 0), label).status in ("expanded", "split")
        assert answer(story.engine, 1, 0) == label
        assert len(story.engine.codebook.exceptions) == 0
        assert "x" not in story.engine.memory
        story.undo("u", "b")
        assert answer(story.engine, 1, 0) == 0
        assert [one.feedback_id for one in story.engine.codebook.exceptions] == ["x"]
        assert story.engine.memory.serving_entry_id("x") == UNEDITED_MODEL

    def test_one_that_the_unedited_model_fulfils_leaves_it(self) -> None:
        story = wide()
        story.except_from("x", (1, 0), "a")
        assert story.correct("b", (1, 0), 0).status == "unchanged"
        assert len(story.engine.codebook.exceptions) == 1
        assert answer(story.engine, 1, 0) == 0

    def test_one_with_a_rephrase_there_wins(self) -> None:
        story = wide()
        story.except_from("x", (1, 0), "a")
        story.correct("b", (2, 0), 2, rephrases=[(1, 0)])
        assert answer(story.engine, 1, 0) == 2

    def test_others_keep_clear_of_it(self) -> None:
        """The guard gives copies of the entry, and none of these answers the prompt either."""
        story = wide()
        story.correct("b", (2.5, 0), 1)
        story.except_from("x", (2, 0), "a")
        story.correct("c", (2.6, 0), 2)
        assert "b" in story.engine.codebook
        assert (answer(story.engine, 2, 0), answer(story.engine, 2.5, 0), answer(story.engine, 2.6, 0)) == (0, 1, 2)

    def test_another_value_for_the_entry_leaves_it(self) -> None:
        story = wide()
        story.except_from("x", (1, 0), "a")
        assert story.correct("b", (0, 0), 2).status == "replaced"
        assert (answer(story.engine, 0, 0), answer(story.engine, 0.5, 0), answer(story.engine, 1, 0)) == (2, 2, 0)


class TestUndo:
    def test_of_the_exception_restores_the_answer(self) -> None:
        story = wide()
        before = story.engine.codebook.state_digest()
        story.except_from("x", (1, 0), "a")
        assert story.engine.codebook.state_digest() != before
        assert story.undo("u", "x").status == "undone"
        assert story.engine.codebook.state_digest() == before
        assert answer(story.engine, 1, 0) == 1
        assert story.undo("v", "u").status == "undone"
        assert answer(story.engine, 1, 0) == 0

    def test_of_the_edit_takes_it_along_and_its_undo_brings_it_back(self) -> None:
        story = wide()
        story.except_from("x", (1, 0), "a")
        before = story.engine.codebook.state_digest()
        outcome = story.undo("u", "a")
        assert "x (no edit 'a' is in force" in str(outcome.reason)
        assert len(story.engine.codebook.exceptions) == 0
        assert "x" not in story.engine.memory
        story.undo("v", "u")
        assert story.engine.codebook.state_digest() == before
        assert answer(story.engine, 1, 0) == 0

    def test_where_another_entry_then_serves_the_correction_it_is_of_that_one(self) -> None:
        story = wide()
        story.correct("b", (2, 0), 1)
        story.except_from("x", (1, 0), "b")
        story.undo("u", "a")
        (exception,) = story.engine.codebook.exceptions
        assert exception.entry_ids == ("b",)
        assert (answer(story.engine, 1, 0), answer(story.engine, 2, 0)) == (0, 1)


places = st.tuples(st.integers(0, 2), st.integers(0, 2))
jitters = st.sampled_from([0.0, 1e-4, 3e-4, 0.01, 0.1, 0.3])
spots = st.builds(lambda place, x, y: (place[0] + x, place[1] - y), places, jitters, jitters)
steps = st.lists(st.tuples(spots, st.integers(0, 3) | st.integers(4, 20)), min_size=3, max_size=14)
"""Up to 3: a correction to this class; else an exception of this edit, by its number."""


@given(steps, st.sampled_from([0.3, 1.0, 3.0]), st.booleans())
def test_every_edit_and_every_exception_holds_after_every_step(
    stream: list[tuple[tuple[float, float], int]], radius: float, worded: bool
) -> None:
    story = Story(EditEngine(PointModel(2, worded=worded), CODEBOOK, plan_of(radius=radius, traffic_sample_size=0)))
    story.lead(story.engine.config)
    engine, made, labels = story.engine, list[str](), dict[str, int]()
    for number, (place, what) in enumerate(stream):
        name = f"f{number}"
        if what <= 3 and story.correct(name, place, what).status != "rejected":
            labels[name] = what
            made.append(name)
        elif what > 3 and made:
            story.except_from(name, place, made[what % len(made)])
        memory, task = engine.memory, engine.model.task
        for name in filter(labels.__contains__, memory.feedback_ids):
            assert answer(engine, *memory.query(name).tolist()) == labels[name]
        for exception in engine.codebook.exceptions:
            query_D = exception_query(exception)
            wording = task.wording(task.tokenize(at(*query_D.tolist())))
            (found,) = engine.lookup.find_entries(torch.from_numpy(query_D.copy())[None], lambda _: wording)  # noqa: B023
            assert found is None or found.entry_id not in exception.entry_ids


def test_replicas_and_snapshots_hold_the_same(tmp_path: Path) -> None:
    story = wide()
    story.except_from("x", (1, 0), "a")
    codebook = story.engine.codebook
    folded = EditEngine(PointModel(2), CODEBOOK, plan_of())
    for record in story.deltas:
        folded.apply(record)
    save_codebook(codebook, tmp_path / "codebook.safetensors")
    for other in (folded.codebook, load_codebook(tmp_path / "codebook.safetensors"), codebook.copy()):
        assert other.state_digest() == codebook.state_digest()
        assert list(other.exceptions) == list(codebook.exceptions)
        assert other.describe()["exceptions"] == 1
    assert folded.memory.feedback_ids == story.engine.memory.feedback_ids == ["a", "x"]
    assert answer(folded, 1, 0) == 0


def test_a_prompt_with_other_words_is_no_exception_though_its_query_is_the_same() -> None:
    codebook = new_codebook()
    codebook.apply(sealed(codebook, added("a", [0.0, 0.0], 3.0)))
    codebook.apply(sealed(codebook, op="except", exceptions=(change(wording="the fee in 2021"),)))
    index = index_of(codebook)

    def serves(place: float, asked: str) -> bool:
        (found,) = CodebookLookup(codebook, index).find_entries(torch.tensor([[place, 0.0]]), lambda _row: asked)
        return found is not None

    assert not serves(1, "the fee in 2021")
    assert not serves(1, "The FEE in 2021")
    assert serves(1, "fees of 2021")
    assert serves(1, "the fee in 2022")
    assert not serves(1.09, "the fee in 2021")
    assert serves(1.11, "the fee in 2021")


def change(**fields: Any) -> ExceptionChange:
    usual: dict[str, Any] = {
        "feedback_id": "x",
        "entry_ids": ("a",),
        "query": Tensor.from_array(point(1, 0)),
        "radius": 0.1,
    }
    return ExceptionChange(**(usual | fields))


@pytest.mark.parametrize(
    ("exceptions", "reason"),
    [
        ([change(), change()], "twice"),
        ([change(feedback_id="")], "1 to 256 characters"),
        ([change(entry_ids=("",))], "1 to 256 characters"),
        ([change(entry_ids=())], "lacks its query or its entries"),
        ([change(query=UNSET)], "lacks its query or its entries"),
        ([change(removed=True)], "it is not there"),
        ([change(query=Tensor.from_array(point(1, 0, 0)))], r"of shape \(3,\), not \(2,\)"),
        ([change(entry_ids=("a", "a"))], "names an entry twice"),
        ([change(entry_ids=("a", "b"))], "entry 'b', which is not there"),
    ],
)
def test_a_delta_with_a_wrong_exception_is_not_applied(exceptions: list[ExceptionChange], reason: str) -> None:
    codebook = new_codebook()
    codebook.apply(sealed(codebook, added("a", [0.0, 0.0], 1.0)))
    before = codebook.state_digest(), codebook.seq
    with pytest.raises(HistoryError, match=reason):
        codebook.apply(sealed(codebook, op="except", exceptions=tuple(exceptions)))
    assert (codebook.state_digest(), codebook.seq) == before


def test_an_exception_of_no_entry_or_of_one_that_its_delta_removes_is_not_applied() -> None:
    codebook = new_codebook()
    before = codebook.state_digest()
    with pytest.raises(HistoryError, match="not there"):
        codebook.apply(sealed(codebook, op="except", exceptions=(change(),)))
    assert codebook.state_digest() == before
    codebook.apply(sealed(codebook, added("a", [0.0, 0.0], 1.0)))
    before = codebook.state_digest()
    removed = EntryChange(entry_id="a", removed=True)
    with pytest.raises(HistoryError, match="not there"):
        codebook.apply(sealed(codebook, removed, op="undo", exceptions=(change(),)))
    assert codebook.state_digest() == before
    wide_query = change(feedback_id="y", query=Tensor.from_array(point(1, 0, 0)))
    fresh = new_codebook()
    with pytest.raises(HistoryError, match="of shape"):
        fresh.apply(sealed(fresh, added("a", [0.0, 0.0], 1.0), op="undo", exceptions=(wide_query,)))
    assert len(fresh) == 0


def test_every_part_of_an_exception_counts_in_the_state_digest() -> None:
    digests = set()
    others: list[dict[str, Any]] = [
        {}, {"feedback_id": "y"}, {"entry_ids": ("a", "b")}, {"query": Tensor.from_array(point(2, 0))}, {"radius": 0.2},
        {"wording": "words"},
    ]  # fmt: skip
    for fields in others:
        codebook = new_codebook()
        codebook.apply(sealed(codebook, added("a", [0.0, 0.0], 1.0), added("b", [9.0, 0.0], 1.0)))
        codebook.apply(sealed(codebook, op="except", exceptions=(change(**fields),)))
        digests.add(codebook.state_digest())
    assert len(digests) == len(others)


def test_the_delta_tells_what_was_asked_and_holds_the_prompt() -> None:
    story = wide()
    story.except_from("x", (1, 0), "a")
    delta = decode_delta(story.deltas[-1])
    assert delta.op == "except"
    assert delta.entries == ()
    (exception,) = delta.exceptions
    assert (exception.feedback_id, exception.except_from, exception.entry_ids) == ("x", "a", ("a",))
    assert delta.cause is not UNSET
    assert (delta.cause.feedback_id, delta.cause.entry_id) == ("x", UNSET)
    assert delta.cause.query == exception.query


def test_a_corrected_prompt_is_no_exception_where_the_log_has_no_wording_of_it() -> None:
    story = new_story(worded=True, radius=3.0, check_wording=False)
    story.correct("a", (0, 0), 1)
    story.lead(plan_of(radius=3.0))
    outcome = story.except_from("x", (0, 0), "a")
    assert outcome.status == "rejected"
    assert "undo it" in str(outcome.reason)
    assert answer(story.engine, 0, 0) == 1
