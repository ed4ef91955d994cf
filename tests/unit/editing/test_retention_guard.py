"""An edit never undoes an earlier one: after every step of any stream, every edit in force still answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.edit_memory import UNEDITED_MODEL, EditMemory
from gracestream.pipeline.codebook.policy import match_tolerance
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.search.key_search import NO_SLOT
from gracestream.pipeline.wording.same_words import have_same_words
from gracestream.schemas.messages import Status
from tests.support.chosen_queries import CLASSES, answer, at, engine, point
from tests.support.examples import examples
from tests.support.tiny_models import CODEBOOK, correct, editable, texts

NOISE = match_tolerance(0, "float32")
MANY = examples(0.4)
UNEDITED_CLASS = 0
"""What the unedited model answers everywhere."""

places = st.tuples(st.integers(0, 2), st.integers(0, 2))
jitters = st.sampled_from([0.0, NOISE / 2, 0.75 * NOISE, 1.5 * NOISE, 0.01, 0.3])
points = st.builds(lambda place, x, y: (place[0] + x, place[1] - y), places, jitters, jitters)
labels = st.integers(0, CLASSES - 1)
steps = st.lists(st.tuples(points, labels, st.none() | points), min_size=2, max_size=14)
initial_radii = st.sampled_from([1e-3, 0.3, 1.0, 3.0])


@dataclass
class Stream:
    """Corrections and traffic for one engine, and what a user believes to be in force."""

    engine: EditEngine
    records: list[bytes] = field(default_factory=list)
    believed: dict[str, tuple[np.ndarray, int]] = field(default_factory=dict)

    def correct(self, place: Sequence[float], label: int) -> Status:
        seq = self.engine.codebook.seq
        name = f"f{seq}"
        outcome, record = correct(self.engine, name, at(*place), str(label), offset=seq)
        if record is not None:
            query_D = point(*place)
            self.records.append(record)
            # Superseded: other targets of the same input, and edits of the unedited model with the same words.
            gone = [other for other in self.believed if other not in self.engine.memory]
            for other in gone:
                other_D, other_label = self.believed.pop(other)
                assert other_label != label or other_label == UNEDITED_CLASS
                same = other_label == UNEDITED_CLASS and have_same_words(self.wording(other_D), self.wording(query_D))
                assert same or np.linalg.norm(other_D - query_D) <= NOISE * 1.001
            self.believed[name] = (query_D, label)
        return outcome.status

    def wording(self, point_D: np.ndarray) -> str:
        task = self.engine.model.task
        return task.wording(task.tokenize(at(*point_D.tolist())))

    def flow(self, place: Sequence[float], offset: int) -> None:
        score = self.engine.traffic_sample.offer(0, offset, 0.0)
        if score is not None:
            self.engine.add_traffic(score, point(*place), self.wording(point(*place)))

    def kept(self) -> list[np.ndarray]:
        """The inputs that the unedited model must go on answering."""
        memory = self.engine.memory
        return [
            query_D for name, (query_D, _) in self.believed.items() if memory.serving_entry_id(name) == UNEDITED_MODEL
        ]

    def lost(self) -> Iterator[str]:
        """The edits that no entry of their label serves any more, or whose query is too near the entry's radius.

        An edit that the unedited model answers must be within no radius, except of a key within the tolerance.
        """
        codebook = self.engine.codebook
        for name, (query_D, label) in self.believed.items():
            nearest = self.engine.index.nearest(torch.from_numpy(query_D)[None])
            slot, distance = int(nearest.slots_B[0]), float(nearest.distances_B[0])
            inside = slot != NO_SLOT and distance + NOISE < codebook.radii_N[slot]
            if name in self.engine.memory and self.engine.memory.serving_entry_id(name) == UNEDITED_MODEL:
                if inside and distance > 4 * NOISE and codebook.labels[slot] != (label,):
                    yield name
            elif not inside or codebook.labels[slot] != (label,):
                yield name


def start(*, worded: bool = False, **plan: Any) -> Stream:
    usual: dict[str, Any] = {"radius_unit": "absolute", "traffic_sample_size": 8}
    return Stream(engine(EditConfig(**(usual | plan)), worded=worded))


@MANY
@given(steps, initial_radii)
def test_nearest_keeps_every_edit_in_force_after_every_step(stream: list[Any], radius: float) -> None:
    """With traffic in between, near duplicates, and corrections of the same input again."""
    ours = start(radius=radius)
    for offset, (place, label, traffic) in enumerate(stream):
        if traffic is not None:
            ours.flow(traffic, offset)
        kept = ours.kept()
        if ours.correct(place, label) == "rejected":
            assert min(np.linalg.norm(key_D - point(*place)) for key_D in kept) < 3 * NOISE
            continue
        assert answer(ours.engine, *place) == label
        assert not list(ours.lost())
        assert set(ours.engine.memory.feedback_ids) == set(ours.believed)


edges = st.builds(lambda x, side: (x + 0.05 + side, 0.0), st.integers(0, 2), st.sampled_from([-5e-5, 5e-5]))
"""Pairs of inputs within batch noise whose wordings disagree."""
worded_steps = st.lists(st.tuples(points | edges, labels, st.none() | points), min_size=2, max_size=14)


@MANY
@given(worded_steps, initial_radii)
def test_edits_whose_wordings_disagree_answer_each_with_its_own_target(stream: list[Any], radius: float) -> None:
    """Within the noise of each other too, where one entry serves both and compares no words."""
    ours = start(radius=radius, worded=True)
    memory, codebook = ours.engine.memory, ours.engine.codebook
    for offset, (place, label, traffic) in enumerate(stream):
        if traffic is not None:
            ours.flow(traffic, offset)
        if ours.correct(place, label) == "rejected":
            continue
        for query_D, believed in ours.believed.values():
            assert answer(ours.engine, *query_D.tolist()) == believed
    for name in filter(memory.__contains__, codebook.entry_ids):
        assert codebook.wordings[codebook.slot(name)] in ("", memory.wording(name))


@MANY
@given(steps, initial_radii, st.sampled_from(["cover", "paper"]))
def test_paper_keeps_every_edit_that_lies_far_enough_from_other_labels(
    stream: list[Any], radius: float, expand: str
) -> None:
    """Half the distance must be more than the tolerance: below four times it, the paper's radii fail."""
    ours = start(policy="paper", expand=expand, radius=radius, traffic_sample_size=0)
    for place, label, _ in stream:
        others = [key_D for key_D, other in ours.believed.values() if other != label]
        if all(np.linalg.norm(key_D - point(*place)) > 8 * NOISE for key_D in others):
            ours.correct(place, label)
            assert not list(ours.lost())


