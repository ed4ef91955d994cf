"""Deltas that no reader would apply must not get into the log, and unknown tokens must not reach the model."""

import math

import pytest

from gracestream.pipeline.editing import delta_builder
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.tasks.base import InputError
from tests.support.tiny_models import KINDS, MODEL, correct, editable, texts


def test_a_delta_that_no_reader_would_take_is_rejected_and_not_written() -> None:
    engine = EditEngine(editable("bert"), "default", EditConfig(radius=math.inf, radius_unit="absolute"))
    engine.apply(engine.lead_delta({}))
    before = engine.codebook.digest
    for number, target in enumerate(["wrong", "right"]):
        edited = engine.edit(make_correction(f"f{number}", PROBE_TEXTS[0], target), number)
        assert edited.outcome is not None
        if edited.outcome.status == "unchanged":
            continue
        assert edited.delta_record is None
        assert edited.outcome.status == "rejected"
        assert "no reader would take its delta" in str(edited.outcome.reason)
    assert engine.codebook.digest == before


def test_a_delta_too_large_for_the_topic_is_rejected_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_builder, "MAX_RECORD_BYTES", 100)
    engine = EditEngine(editable("bert"), "default")
    engine.apply(engine.lead_delta({}))
    outcomes = [
        engine.edit(make_correction(f"f{n}", PROBE_TEXTS[0], target), n) for n, target in enumerate(["wrong", "right"])
    ]
    assert all(edited.delta_record is None for edited in outcomes)
    assert any("bytes; 100 are allowed" in str(edited.outcome and edited.outcome.reason) for edited in outcomes)


def test_no_radius_beyond_the_limit_is_written() -> None:
    model = editable("bert")
    free, bound = (EditEngine(model, "default", EditConfig(max_radius=limit)) for limit in (math.inf, 0.25))
    for engine in (free, bound):
        engine.apply(engine.lead_delta({}))
        for number, text in enumerate(texts(12, seed=4)):
            for target in ("wrong", "right"):
                correct(engine, f"f{number}-{target}", text, target, number)
    assert free.codebook.radii_N.max() > 0.25
    assert 0 < bound.codebook.radii_N.max() <= 0.25


def test_a_token_without_a_row_in_the_model_is_rejected_before_the_model_runs() -> None:
    names = editable("llama").task.tokenizer
    names.add_tokens(["unheard"])
    model = EditableModel(KINDS["llama"].build(), names, KINDS["llama"].layer, fingerprint=MODEL)
    with pytest.raises(InputError, match="is unknown to the model"):
        model.task.tokenize("unheard")


def test_replicas_that_query_or_replace_other_tokens_do_not_share_a_codebook() -> None:
    fingerprints = {
        editable("bert").fingerprint,
        editable("bert", query="mean").fingerprint,
        editable("bert", replace="last").fingerprint,
        editable("bert", query="mean", replace="last").fingerprint,
    }
    assert len(fingerprints) == 4
