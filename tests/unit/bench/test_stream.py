"""The benchmark of long streams: the random order, the log after a kill, and small runs on a tiny model."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tests.bench.stream", exc_type=ImportError)  # needs more packages than the engine

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.experiments.data import DataError
from gracestream.schemas.deltas import EntryChange
from tests.bench.framework import BenchError, Options, Row, machine, write_results
from tests.bench.page import pages
from tests.bench.stream import corrections, edits, identity, measure, report
from tests.bench.stream.corrections import (
    AUTHORS,
    Case,
    Correction,
    Data,
    draw_authors,
    make_cases,
    select_cases,
    stream_data,
)
from tests.bench.stream.edits import STREAM_KINDS, PromptCache, Stopwatch, are_served, start_engine, to_feedback
from tests.bench.stream.identity import stream_key
from tests.bench.stream.log import CheckpointRows, LeadRecord, LoggedCorrection, StreamLog
from tests.bench.stream.undone import entries_equal
from tests.support.tiny_models import WORDS, editable, texts

TRAINED, KEYS = 6, 30


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Data:
    """A tiny model instead of the real one, with queries of the layer, and corrections of its words."""
    prompts = list(dict.fromkeys(texts(150, seed=4, shortest=5)))
    sent = [
        Correction(prompt, WORDS[number + 3], "", {"paraphrase": (other,)}, {"neighbour": (third,)})
        for number, (prompt, other, third) in enumerate(zip(prompts[:KEYS], prompts[30:], prompts[60:], strict=False))
    ]
    cases = [*make_cases(sent), *(Case("unrelated", text, None) for text in prompts[90:95])]
    data = Data(sent, cases, prompts[100:])
    monkeypatch.setenv("GRACESTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(report, "SETTINGS", {})
    monkeypatch.setattr(report, "load_model", lambda _model, _policy: editable("llama"))
    monkeypatch.setattr(report, "stream_data", lambda: data)
    monkeypatch.setattr(report, "COUNTS", {"trained": TRAINED, "keys": KEYS})
    monkeypatch.setattr(report, "CHECKPOINTS", (3,))
    return data


def logged(folder: Path, kind: str) -> tuple[list[bytes], list[tuple[str, bool, int]]]:
    """The deltas in the log of a stream, and the results of its corrections."""
    (path,) = folder.glob(f"bench/stream-*/{kind}.jsonl")
    with StreamLog(path) as log:
        return list(log.records(1000)), [(one.status, one.right, one.steps) for one in log.corrections()]


def without_cost(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not row.name.startswith("cost/") and row.metric != "seconds"]


def test_corrections_stay_in_force_and_an_undo_equals_a_history_without_them(toy: Data, tmp_path: Path) -> None:
    rows = list(report.run(Options()))
    found = {row.name: row for row in rows}
    assert len(found) == len(rows)
    for kind, count in (("trained", TRAINED), ("keys", KEYS)):
        for after in (3, count):
            assert found[f"corrections/{kind}, {after}/made"].value == after
            assert found[f"corrections/{kind}, {after}/ERR"].value == 1
            assert found[f"cases/{kind}, {after}, paraphrase/cases"].value > 0
        assert found[f"corrections/{kind}, {count}/ES"].value == 1
        assert found[f"corrections/{kind}, {count}/rejected"].value == 0
        undone = sum(author == AUTHORS[0] for author in draw_authors(count))
        assert 0 < undone < count
        assert found[f"undo/{kind}, {count}/undone"].value == undone
        assert found[f"undo/{kind}, {count}/equal"].value == 1
        left = found[f"undo/{kind}, {count}/entries"]
        assert left.value == left.baseline
        assert left.value < found[f"corrections/{kind}, {count}/entries"].value
    assert found["corrections/trained, 6/ERR, answered"].value == 1
    assert "corrections/keys, 30/ERR, answered" not in found
    assert found["cost/trained, 6/steps"].value > 0
    assert pages_of(rows, tmp_path).count("| trained, 6 |") == 3


def pages_of(rows: list[Row], folder: Path) -> str:
    write_results("stream", rows, machine("cpu"), folder)
    return pages(folder)["cpu.md"]


class KilledError(Exception):
    """Raised instead of a signal that kills the run."""


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1, 500])
def test_a_killed_run_resumes_and_gives_the_same_results(
    toy: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    whole = list(report.run(Options(only="keys")))
    expected = logged(tmp_path, "keys")
    monkeypatch.setenv("GRACESTREAM_CACHE_DIR", str(tmp_path / "other"))
    make = edits.apply_correction

    def killed(*given: Any) -> LoggedCorrection:
        if given[-1] == 11:
            raise KilledError
        return make(*given)

    monkeypatch.setattr(report, "apply_correction", killed)
    with pytest.raises(KilledError):
        list(report.run(Options(only="keys")))
    (path,) = (tmp_path / "other").glob("bench/stream-*/keys.jsonl")
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    again: list[int] = []

    def counted(*given: Any) -> LoggedCorrection:
        again.append(given[-1])
        return make(*given)

    monkeypatch.setattr(report, "apply_correction", counted)
    rows = list(report.run(Options(only="keys")))
    assert again == list(range(10 if cut else 11, KEYS))  # a cut-off correction is applied again
    assert logged(tmp_path / "other", "keys") == expected
    assert without_cost(rows) == without_cost(whole)


def test_a_complete_run_is_only_read(toy: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(report.run(Options()))
    monkeypatch.setattr(report, "start_engine", None)  # every measurement starts with it
    assert list(report.run(Options())) == rows


def test_a_longer_run_continues_a_shorter_one(toy: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "COUNTS", {"trained": 0, "keys": 5})
    list(report.run(Options(only="keys")))
    few = logged(tmp_path, "keys")
    monkeypatch.setattr(report, "COUNTS", {"trained": 0, "keys": 9})
    longer = list(report.run(Options(only="keys")))
    records, outcomes = logged(tmp_path, "keys")
    assert (records[:6], outcomes[:5]) == few
    (tmp_path / "bench").rename(tmp_path / "before")
    assert without_cost(list(report.run(Options(only="keys")))) == without_cost(longer)


def test_changed_measuring_code_measures_again_without_new_corrections(
    toy: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(report.run(Options(only="keys")))
    monkeypatch.setattr(report, "code_digest", lambda _paths: "other")
    monkeypatch.setattr(report, "apply_correction", None)  # no correction is applied
    assert without_cost(list(report.run(Options(only="keys")))) == without_cost(rows)


def test_keys_and_radii_are_the_same_with_and_without_training(toy: Data, tmp_path: Path) -> None:
    list(report.run(Options()))
    books, model = {}, editable("llama")
    for kind in ("trained", "keys"):
        books[kind] = Codebook("bench", model.fingerprint, model.layer)
        for record in logged(tmp_path, kind)[0][: TRAINED + 1]:
            books[kind].apply(record)
    trained, keys = books["trained"], books["keys"]
    assert trained.entry_ids == keys.entry_ids
    assert trained.keys_ND.tobytes() == keys.keys_ND.tobytes()
    assert trained.radii_N.tobytes() == keys.radii_N.tobytes()
    assert (trained.labels, trained.wordings) == (keys.labels, keys.wordings)
    assert trained.values_NV.tobytes() != keys.values_NV.tobytes()


def test_an_edit_without_a_serving_entry_is_not_in_force(toy: Data) -> None:
    model = editable("llama")
    plan, known = EditConfig(), PromptCache(model)
    lead_record = EditEngine(model, "bench", plan).lead_delta({})
    engine, other = (start_engine(model, plan, toy.traffic, known, lead_record) for _ in range(2))
    feedback = to_feedback(toy.corrections)[:3]
    for number, one in enumerate(feedback):
        edits.apply_correction(engine, STREAM_KINDS[1], known, one, number)
        edits.apply_correction(other, STREAM_KINDS[1], known, one, number)
    assert are_served(engine, known, feedback) == [True] * 3
    assert entries_equal(engine, other)
    engine.apply(engine.next_delta("split", entries=(EntryChange(entry_id="1", radius=0.0, wording=""),)))
    assert are_served(engine, known, feedback) == [True, False, True]
    assert not entries_equal(engine, other)


def test_a_too_long_prompt_is_rejected_at_no_cost(toy: Data) -> None:
    model = editable("llama")
    lead_record = EditEngine(model, "bench", EditConfig()).lead_delta({})
    long = Correction(" ".join(WORDS * 3), WORDS[0], "")
    for kind in STREAM_KINDS:
        engine = start_engine(model, EditConfig(), toy.traffic, PromptCache(model), lead_record)
        one = edits.apply_correction(engine, kind, PromptCache(model), to_feedback([long])[0], 0)
        assert (one.status, one.right, one.record, one.seconds) == ("rejected", False, None, {})


def test_an_unknown_stream_gives_one_sentence() -> None:
    with pytest.raises(BenchError, match="no stream is named 'other'; the names are trained, keys"):
        next(report.run(Options(only="other")))


lines = st.lists(
    st.one_of(
        st.builds(
            LoggedCorrection, st.integers(0, 9), st.text(max_size=5), st.booleans(), st.integers(0, 9), st.just({}),
            st.none() | st.binary(),
        ),
        st.builds(LeadRecord, st.binary()),
        st.builds(
            CheckpointRows, st.integers(0, 9), st.text(max_size=5), st.text(max_size=5), st.just([Row("a/b", 1, "s")])
        ),
    )
)  # fmt: skip


@given(lines, st.data())
def test_a_log_cut_anywhere_has_its_complete_lines(
    tmp_path_factory: pytest.TempPathFactory, written: list[Any], data: Any
) -> None:
    path = tmp_path_factory.mktemp("log") / "stream.jsonl"
    with StreamLog(path) as log:
        for line in written:
            log.append(line)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n")
    with StreamLog(path) as log:
        assert list(log.lines()) == written[:complete]
        log.append(LeadRecord(b"next"))
        assert list(log.lines()) == [*written[:complete], LeadRecord(b"next")]


def test_only_one_run_at_a_time_writes_a_log(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl"
    with StreamLog(path), pytest.raises(BenchError, match="another run is writing"):
        StreamLog(path)
    StreamLog(path).__exit__(None, None, None)


def test_an_unreadable_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl"
    path.write_text('{"type":"led","record":""}\n{"type":"other"}\n')
    with StreamLog(path) as log, pytest.raises(BenchError, match=r"line 2 of .* cannot be read: .*remove the file"):
        list(log.lines())


def test_other_settings_or_data_have_another_folder(toy: Data) -> None:
    model = editable("llama")
    key = stream_key(model, EditConfig(), toy)
    assert stream_key(editable("llama"), EditConfig(), replace(toy, cases=())) == key
    fewer = replace(toy, corrections=toy.corrections[1:])
    others = [(EditConfig(seed=1), toy), (EditConfig(), fewer), (EditConfig(), replace(toy, traffic=toy.traffic[1:]))]
    assert key not in {stream_key(model, plan, data) for plan, data in others}


@pytest.mark.parametrize(("other", "equal"), [("#\nx = 1\n", True), ('"""Text."""\nx = 1\n', True), ("x = 2\n", False)])
def test_the_digest_of_code_ignores_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, equal: bool
) -> None:
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "two.py").write_text(other)
    assert (identity.code_digest(["one.py"]) == identity.code_digest(["two.py"])) == equal


def test_the_files_of_the_digests_exist() -> None:
    assert len(identity.code_digest([*identity.DECIDING, *identity.MEASURING])) == 16
    for package in identity.PACKAGES:
        assert any(path.startswith(f"pipeline/{package}/") for path in identity.DECIDING)


ANN = Correction("The mother tongue of Ann Lee is", "French", "Ann Lee", {"same": ("Ann Lee speaks",)})
BOB = Correction(
    "The job of Bob is", "actor", "Bob",
    {"same": ("The mother tongue of Ann Lee is",)}, {"other": ("The job of ANN LEE's is", "The job of Carl is")},
)  # fmt: skip


def test_no_case_is_a_corrected_prompt_and_other_subjects_have_their_own_kind() -> None:
    assert sorted((case.kind, case.text, case.correction, case.applies) for case in make_cases([ANN, BOB])) == [
        ("other", "The job of Carl is", 1, False),
        ("other, corrected subject", "The job of ANN LEE's is", 1, False),
        ("same", "Ann Lee speaks", 0, True),
    ]


def test_cases_of_later_corrections_are_not_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case("a", f"{number}", number) for number in range(9)] + [Case("b", "x", None)]
    random.Random(1).shuffle(cases)
    assert sorted(case.text for case in select_cases(cases, 4)) == ["0", "1", "2", "3", "x"]
    monkeypatch.setattr(corrections, "MAX_CASES_PER_KIND", 2)
    of_four = [case for case in select_cases(cases, 4) if case.kind == "a"]
    assert of_four == [case for case in cases if case.kind == "a" and int(case.text) < 4][:2]


def test_the_order_and_the_authors_of_a_stream_do_not_depend_on_its_length() -> None:
    assert draw_authors(1000)[:100] == draw_authors(100)
    assert set(draw_authors(100)) == set(AUTHORS)
    assert measure.draw_sample(range(5), 300) == [0, 1, 2, 3, 4]
    assert measure.draw_sample(range(500), 300) == measure.draw_sample(range(500), 300)


def test_the_data_have_ten_thousand_distinct_corrections() -> None:
    try:
        data = stream_data()
    except DataError as error:
        pytest.skip(str(error))
    prompts = [one.text for one in data.corrections]
    assert len(prompts) == len(set(prompts)) >= 10_000
    assert all(one.target.strip() for one in data.corrections)
    assert not {case.text for case in data.cases} & set(prompts)
    assert not {case.text for case in data.cases if case.kind == "unrelated"} & set(data.traffic)
    kinds = {case.kind for case in select_cases(data.cases, 100)}
    assert {
        "zsRE paraphrase",
        "CounterFact paraphrase",
        "CounterFact neighbour",
        "other relation",
        "unrelated",
    } <= kinds


def test_a_stopwatch_adds_time_by_name() -> None:
    seconds = Stopwatch(editable("llama").device)
    assert seconds.measure("a", lambda: np.ones(3).sum()) == 3
    seconds.measure("a", lambda: None)
    assert set(seconds.spent) == {"a"}
    assert seconds.spent["a"] >= 0


def test_progress_reports_steps_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(report, "REPORT_INTERVAL", 0.0)
    now: Iterator[float] = iter((10.0, 12.0, 14.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    progress = report.Progress("keys", 1005, reported.append)
    for done in (1, 3, 5):
        progress.step(done)
    assert reported == [
        "keys: 1 of 1,005",
        "keys: 3 of 1,005, 1 s each, 0:16:42 left",
        "keys: 5 of 1,005, 1 s each, 0:16:40 left",
    ]