def test_fault_correcting_the_same_prompt_twice_loses_both_edits_only_in_paper_mode() -> None:
    for policy, last in (("paper", 0), ("nearest", 2)):
        ours = start(policy=policy)
        ours.correct((1, 1), 1)
        ours.correct((1, 1), 2)
        assert answer(ours.engine, 1, 1) == last


def test_an_edit_of_the_same_input_that_says_the_same_is_not_superseded() -> None:
    """In paper mode the second of two corrections is lost, so the model is wrong again and is corrected again."""
    ours = start(policy="paper")
    for label in (1, 2, 2):
        ours.correct((1, 1), label)
    assert len(ours.engine.memory) == 2


def test_paper_cannot_hold_two_labels_closer_than_batch_noise() -> None:
    ours = start(policy="paper")
    ours.correct((1, 1), 1)
    ours.correct((1, 1 + 1.5 * NOISE), 2)
    assert len(list(ours.lost())) == 2


def test_without_the_guard_a_split_undoes_an_edit_that_the_entry_served() -> None:
    kept = {}
    for guard in (False, True):
        ours = start(retention_guard=guard, policy="paper")
        ours.correct((0, 0), 1)
        ours.correct((0, 1.2), 1)
        ours.correct((0.5, 0), 2)
        kept[guard] = answer(ours.engine, 0, 1.2)
    assert kept == {False: 0, True: 1}


def test_a_guarded_edit_gets_its_entry_in_the_delta_of_the_decision_with_the_same_value() -> None:
    ours = start()
    ours.correct((0, 0), 1)
    ours.correct((0, 1.2), 1)
    codebook, second = ours.engine.codebook, ours.engine.memory.feedback_ids[1]
    assert len(codebook) == 1
    seq = codebook.seq
    ours.correct((0, 1.0), 2)
    assert codebook.seq == seq + 1
    own, first = codebook.entry(codebook.slot(second)), codebook.entry(0)
    assert own.key_D.tolist() == point(0, 1.2).tolist()
    assert own.value_V.tolist() == first.value_V.tolist()
    assert own.label == first.label


def test_the_flagged_input_itself_is_no_traffic_that_blocks_its_expand() -> None:
    ours = start()
    ours.correct((0, 0), 1)
    ours.flow((0, 1.2), 0)
    assert len(ours.engine.traffic_sample) == 1
    assert ours.correct((0, 1.2), 1) == "expanded"


def test_traffic_in_the_way_of_an_expand_gives_an_own_key_that_stops_short_of_it() -> None:
    ours = start()
    ours.correct((0, 0), 1)
    ours.flow((0, -1.3), 0)
    assert ours.correct((0, 1.2), 1) == "added"
    assert answer(ours.engine, 0, -1.3) == 0


def test_correcting_an_input_again_and_again_leaves_one_key_there() -> None:
    """Also when another label moves in beside it."""
    ours = start()
    ours.correct((0, 0), 1)
    for label in (2, 3, 1, 2):
        assert ours.correct((0, 0), label) == "replaced"
    ours.correct((0, 2 * NOISE), 3)
    keys = [tuple(key_D) for key_D in ours.engine.codebook.keys_ND.tolist()]
    assert len(keys) == len(set(keys)) == 2


