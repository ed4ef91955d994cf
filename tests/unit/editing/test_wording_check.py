"""A prompt within an entry's radius is served only where the wordings can ask for the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from gracestream.pipeline.codebook.file import load_codebook, save_codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import MAX_COMPARED_WORDINGS, OUTSIDE_RADIUS_REASON, CodebookLookup
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.traffic_sample import TrafficSample
from gracestream.pipeline.model.editable import ServedAnswer
from gracestream.pipeline.search.key_search import TorchSearch
from gracestream.pipeline.tuning.evaluation import EvaluationCase, evaluate
from gracestream.pipeline.wording.comparison import extract_wording, find_disagreement
from gracestream.schemas.deltas import Delta, EntryChange, decode_delta
from gracestream.schemas.messages import Parameters
from tests.support import chosen_queries
from tests.support.tiny_encoder import chat
from tests.support.tiny_models import (
    CHAT,
    KINDS,
    WORDS,
    added,
    correct,
    editable,
    index_of,
    new_codebook,
    sealed,
    texts,
)

GENERATORS = [kind for kind in KINDS if kind != "bert"]
EDITED, OTHER = texts(2, seed=11)
SAME = f"{EDITED} "
TARGET = "train"
FAR = 1e6
"""A radius that holds every prompt."""


def started(kind: str, **plan: Any) -> EditEngine:
    engine = EditEngine(
        editable(kind), "default", EditConfig(radius=FAR, radius_unit="absolute", traffic_sample_size=0, **plan)
    )
    engine.apply(engine.lead_delta({}))
    return engine


def ask(engine: EditEngine, *inputs: str) -> list[ServedAnswer]:
    prompts = [engine.model.task.tokenize(text) for text in inputs]
    return engine.model.answer(prompts, [Parameters()] * len(prompts), engine.lookup)


def test_the_prompts_of_these_tests_disagree() -> None:
    assert find_disagreement(extract_wording(EDITED), extract_wording(OTHER))


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_prompt_with_other_words_gets_the_unedited_answer_and_the_reason(kind: str) -> None:
    engine = started(kind)
    before = ask(engine, EDITED, OTHER)
    outcome, _ = correct(engine, "a", EDITED, TARGET)
    assert outcome.status == "added", outcome
    assert engine.codebook.wordings == [extract_wording(EDITED)]
    edited, other, same = ask(engine, EDITED, OTHER, SAME)
    assert edited.served_by is not None
    assert same.served_by is not None
    assert other.served_by is None
    assert other.near_miss is not None
    assert other.near_miss.entry_id == "a"
    assert other.near_miss.reason_not_served == find_disagreement(extract_wording(EDITED), extract_wording(OTHER))
    assert other.answer.outputs == before[1].answer.outputs
    assert edited.answer.outputs.text == TARGET


WORDINGS = ["", "the fee in 2021", "the fee in 2022", "fees for 2021"]
"""The first agrees with each, the second with the last."""
ASKED = ["what is the fee in 2021", "what is the fee in 2022"]
"""These agree with some, and have the same words as none."""


@given(st.data())
def test_the_nearest_entry_that_holds_a_prompt_and_agrees_serves_it(data: st.DataObject) -> None:
    """As brute force finds it, whatever the order of the slots; without one the nearest is the near miss."""
    count = data.draw(st.integers(1, 40))
    keys = data.draw(st.lists(st.integers(-4, 4), min_size=count, max_size=count))
    radii = data.draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    wordings = data.draw(st.lists(st.sampled_from(WORDINGS), min_size=count, max_size=count))
    asked = data.draw(st.sampled_from(ASKED))
    entries = [
        replace(added(f"e{row}", [float(keys[row]), 0.0], float(radii[row])), wording=wordings[row])
        for row in range(count)
    ]
    by_distance = sorted((abs(keys[row]), f"e{row}", row) for row in range(count))
    held = [(name, row) for distance, name, row in by_distance if distance < radii[row]][:MAX_COMPARED_WORDINGS]
    expected = None
    if by_distance[0][0] < radii[by_distance[0][2]]:
        agreeing = [name for name, row in held if not find_disagreement(wordings[row], asked)]
        expected = (agreeing[0], True) if agreeing else (held[0][0], False)
    for order in (entries, entries[::-1]):
        codebook = new_codebook()
        codebook.apply(sealed(codebook, *order))
        for search in (None, TorchSearch):
            index = KeyIndex(codebook, torch.device("cpu"), search)
            (found,) = CodebookLookup(codebook, index).find_entries(torch.zeros(1, 2), lambda _row: asked)
            if found is not None and found.reason_not_served == OUTSIDE_RADIUS_REASON:
                found = None
            assert (found and (found.entry_id, not found.reason_not_served)) == expected


def test_no_more_entries_are_compared_than_is_promised() -> None:
    """The seventeenth would agree."""
    for farther, serves in ((MAX_COMPARED_WORDINGS - 1, True), (MAX_COMPARED_WORDINGS, False)):
        codebook = new_codebook()
        others = [added(f"e{row}", [0.1 + 0.01 * row], 9.0) for row in range(farther)]
        agreeing = replace(added("z", [1.0], 9.0), wording=WORDINGS[1])
        codebook.apply(sealed(codebook, *(replace(one, wording=WORDINGS[2]) for one in others), agreeing))
        (found,) = CodebookLookup(codebook, index_of(codebook)).find_entries(torch.zeros(1, 1), lambda _row: ASKED[0])
        assert found is not None
        assert found.entry_id == ("z" if serves else "e0")
        assert bool(found.reason_not_served) is not serves


def test_an_edit_that_a_farther_entry_serves_keeps_its_answer() -> None:
    """Whatever becomes of the nearer entry, whose wording disagrees."""
    made = chosen_queries.engine(EditConfig(radius=3.0, radius_unit="absolute", traffic_sample_size=0), worded=True)
    for name, place, label in (("far", (0, 0), "1"), ("near", (0.54995, 0), "2"), ("kept", (0.8, 0), "1")):
        outcome, _ = correct(made, name, chosen_queries.at(*place), label, offset=made.codebook.seq)
    assert (outcome.status, outcome.entry_id) == ("unchanged", "far")
    assert chosen_queries.answer(made, 0.8, 0) == 1
    # Within the noise of the nearer key, in the other words: its entry compares no words from now on.
    assert correct(made, "joins", chosen_queries.at(0.55005, 0), "3", offset=made.codebook.seq)[0].status == "replaced"
    assert made.codebook.wordings[made.codebook.slot("near")] == ""
    assert chosen_queries.answer(made, 0.8, 0) == 1


@pytest.mark.parametrize("kind", GENERATORS)
def test_without_the_check_every_prompt_within_the_radius_is_served(kind: str) -> None:
    engine = started(kind, check_wording=False)
    correct(engine, "a", EDITED, TARGET)
    assert engine.codebook.wordings == [""]
    (other,) = ask(engine, OTHER)
    assert other.served_by is not None
    assert other.near_miss is None


def test_a_classifier_compares_no_words() -> None:
    engine = started("bert")
    names = list(engine.model.module.config.id2label.values())
    (before,) = ask(engine, EDITED)
    correct(engine, "a", EDITED, next(name for name in names if name != before.answer.outputs.label))
    assert engine.codebook.wordings == [""]
    (other,) = ask(engine, OTHER)
    assert other.served_by is not None


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_same_target_for_other_words_gets_a_key_of_its_own(kind: str) -> None:
    """An entry that has the target already could not serve them."""
    engine = started(kind)
    correct(engine, "a", EDITED, TARGET)
    outcome, _ = correct(engine, "b", OTHER, TARGET)
    assert outcome.entry_id == "b", outcome
    assert [served.served_by.entry_id for served in ask(engine, EDITED, OTHER) if served.served_by is not None] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("kind", GENERATORS)
def test_traffic_with_other_words_bounds_no_radius(kind: str) -> None:
    engine, worded, free = (started(kind, **plan) for plan in ({"check_wording": False}, {}, {}))
    prompt = engine.model.task.tokenize(OTHER)
    (query_D,) = engine.model.queries([prompt]).cpu().numpy()
    for made in (engine, worded):
        made.traffic_sample = TrafficSample(8, 0)
        made.add_traffic(1.0, query_D, made.model.task.wording(prompt))
    for made in (engine, worded, free):
        correct(made, "a", EDITED, TARGET)
    radius, with_words, without_traffic = (
        float(made.codebook.radii_N[made.codebook.slot("a")]) for made in (engine, worded, free)
    )
    assert radius < with_words == without_traffic


def test_a_kept_input_with_other_words_bounds_no_radius() -> None:
    radii = []
    for worded in (False, True):
        made = chosen_queries.engine(
            EditConfig(radius=3.0, radius_unit="absolute", traffic_sample_size=0), worded=worded
        )
        outcome, _ = correct(made, "kept", chosen_queries.at(0, 0), "0")
        assert outcome.status == "unchanged"
        correct(made, "a", chosen_queries.at(0.1, 0), "1")
        radii.append(float(made.codebook.radii_N[0]))
        assert (chosen_queries.answer(made, 0, 0), chosen_queries.answer(made, 0.1, 0)) == (0, 1)
    assert radii == [pytest.approx(0.08), 3.0]


def test_a_saved_codebook_compares_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started("llama")
    correct(engine, "a", EDITED, TARGET)
    save_codebook(engine.codebook, tmp_path / "codebook.safetensors")
    loaded = load_codebook(tmp_path / "codebook.safetensors")
    assert loaded.wordings == [extract_wording(EDITED)]
    assert loaded.state_digest() == engine.codebook.state_digest()
    before = loaded.state_digest()
    with monkeypatch.context() as changed:
        changed.setattr("gracestream.pipeline.codebook.codebook.rules_digest", lambda: "other rules")
        assert loaded.state_digest() != before, "a replica with other rules answers differently"
    loaded.wordings[0] = ""
    assert loaded.state_digest() != engine.codebook.state_digest(), "they answer differently"
    prompts = [engine.model.task.tokenize(OTHER)]
    (served,) = engine.model.answer(prompts, [Parameters()], CodebookLookup(loaded, index_of(loaded)))
    assert served.served_by is not None


def test_a_case_with_other_words_counts_as_not_served() -> None:
    engine = started("llama")
    correct(engine, "a", EDITED, TARGET)
    cases = [EvaluationCase(EDITED, TARGET), EvaluationCase(OTHER, unchanged=True)]
    edited, other = evaluate(engine.model, engine.codebook, cases)
    assert (edited.verdict, edited.entry_id) == ("correct", "a")
    assert (other.verdict, other.entry_id, other.broken) == ("unchanged", None, False)


NEAR: dict[str, Any] = {"radius": 1e-3, "radius_unit": "absolute", "traffic_sample_size": 0}
"""Radii that hold the corrected prompt alone."""
SAME_WORDS = f"the {EDITED}"
FURTHER = f"{EDITED} people"
"""Names what the corrected prompt names, in other words."""


def narrow(kind: str = "llama", **plan: Any) -> EditEngine:
    engine = EditEngine(editable(kind), "default", EditConfig(**(NEAR | plan)))
    engine.apply(engine.lead_delta({}))
    return engine


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_prompt_in_the_same_words_is_served_outside_the_radius(kind: str) -> None:
    engine = narrow(kind, train_prompt_forms=False)
    before = ask(engine, OTHER)
    correct(engine, "a", EDITED, TARGET)
    edited, same, other = ask(engine, EDITED, SAME_WORDS, OTHER)
    assert edited.served_by is not None
    assert not edited.served_by.is_outside_radius
    match = same.served_by or same.near_miss  # a value of one prompt may fail at another
    assert match is not None
    assert match.entry_id == "a"
    assert match.distance > match.radius
    assert match.is_outside_radius
    assert other.served_by is None
    assert other.near_miss is None
    assert other.answer.outputs == before[0].answer.outputs


def test_an_entry_that_compares_no_words_serves_by_distance_alone() -> None:
    engine = narrow(check_wording=False)
    correct(engine, "a", EDITED, TARGET)
    (same,) = ask(engine, SAME_WORDS)
    assert same.served_by is None
    assert same.near_miss is None


def test_the_nearest_of_those_with_the_same_words_serves_and_an_undone_one_does_not() -> None:
    """Each prompt is served by its own entry first."""
    made = chosen_queries.engine(EditConfig(**NEAR), worded=True)
    for name, place, label in (("a", 0.0, "1"), ("b", 0.4, "2")):
        correct(made, name, chosen_queries.at(place, 0), label)
    assert [chosen_queries.answer(made, place, 0) for place in (0, 0.2, 0.18, 0.22, 0.4)] == [1, 1, 1, 2, 2]
    removed = made.next_delta("split", entries=(EntryChange(entry_id="a", removed=True),))
    made.apply(removed)
    assert [chosen_queries.answer(made, place, 0) for place in (0, 0.2, 0.4)] == [2, 2, 2]


def test_a_correction_whose_words_an_entry_has_gets_a_key_of_its_own() -> None:
    """Even where that entry gives the target: by its words alone nothing keeps a later edit from taking it over."""
    made = chosen_queries.engine(EditConfig(**NEAR), worded=True)
    correct(made, "a", chosen_queries.at(0, 0), "1")
    assert chosen_queries.answer(made, 0.4, 0) == 1
    outcome, _ = correct(made, "b", chosen_queries.at(0.4, 0), "1")
    assert (outcome.status, outcome.entry_id) == ("added", "b")
    outcome, _ = correct(made, "c", chosen_queries.at(0.2, 0), "0")
    assert outcome.status == "added", "the unedited answer is to be trained where an entry has the words"
    assert [chosen_queries.answer(made, place, 0) for place in (0, 0.2, 0.4)] == [1, 0, 1]


def test_a_later_correction_supersedes_what_was_right_in_the_same_words() -> None:
    made = chosen_queries.engine(EditConfig(**NEAR), worded=True)
    outcome, _ = correct(made, "kept", chosen_queries.at(0.4, 0), "0")
    assert outcome.status == "unchanged"
    _, record = correct(made, "a", chosen_queries.at(0, 0), "1")
    assert record is not None
    delta = decode_delta(record)
    assert isinstance(delta, Delta)
    assert delta.cause is not UNSET
    assert delta.cause.supersedes == ("kept",)
    assert "kept" not in made.memory
    assert chosen_queries.answer(made, 0.4, 0) == 1


def test_an_edit_of_a_plan_without_words_is_superseded_by_its_words_later() -> None:
    """The log keeps its wording, though no entry of that plan has one."""
    without = chosen_queries.engine(EditConfig(**(NEAR | {"check_wording": False})), worded=True)
    later = chosen_queries.engine(EditConfig(**NEAR), worded=True)
    outcome, record = correct(without, "kept", chosen_queries.at(0.4, 0), "0")
    assert outcome.status == "unchanged"
    assert record is not None
    later.apply(record)
    _, record = correct(later, "a", chosen_queries.at(0, 0), "1")
    assert record is not None
    delta = decode_delta(record)
    assert isinstance(delta, Delta)
    assert delta.cause is not UNSET
    assert delta.cause.supersedes == ("kept",)


def test_no_entry_of_a_plan_without_words_has_a_wording() -> None:
    """Not those that the guard gives, either: they serve all prompts within their radius."""
    made = chosen_queries.engine(
        EditConfig(radius=1.0, radius_unit="absolute", traffic_sample_size=0, check_wording=False), worded=True
    )
    correct(made, "a", chosen_queries.at(0, 0), "1")
    correct(made, "b", chosen_queries.at(0.6, 0), "1")
    correct(made, "c", chosen_queries.at(0.5, 0), "2")
    assert "b" in made.codebook.entry_ids
    assert not any(made.codebook.wordings)


def test_an_entry_that_the_guard_gives_leaves_what_was_right_in_the_same_words() -> None:
    made = chosen_queries.engine(EditConfig(radius=1.0, radius_unit="absolute", traffic_sample_size=0), worded=True)
    correct(made, "a", chosen_queries.at(0, 0), "1")
    correct(made, "b", chosen_queries.at(0.6, 0), "1")  # served by the entry of "a", whose words are others
    outcome, _ = correct(made, "kept", chosen_queries.at(1.4, 0), "0")  # the words of "b"
    assert outcome.status == "unchanged"
    correct(made, "c", chosen_queries.at(0.5, 0), "2")
    assert {name: chosen_queries.answer(made, place, 0) for name, place in (("a", 0), ("b", 0.6), ("kept", 1.4))} == {
        "a": 1, "b": 1, "kept": 0
    }  # fmt: skip


def test_traffic_in_the_same_words_bounds_no_radius() -> None:
    radii = []
    for words in ("", "place 0 about", "place 0 able"):
        made = chosen_queries.engine(EditConfig(radius=1.0, radius_unit="absolute", traffic_sample_size=8), worded=True)
        made.add_traffic(1.0, chosen_queries.point(0.4, 0), words)
        correct(made, "a", chosen_queries.at(0, 0), "1")
        radii.append(float(made.codebook.radii_N[0]))
    assert radii == [pytest.approx(0.32), pytest.approx(0.32), 1.0]


def test_a_prompt_a_little_outside_that_names_the_same_is_a_near_miss() -> None:
    engine = narrow()
    before = ask(engine, FURTHER, OTHER)
    correct(engine, "a", EDITED, TARGET)
    model = engine.model
    queries_BD = model.queries([model.task.tokenize(text) for text in (EDITED, FURTHER)])
    distance = float((queries_BD[0] - queries_BD[1]).norm())
    for radius, reason in ((distance / 1.5, None), (distance / 1.3, OUTSIDE_RADIUS_REASON), (1.1 * distance, "")):
        engine.apply(engine.next_delta("split", entries=(EntryChange(entry_id="a", radius=radius),)))
        further, other = ask(engine, FURTHER, OTHER)
        match = further.near_miss or further.served_by
        assert (None if match is None else match.reason_not_served) == reason
        if reason != "":
            assert further.answer.outputs == before[0].answer.outputs
        assert other.served_by is None


def test_a_follow_up_in_another_chat_is_not_served_by_its_words() -> None:
    engine = EditEngine(
        editable("llama", chat_template=CHAT), "default", EditConfig(**(NEAR | {"train_prompt_forms": False}))
    )
    engine.apply(engine.lead_delta({}))
    follow_up, elsewhere = (chat(WORDS[place], WORDS[8], EDITED) for place in (3, 5))
    correct(engine, "a", follow_up, TARGET)
    prompts = [engine.model.task.tokenize(inputs) for inputs in (follow_up, elsewhere, EDITED)]
    served = engine.model.answer(prompts, [Parameters()] * 3, engine.lookup)
    assert [None if one.served_by is None else one.served_by.entry_id for one in served] == ["a", None, None]
