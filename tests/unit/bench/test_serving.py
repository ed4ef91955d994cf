"""The benchmark of engines, on a tiny model."""

import pytest

pytest.importorskip("tests.bench.serving", exc_type=ImportError)  # needs more than the engine does

from gracestream.deploy.demo.cases import DemoCase
from gracestream.pipeline.editing.engine import EditEngine
from tests.bench import serving
from tests.bench.contenders import BenchRequest, make_request
from tests.bench.framework import Options
from tests.support.tiny_models import correct, editable, texts


def test_all_settings_have_the_rows_of_all_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EditEngine(editable("llama"), "default")
    engine.apply(engine.lead_delta({}))
    corrected, *others = texts(60, seed=5)
    assert correct(engine, "f0", corrected, "train")[0].status == "added"
    monkeypatch.setattr(serving, "questions", lambda: others)
    monkeypatch.setattr(serving, "BUDGET", 12)
    without_manager = serving._contenders(engine.model, engine.lookup)
    without_manager["transformers"] = without_manager["generate"]  # its cache wants a model of a usual size
    monkeypatch.setattr(serving, "_contenders", lambda *_: without_manager)
    cases = [DemoCase(corrected, "train", ())]
    rows = {row.name: row for row in serving.serving_rows(engine.model, engine.lookup, cases, Options(quick=True))}
    settings = [f"serving/smollm2/{name}" for name in ("equal-budgets", "own-budgets", "load-0.5")]
    for setting in settings:
        for contender in ("continuous", "batch", "bare", "generate"):
            assert all(rows[f"{setting}/{contender}/{metric}"].value > 0 for metric in ("cpu", "p50", "p99"))
    assert all(
        rows[f"{setting}/{name}/correct"].value == 1 for setting in settings[:2] for name in ("continuous", "batch")
    )
    assert {name.rpartition("/")[2] for name in rows if "continuous" in name} >= {
        "of-bare",
        "of-batch",
        "short-of-batch",
    }


def test_the_clock_runs_while_requests_wait_and_jumps_where_none_does() -> None:
    engine = EditEngine(editable("llama"), "default")
    requests = [
        BenchRequest(one.prompt, one.parameters, one.batch_key, arrival)
        for one, arrival in (
            (make_request(engine.model, text, max_new_tokens=3), arrival)
            for text, arrival in zip(texts(3, seed=5), (1000.0, 0.0, 1000.0), strict=True)
        )
    ]
    answered = serving._contenders(engine.model, engine.lookup)["generate"](requests)
    assert answered.seconds < 100
    assert all(0 < answered.latencies[id(one)] <= answered.seconds for one in requests)
