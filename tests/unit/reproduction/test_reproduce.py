"""Training anew: the recorded history comes out again, and the first decision that does not is named."""

import copy
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from msgspec import UNSET

from gracestream.pipeline.editing.config import EditConfig, edit_config_from_lead
from gracestream.pipeline.editing.provenance import describe_environment
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.editing.value_training import ValueTrainingConfig
from gracestream.pipeline.errors import HistoryError
from gracestream.schemas.deltas import Delta, EntryChange, Tensor, decode_delta
from tests.support.chosen_queries import at
from tests.support.recorded_history import PLAN, Recorded


@pytest.fixture
def history() -> Recorded:
    """Every kind of decision, with traffic that came and went in between."""
    made = Recorded()
    made.see(0, 0.0, 1.2)
    made.correct("a", (0, 0), 1)
    made.correct("same", (0, 0.3), 1)
    made.see(1, 5.0, 5.6)
    made.correct("b", (0.9, 0), 2)
    made.correct("c", (5, 5), 3)
    made.correct("again", (0, 0), 3)
    made.undo("u", "a")
    made.correct("d", (5, 4.2), 3)
    made.undo("v", "u")
    return made


def delta_at(history: Recorded, seq: int) -> Delta:
    return decode_delta(history.deltas[seq - 1])


def test_every_record_comes_out_again_without_the_traffic_of_its_time(history: Recorded) -> None:
    reproduced = history.reproduced()
    compared = reproduced.report
    assert reproduced.records == history.deltas
    assert compared.decisions == compared.same_decisions == compared.same_records == len(history.deltas) - 1
    assert (compared.first_difference, compared.value_difference) == (None, 0.0)
    assert compared.other_environment == {}
    assert reproduced.codebook is not None
    assert reproduced.codebook.state_digest() == history.engine.codebook.state_digest()


def test_a_value_that_differs_is_measured_and_the_decision_is_the_same(history: Recorded) -> None:
    change = delta_at(history, 2).entries[0]
    assert isinstance(change.value, Tensor)
    value = change.value.array() + 0.25
    history.rewrite(2, entries=(msgspec.structs.replace(change, value=Tensor.from_array(value)),))
    compared = history.reproduced().report
    assert compared.first_difference is None
    assert compared.same_records == compared.decisions - 1
    assert compared.value_difference == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("seq", "fields", "how"),
    [
        (4, {"op": "add"}, "delta 4 (feedback 'b', offset 2): it was 'add' and is 'split' now"),
        (4, {"entries": (EntryChange(entry_id="a", radius=0.5),)}, "it changed 'a' and changes 'b' now"),
    ],
)
def test_the_first_decision_that_differs_ends_it_and_is_named(
    history: Recorded, seq: int, fields: dict[str, Any], how: str
) -> None:
    history.rewrite(seq, **fields)
    reproduced = history.reproduced()
    assert how in str(reproduced.report.first_difference)
    assert reproduced.report.same_decisions == seq - 2
    assert len(reproduced.records) == seq - 1


def test_a_correction_that_is_another_one_now_is_a_difference(history: Recorded) -> None:
    history.feedback[2] = make_correction("b", at(0.9, 0), "0")
    found = str(history.reproduced().report.first_difference)
    assert found == "delta 4 (feedback 'b', offset 2): it changes 'b' to another target, or other fields of it"


def test_a_correction_that_was_made_and_is_rejected_now_is_a_difference() -> None:
    history = Recorded(replace(PLAN, value_init="layer"), max_steps="0")
    history.correct("a", (0, 0), 1)
    found = str(history.reproduced().report.first_difference)
    assert found.startswith("delta 2 (feedback 'a', offset 0): it is rejected now: no value was found in 0 steps; ")


def test_what_a_fenced_editor_left_in_the_log_changes_nothing() -> None:
    """It has decided on the same feedback, in a term and under a plan of its own."""
    history = Recorded()
    history.correct("a", (0, 0), 1)
    history.correct("b", (0, 0.5), 1)
    fenced = copy.deepcopy(history)
    fenced.lead(replace(PLAN, policy="paper", radius=9.0), threads="3")
    fenced.correct("c", (0.9, 0), 3)
    fenced.undo("d", "a")
    assert fenced.correct("e", (9, 9), 7).status == "rejected"
    left = fenced.deltas[-3:]
    history.lead(PLAN)
    history.lead(PLAN)
    for record in left:
        history.correct(f"f{len(history.deltas)}", (0.9, len(history.deltas)), 2)
        assert history.engine.apply(record) is None
        history.deltas.append(record)
    history.undo("u", "b")
    history.edits.append(fenced.edits[-1])
    reproduced = history.reproduced()
    assert reproduced.records == [record for record in history.deltas if record not in left]
    assert reproduced.report.first_difference is None
    assert reproduced.report.decisions == reproduced.report.same_records == 6


def test_other_versions_are_named() -> None:
    history = Recorded(torch="1.0.0", unknown="x")
    history.correct("a", (0, 0), 1)
    torch_now = describe_environment(history.engine.model, PLAN)["torch"]
    assert history.reproduced().report.other_environment == {"torch": ("1.0.0", torch_now)}


def test_a_term_is_decided_with_as_many_threads_as_its_editor_had() -> None:
    history = Recorded(threads="3")
    history.correct("a", (0, 0), 1)
    own = torch.get_num_threads()
    try:
        reproduced = history.reproduced()
        assert torch.get_num_threads() == 3 != own
    finally:
        torch.set_num_threads(own)
    assert reproduced.report.other_environment == {}


def test_the_plan_of_a_term_is_read_back_from_its_lead_delta(history: Recorded) -> None:
    environment = delta_at(history, 1).environment
    assert environment is not UNSET
    assert edit_config_from_lead(environment) == PLAN
    assert edit_config_from_lead({}) == replace(EditConfig(), train_prompt_forms=False, check_wording=False), (
        "it is of an editor that had neither"
    )
    earlier = {
        "policy": "paper", "radius": "0.5", "scope_radius": "True", "scope_alpha": "0.1", "guard": "False",
        "wording": "True", "traffic": "64", "init": "label", "forms": "True", "margin": "1.5", "max_steps": "7",
    }  # fmt: skip
    recipe = ValueTrainingConfig(max_steps=7, stop_margin=1.5)
    assert edit_config_from_lead(earlier) == EditConfig(
        policy="paper", radius=0.5, use_scope_radius=True, scope_error_rate=0.1, retention_guard=False,
        check_wording=True, traffic_sample_size=64, value_init="label", train_prompt_forms=True, recipe=recipe,
    )  # fmt: skip
    with pytest.raises(HistoryError, match="the configuration in a lead delta cannot be read"):
        edit_config_from_lead({"radius": "wide"})


def test_feedback_that_is_gone_is_a_fault(history: Recorded) -> None:
    del history.feedback[1]
    with pytest.raises(HistoryError, match="the feedback behind delta 3 is not there"):
        history.reproduced()


def test_another_model_is_a_fault(history: Recorded) -> None:
    history.rewrite(1, model="0" * 64)
    with pytest.raises(HistoryError, match="the history is of model 000000000000"):
        history.reproduced()
