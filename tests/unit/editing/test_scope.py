"""With an encoder each correction has a radius of its own, which its delta records."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gracestream.pipeline.editing.config import EditConfig, edit_config_from_lead
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.negatives import other_requests, radius_from_distances
from gracestream.pipeline.editing.provenance import describe_environment
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.reproduction.reproduce import ReproductionRun
from gracestream.schemas.deltas import Delta, decode_delta
from gracestream.schemas.messages import Inputs
from tests.support.editing_stories import Story
from tests.support.tiny_encoder import chat, encoder
from tests.support.tiny_models import CHAT, CODEBOOK, WORDS, editable, texts

PLAN = EditConfig(radius=1.0, radius_unit="absolute", traffic_sample_size=0, use_scope_radius=True)
ASKED, OTHER = "What language do people speak in Brazil?", "Which planet has the most moons?"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts for which a radius was computed."""
    found: list[str] = []

    def noted(text: str, count: int) -> list[str]:
        found.append(text)
        return other_requests(text, count)

    monkeypatch.setattr("gracestream.pipeline.editing.negatives.other_requests", noted)
    return found


def new_story(plan: EditConfig = PLAN, kind: str = "llama", **adaptor: Any) -> Story:
    model = editable(kind, chat_template=CHAT if kind == "llama" else None, **({"encoder": encoder()} | adaptor))
    made = Story(EditEngine(model, CODEBOOK, plan))
    made.lead(plan)
    return made


def radii(made: Story) -> dict[str, float]:
    """The initial radius that each decision recorded."""
    causes = [delta.cause for delta in map(decode_delta, made.deltas) if isinstance(delta, Delta)]
    return {one.feedback_id: one.context.radius for one in causes if one and one.context}


def own_radius(made: Story, text: str) -> float | None:
    """As the rule says, of one prompt at a time."""
    queries = [
        made.engine.model.queries([made.engine.model.task.tokenize(one)])[0] for one in [text, *other_requests(text)]
    ]
    query_D, *others = (one.numpy().astype(np.float64) for one in queries)
    return radius_from_distances(
        [float(np.linalg.norm(other_D - query_D)) for other_D in others], PLAN.scope_error_rate
    )


def test_the_radius_is_the_corrections_own_and_no_larger_than_the_plans() -> None:
    made, bounded = new_story(), new_story(replace(PLAN, radius=0.01))
    for one in (made, bounded):
        assert one.take(make_correction("a", ASKED, WORDS[7])).status == "added"
    own = own_radius(made, ASKED)
    assert own is not None
    assert own < PLAN.radius
    assert radii(made) == {"a": pytest.approx(own, abs=1e-5)}
    assert made.engine.codebook.radii_N.tolist() == pytest.approx([own], abs=1e-5)
    assert radii(bounded) == {"a": 0.01}


@pytest.mark.parametrize(
    ("inputs", "plan", "kind", "adaptor"),
    [
        (ASKED, replace(PLAN, use_scope_radius=False), "llama", {}),
        (ASKED, replace(PLAN, policy="paper"), "llama", {}),
        (ASKED, PLAN, "llama", {"encoder": None}),
        (ASKED, PLAN, "bert", {}),
        ("the", PLAN, "llama", {}),
        (chat(OTHER, WORDS[3], ASKED), PLAN, "llama", {}),
    ],
    ids=["off", "paper", "no encoder", "classifier", "no subject", "chat that goes on"],
)
def test_else_the_plans_radius_stays(inputs: Inputs, plan: EditConfig, kind: str, adaptor: dict[str, Any]) -> None:
    made = new_story(plan, kind, **adaptor)
    for target in ("right", "both") if kind == "bert" else (WORDS[7],):
        made.take(make_correction(f"to {target}", inputs, target))
    assert set(radii(made).values()) == {PLAN.radius}


def test_a_chat_has_the_radius_of_its_last_message() -> None:
    made, of_chat = new_story(), new_story()
    made.take(make_correction("a", ASKED, WORDS[7]))
    of_chat.take(make_correction("a", chat(ASKED, system=OTHER), WORDS[7]))
    assert radii(of_chat)["a"] == pytest.approx(radii(made)["a"], abs=0.02)  # marks differ


def test_an_undo_uses_the_recorded_radius_and_computes_none(asked: list[str]) -> None:
    made = new_story()
    assert made.take(make_correction("a", ASKED, WORDS[7])).status == "added"
    assert made.take(make_correction("b", ASKED, WORDS[9])).status == "replaced"
    made.take(make_correction("c", OTHER, WORDS[11]))
    assert asked == [ASKED, OTHER]
    before = radii(made)
    assert before["a"] == before["b"]
    made.undo("u", "a")
    assert "b" in decode_delta(made.deltas[-1]).decided
    alone = new_story()
    alone.take(make_correction("b", ASKED, WORDS[9]))
    assert len(asked) == 3
    kept = dict(zip(made.engine.codebook.entry_ids, made.engine.codebook.radii_N.tolist(), strict=True))
    assert kept["b"] == alone.engine.codebook.radii_N.tolist()[0]


def test_a_history_trained_anew_is_the_same_with_what_was_recorded(asked: list[str]) -> None:
    made = new_story()
    for number, text in enumerate([ASKED, OTHER, *texts(3, seed=5), ASKED]):
        made.take(make_correction(f"f{number}", text, WORDS[7 + number]))
    made.undo("u", "f1")
    asked.clear()
    again = ReproductionRun(
        made.engine.model, dict(enumerate(made.feedback)),
        lambda plan: describe_environment(made.engine.model, plan), [],
    )  # fmt: skip
    assert all(map(again.reproduce, made.deltas))
    assert again.records == made.deltas
    assert again.report.first_difference is None
    assert not asked
    environment_of_term = decode_delta(made.deltas[0]).environment
    assert isinstance(environment_of_term, dict)
    assert edit_config_from_lead(environment_of_term) == PLAN


def test_a_value_trained_ahead_has_its_radius_computed_once(asked: list[str]) -> None:
    together, alone = new_story(), new_story()
    waiting = [(make_correction(f"f{number}", text, WORDS[7])) for number, text in enumerate((ASKED, OTHER))]
    ahead = together.engine.draft_values([(one, at) for at, one in enumerate(waiting)])
    assert len(ahead) == 2
    for at, one in enumerate(waiting):
        edited = together.engine.edit(one, at, None, ahead[at])
        assert edited.delta_record is not None
        together.apply(edited.delta_record)
    assert asked == [ASKED, OTHER]
    for one in waiting:
        alone.take(one)
    assert radii(together) == radii(alone)


def test_no_other_radius_grows_for_a_correction_beyond_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two with one target the later lies outside its own radius around the earlier: both have a key."""
    model = editable("llama", encoder=encoder())
    key_D, query_D = (model.queries([model.task.tokenize(text)])[0] for text in (ASKED, OTHER))
    apart = float((key_D - query_D).norm())
    for own, keys in ((0.6 * apart, ["a", "b"]), (1.1 * apart, ["a"])):
        monkeypatch.setattr("gracestream.pipeline.editing.scope.scope_radius", lambda *_, own=own: own)
        made = new_story(replace(PLAN, check_wording=False))
        made.take(make_correction("a", ASKED, WORDS[9]))
        made.take(make_correction("b", OTHER, WORDS[9]))
        assert made.engine.codebook.entry_ids == keys
