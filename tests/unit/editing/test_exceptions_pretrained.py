"""With MiniLM's queries an exception holds for the same request in other white space and capitals, and for no other."""

from pathlib import Path

import pytest
from msgspec import UNSET

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.exceptions import decide_exception
from gracestream.pipeline.model.editable import EditableModel, ServedAnswer
from gracestream.pipeline.model.registry import KNOWN_MODELS, resolve_encoder, resolve_model
from gracestream.schemas.messages import Feedback, Parameters
from tests.support.tiny_models import CODEBOOK, correct

pytestmark = pytest.mark.model

EDITED = "What is the fee for an international transfer?"
OTHER = "How much is an international transfer within the group?"
NEAR = "How much does an international transfer cost?"


@pytest.fixture(scope="module")
def engine() -> EditEngine:
    cache = Path("~/.cache/gracestream")
    model = EditableModel.load(
        resolve_model("smollm2", cache, lambda _: None),
        KNOWN_MODELS["smollm2"].default_layer,
        device="cpu",
        cache=cache,
        encoder=resolve_encoder("minilm"),
    )
    made = EditEngine(model, CODEBOOK, EditConfig(radius=1.1, radius_unit="absolute", traffic_sample_size=0))
    made.apply(made.lead_delta({}))
    return made


def ask(engine: EditEngine, *inputs: str) -> list[ServedAnswer]:
    prompts = [engine.model.task.tokenize(text) for text in inputs]
    parameters = [Parameters(max_new_tokens=4)] * len(prompts)
    return engine.model.answer(prompts, parameters, engine.lookup)


@pytest.mark.slow
def test_it_holds_for_the_same_request_in_other_white_space_and_capitals(engine: EditEngine) -> None:
    same = [OTHER, f"{OTHER} ", f"{OTHER}\n", f" {OTHER}\n\n", OTHER.upper(), OTHER.lower()]
    assert correct(engine, "a", EDITED, "12 euros")[0].status == "added"
    assert all(served.served_by is not None for served in ask(engine, *same, NEAR, EDITED))
    edited = decide_exception(engine, Feedback(v=1, feedback_id="x", inputs=OTHER, except_from="a"), 1)
    assert edited.outcome is not None
    assert edited.outcome.status == "excepted"
    assert edited.delta_record is not None
    engine.apply(edited.delta_record)
    for served in [*ask(engine, *same), *(ask(engine, text)[0] for text in same)]:
        assert (served.served_by, served.near_miss) == (None, None)
    assert all(served.served_by is not None for served in ask(engine, NEAR, EDITED))
    for text in (EDITED, f"{EDITED}\n", EDITED.upper()):
        again = decide_exception(engine, Feedback(v=1, feedback_id="y", inputs=text, except_from="a"), 2).outcome
        assert again is not None
        assert again.status == "rejected"
        assert again.reason is not UNSET
        assert "corrected these very inputs" in again.reason