def test_an_entry_that_paper_mode_left_with_radius_zero_serves_again_after_a_correction() -> None:
    ours = start(policy="paper")
    ours.correct((1, 1), 1)
    ours.correct((1, 1), 2)
    ours.engine.config = EditConfig(radius_unit="absolute")
    assert ours.correct((1, 1), 3) == "replaced"
    assert answer(ours.engine, 1, 1) == 3


@examples(0.3)
@given(steps, initial_radii, st.sampled_from(["nearest", "paper"]))
def test_folding_the_log_gives_the_memory_and_the_codebook_of_the_live_engine(
    stream: list[Any], radius: float, policy: str
) -> None:
    ours = start(radius=radius, policy=policy)
    lead = ours.engine.codebook
    assert lead.seq == 1
    codebook, memory = Codebook(CODEBOOK, lead.model, lead.layer), EditMemory()
    codebook.apply(EditEngine(ours.engine.model, CODEBOOK, ours.engine.config).lead_delta({}))
    for place, label, _ in stream:
        ours.correct(place, label)
    for record in ours.records:
        applied = codebook.apply(record)
        assert applied is not None
        memory.apply_delta(applied.delta, codebook)
    assert codebook.state_digest() == ours.engine.codebook.state_digest()
    assert memory.feedback_ids == ours.engine.memory.feedback_ids
    assert memory.entry_ids == ours.engine.memory.entry_ids
    assert memory.queries_ED.tobytes() == ours.engine.memory.queries_ED.tobytes()
    assert memory.distances_E.tobytes() == ours.engine.memory.distances_E.tobytes()


@pytest.mark.parametrize("policy", ["nearest", "paper"])
def test_a_real_classifier_keeps_every_edit_of_a_long_random_stream(policy: Literal["nearest", "paper"]) -> None:
    """Inputs come again with other labels; what was said last of an input is what the model says in the end."""
    made = EditEngine(editable("bert"), CODEBOOK, EditConfig(policy=policy, radius=1.0))
    made.apply(made.lead_delta({}))
    generator, inputs = np.random.default_rng(0), texts(30)
    names = list(made.model.module.config.id2label.values())
    said: dict[str, str] = {}
    by_model: set[str] = set()
    for offset in range(60):
        text, target = inputs[int(generator.integers(30))], names[int(generator.integers(4))]
        if policy == "paper" and text in said:
            continue
        outcome, record = correct(made, f"f{offset}", text, target, offset)
        assert outcome.status != "rejected"
        if record is not None:
            said[text] = target
            (by_model.add if made.memory.serving_entry_id(f"f{offset}") == UNEDITED_MODEL else by_model.discard)(text)
        elif text in said:
            assert said[text] == target
    prompts = [made.model.task.tokenize(text) for text in said]
    served = made.model.answer(prompts, [], made.lookup)
    assert [row.answer.outputs.label for row in served] == list(said.values())
    assert {text for text, row in zip(said, served, strict=True) if row.served_by is None} == by_model
    assert 0 < len(by_model) < len(said)


def test_a_correction_that_an_entry_fulfils_already_is_under_the_guard_too() -> None:
    """Otherwise a later edit between the two would become nearest for a query whose answer was confirmed."""
    ours = start(radius=2.0)
    assert [ours.correct(place, label) for place, label in (((0, 0), 1), ((1.5, 0), 1))] == ["added", "unchanged"]
    assert len(ours.engine.codebook) == 1
    ours.correct((1.9, 0), 2)
    assert answer(ours.engine, 1.5, 0) == 1
    assert not list(ours.lost())
    assert len(ours.engine.codebook) == 3


class TestInputsNearTheTolerance:
    """In half precision a radius is at least twice the tolerance, here about 1 at a norm of 32."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_what_is_to_stay_right_is_not_taken_over_by_a_neighbour(self, dtype: str) -> None:
        ours = start(radius=0.5)
        ours.engine.model.query_dtype = dtype
        assert ours.correct((32, 0), 0) == "unchanged"
        assert ours.correct((33.5, 0), 1) == ("added" if dtype == "float32" else "rejected")
        assert answer(ours.engine, 32, 0) == 0

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_radius_grows_for_served_inputs_no_farther_than_is_allowed(self, dtype: str) -> None:
        ours = start(radius=4.0)
        ours.engine.model.query_dtype = dtype
        assert ours.correct((32, 0), 1) == "added"
        assert ours.correct((37, 0), 0) == "unchanged"
        assert ours.correct((35.5, 0), 1) == "unchanged"
        assert answer(ours.engine, 37, 0) == 0
        assert ours.engine.codebook.radii_N.tolist() == [4.0]

    def test_a_limit_below_the_floor_takes_no_correction_away(self) -> None:
        ours = start(radius=0.5, max_radius=1e-6)
        assert ours.correct((32, 0), 1) == "added"
        assert ours.correct((34, 0), 2) == "added"
