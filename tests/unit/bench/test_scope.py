"""The benchmark of scope: forms made by rules, verdicts, labelled rows, and a small run on a tiny model."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tests.bench.scope", exc_type=ImportError)  # needs more packages than the engine

from gracestream.pipeline.codebook.lookup import FoundEntry
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.value_training import train_value
from gracestream.pipeline.experiments.data import DataError, read_rows
from gracestream.pipeline.tuning.evaluation import begins_with_target
from gracestream.pipeline.tuning.intervals import wilson_interval
from gracestream.schemas.messages import ChatMessage
from tests.bench import __main__ as command
from tests.bench import edits
from tests.bench.framework import BenchError, Options, Row, read_results, write_results
from tests.bench.page import pages
from tests.bench.scope import draw, report, streams
from tests.bench.scope.cases import Case, Correction, Part, Stream
from tests.bench.scope.forms import (
    FORMS,
    ITSELF,
    as_plain_question,
    as_statement,
    related,
    typo,
    without_punctuation,
)
from tests.bench.scope.methods import METHODS, Answer, EditedModel, UneditedAnswers
from tests.bench.scope.verdicts import repeats, verdict
from tests.support.tiny_models import CHAT, WORDS, editable, texts

POSITIVE = Case("paraphrase", "Who wrote it?", "Ann Lee", applies=True, edit=0)
NEGATIVE = replace(POSITIVE, kind="relation", applies=False)
MACHINE: dict[str, Any] = {
    "device": "cpu", "cores": 1, "cpu": "one", "threads": 1, "ram_gib": 1, "python": "3", "torch": "2",
    "transformers": "5", "faiss": "1",
}  # fmt: skip


@given(st.text())
def test_a_typo_swaps_two_adjacent_letters_of_one_word_deterministically(text: str) -> None:
    made = typo(text)
    assert made == typo(text)
    places = [place for place, (before, after) in enumerate(zip(text, made, strict=True)) if before != after]
    assert places in ([], [places[0], places[0] + 1] if places else [])
    if places:
        first, second = places
        assert (text[first], text[second]) == (made[second], made[first])
        assert first > 0
        # `str.isalpha` is too strict: superscript digits count as letters of a word here.
        assert re.fullmatch(r"[^\W\d_]{3}", text[first - 1 : second + 1])


@given(st.lists(st.sampled_from(["Where", "does", "the", "river", "begin"]), min_size=1).map(" ".join))
def test_every_text_with_a_long_word_gets_a_typo(text: str) -> None:
    assert (typo(text) != text) == any(word in text for word in ("Where", "does", "river", "begin"))


@given(st.text())
def test_without_punctuation_a_text_loses_one_character_at_most(text: str) -> None:
    stripped = text.rstrip()
    made = without_punctuation(text)
    assert made == stripped or len(made) == len(stripped) - 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Question: Who is it? Answer:", "Question: Who is it Answer:"),
        ("It is over.", "It is over"),
        ("The capital of France is", "The capital of France is"),
        ("", ""),
    ],
)
def test_the_last_question_mark_or_the_last_mark_is_removed(text: str, expected: str) -> None:
    assert without_punctuation(text) == expected


@pytest.mark.parametrize(
    ("statement", "question"),
    [
        ("The capital of Mongolia is", "What is the capital of Mongolia?"),
        ("The mother of Ann was", "What was the mother of Ann?"),
        ("Ann was born in", None),
        ("The river, which is long, is", None),
    ],
)
def test_a_statement_of_a_known_pattern_becomes_a_question_and_back(statement: str, question: str | None) -> None:
    assert as_plain_question(statement) == question
    if question is not None:
        assert as_statement(question) == statement


def test_a_question_with_a_final_preposition_becomes_no_statement() -> None:
    assert as_statement("What is the constellation that NGC 2 is a part of?") is None


def test_forms_differ_from_the_prompt_and_parts_have_different_wordings() -> None:
    correction = Correction("Question: Who is the mayor of Ulm? Answer:", "Ann", "Who is the mayor of Ulm?")
    made = {part: {kind.name: kind.texts(correction, part) for kind in FORMS} for part in get_args(Part)}
    for forms_of_part in made.values():
        assert {name: len(found) for name, found in forms_of_part.items()} == dict.fromkeys(forms_of_part, 1)
        assert all(correction.text not in found for found in forms_of_part.values())
    differing = {name for name in made["held-out"] if made["held-out"][name] != made["development"][name]}
    assert differing == {"instruction", "context"}


@pytest.mark.parametrize(
    ("answer", "target", "expected"),
    [
        ("Ann Lee", "Ann Lee", True),
        ("Ann Lee, a writer", "Ann Lee", True),
        ("Ann Leeds", "Ann Lee", False),
        ("ann lee", "Ann Lee", False),
        ("", "Ann Lee", False),
    ],
)
def test_an_answer_gives_a_target_if_it_begins_with_its_words(answer: str, target: str, expected: bool) -> None:
    assert begins_with_target(answer, target) == expected


@pytest.mark.parametrize(
    ("case", "answer", "serving", "flags"),
    [
        (POSITIVE, "Ann Lee", "Ann Lee", {"captured", "answered", "correct"}),
        (POSITIVE, "Ann Lee, who", "Ann Lee", {"captured", "answered", "broken"}),
        (POSITIVE, "Lindaiionionion", "Ann Lee", {"captured", "broken", "repeats"}),
        (POSITIVE, "Bob", "Bob", {"captured"}),
        (POSITIVE, "Nobody", "Ann Lee", {"captured"}),
        (POSITIVE, "Nobody", None, set()),
        (NEGATIVE, "Nobody", None, {"correct"}),
        (NEGATIVE, "Nobody", "Ann Lee", {"captured", "correct"}),
        (NEGATIVE, "Ann Lee", "Ann Lee", {"captured", "answered"}),
        (NEGATIVE, "Ann or so", "Ann Lee", {"captured", "broken"}),
    ],
)
def test_verdicts_on_answers(case: Case, answer: str, serving: str | None, flags: set[str]) -> None:
    found = verdict(case, answer, "Nobody", serving)
    assert {name for name in report.MEASURES if getattr(found, name)} == flags


@given(st.text(), st.text(), st.sampled_from([None, "Ann Lee", "Bob"]), st.sampled_from([POSITIVE, NEGATIVE]))
def test_only_captured_and_incorrect_answers_are_broken(
    answer: str, unedited: str, serving: str | None, case: Case
) -> None:
    found = verdict(case, answer, unedited, serving, elsewhere=True)
    assert not (found.broken and (found.correct or not found.captured))
    assert found.broken or not found.repeats
    assert found.elsewhere == found.captured


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the the the end", True),
        ("Lindaiionionion", True),
        ("New York, New York", False),
        ("1999-10-01", False),
        ("an anagram", False),
    ],
)
def test_repetition_is_a_word_or_a_group_of_letters_three_times_in_a_row(text: str, expected: bool) -> None:
    assert repeats(text) == expected


@given(st.integers(0, 300).flatmap(lambda cases: st.tuples(st.integers(0, cases), st.just(cases))))
def test_an_interval_contains_its_share_and_is_symmetric(counts: tuple[int, int]) -> None:
    successes, cases = counts
    low, high = wilson_interval(successes, cases)
    assert 0 <= low <= high <= 1
    if cases:
        assert low - 1e-9 <= successes / cases <= high + 1e-9
        assert wilson_interval(cases - successes, cases) == pytest.approx((1 - high, 1 - low))


def test_an_interval_is_wilsons() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_the_200_pairs_have_distinct_prompts_and_many_templates() -> None:
    rows = streams.pairs()
    assert len(rows) == 200
    assert len({text for row in rows for text in (row.prompt, row.other)}) == 400
    assert all(row.target and row.target == row.target.strip() for row in rows)
    kinds = Counter(row.differs for row in rows)
    assert {"year", "number", "unit", "negation", "comparative", "entity", "age group", "dose"} <= set(kinds)
    assert min(kinds.values()) >= 6
    beginnings = Counter(" ".join(row.prompt.removeprefix("Question: ").split()[:3]) for row in rows)
    assert max(beginnings.values()) <= 6


def test_the_parts_of_the_pairs_share_no_row() -> None:
    rows = [Correction(str(number), "x") for number in range(7)]
    held_out, development = (streams.every_second(rows, part) for part in get_args(Part))
    assert sorted(one.text for one in held_out + development) == [one.text for one in rows]


def test_labelled_restatements_have_the_relation_of_their_list() -> None:
    listed = streams.restatements()
    numbers = [number for some in listed.values() for number in some]
    assert len(set(numbers)) == len(numbers)
    try:
        rows = read_rows(streams.KNOWEDIT, streams.KnowEditRow)
    except DataError as error:
        pytest.skip(str(error))
    for relation, some in listed.items():
        assert {streams.relation_of(rows[number]) for number in some} == {relation}
    assert 0.1 < len(numbers) / len(rows) < 0.2  # the notes of the data say about one in ten
    assert all(rows[number].aliases for number in streams.ALIASES)


def test_streams_without_data_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRACESTREAM_DATA", str(tmp_path))
    reported: list[str] = []
    with pytest.raises(BenchError, match=r"this needs zsre_700.jsonl.gz: it is not in "):
        list(report.run(Options(quick=True, report=reported.append)))
    assert [line.partition(":")[0] for line in reported] == list(streams.STREAMS)
    with pytest.raises(BenchError, match="no stream is named 'other'; the names are zsre, "):
        next(report.run(Options(only="other")))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """A tiny model instead of the real one, and a stream of its words, with queries of the layer."""
    tokens = {"chat_template": "{% for turn in messages %}{{ turn.content }} {% endfor %}" + WORDS[0]}

    def load(_settings: object, _policy: object) -> Any:
        model = editable("llama")
        for name, value in tokens.items():
            setattr(model.task.tokenizer, name, value)
        return model

    monkeypatch.setattr(edits, "load_model", load)
    prompts = texts(60, seed=4, shortest=4)
    corrections = [
        Correction(prompt, WORDS[number + 3], prompt, {"paraphrase": (other,), "neighbour": (third,)})
        for number, (prompt, other, third) in enumerate(zip(prompts[:4], prompts[4:8], prompts[8:12], strict=True))
    ]
    kinds = (ITSELF, related("paraphrase", applies=True), *FORMS, related("neighbour", applies=False))
    cases = list(streams.make_cases(corrections, kinds, "held-out", 2))
    stream = Stream("toy", corrections, [*cases, *streams.unrelated_cases(prompts[12:20])], prompts[20:])
    by_distance = next(method for method in METHODS if method.name == "layer, distance")
    monkeypatch.setattr(report, "METHODS", (replace(by_distance, name="layer", curves=(0.5, 1.0, 3.0)),))
    monkeypatch.setattr(report, "STREAMS", {"toy": lambda *_given: stream})
    return stream


def test_a_stream_is_applied_and_reported(toy: Stream, tmp_path: Path) -> None:
    rows = list(report.run(Options(quick=True)))
    assert len({row.name for row in rows}) == len(rows)
    found = {row.name: row for row in rows}
    assert found["corrections/toy, layer/made"].value == len(toy.corrections)
    assert found["toy/layer/itself/captured"].value == 1
    assert found["toy/layer/itself/correct"] == Row(
        "toy/layer/itself/correct", 1.0, "share", 1.0, wilson_interval(4, 4)
    )
    assert found["corrections/toy, layer/same"].value == 1
    assert found["corrections/toy, layer/agrees"].value == 1
    assert found["toy/layer/surface form/cases"].value >= 8
    assert found["toy/layer/unrelated/cases"].value == 8
    assert all(row.interval is not None for row in rows if row.metric in report.MEASURES)
    for kind in ("paraphrase", "neighbour", "unrelated"):
        for method in ("layer, held", "layer, no traffic"):
            curve = [found[f"curve toy {kind}/{method}/{at:g}/captured"].value for at in (0.5, 1.0, 3.0)]
            assert curve == sorted(curve)
    path = write_results("scope", rows, MACHINE, tmp_path)
    assert read_results(path) == rows
    page = pages(tmp_path)["cpu.md"]
    assert "| layer/itself | 4 | 1.000 [0.51, 1.00] | 1.000 [0.51, 1.00] | 1.000 [0.51, 1.00] (1.000) |" in page


def test_chats_and_near_misses_are_answered_as_in_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    model = editable("llama", chat_template=CHAT)
    cached_model = edits.CachedModel(model, {})
    engine = edits.start_engine(cached_model, EditConfig(traffic_sample_size=0), [])
    text, target = texts(1, seed=4)[0], WORDS[3]
    cost = edits.apply_corrections(engine, cached_model, [edits.Fact(text, "", target)])
    edited = EditedModel(cached_model, engine, cost, UneditedAnswers())
    chat = edited.prompt(replace(POSITIVE, text=text, chat=True))
    assert chat == model.task.tokenize((ChatMessage("user", text),))
    assert chat.last_turn is not None
    prompts = [edited.prompt(replace(POSITIVE, text=text)), chat]
    assert edited.answers(prompts)[0] == Answer(target)
    monkeypatch.setattr(model.task, "matches_target", lambda *_given: False)
    assert edited.answers(prompts)[0] == Answer(edited.unedited(prompts)[0], near_miss=True)


class Answering:
    """An edited model with given answers. An entry serves the prompt `captured` and no other one."""

    def __init__(self, edited: str, unedited: str) -> None:
        self._edited, self._unedited = edited, unedited

    def prompt(self, case: Case) -> str:
        return case.text

    def serving_entries(self, prompts: list[str]) -> list[FoundEntry | None]:
        return [FoundEntry(0, "0", 0.5, 1.0) if prompt == "captured" else None for prompt in prompts]

    def answers(self, prompts: list[str]) -> list[Answer]:
        return [Answer(self._edited, near_miss=self._edited == "Nobody")] * len(prompts)

    def unedited(self, prompts: list[str]) -> list[str]:
        return [self._unedited] * len(prompts)

    def target(self, _entry: FoundEntry) -> str:
        return "Ann Lee"

    def own_entry(self, _edit: int) -> str:
        return "0"


@pytest.mark.parametrize("case", [POSITIVE, NEGATIVE])
@pytest.mark.parametrize("text", ["captured", "free"])
@pytest.mark.parametrize("edited", ["Ann Lee", "Nobody", "debris"])
@pytest.mark.parametrize("unedited", ["Ann Lee", "Nobody"])
def test_skipped_answers_change_no_verdict(case: Case, text: str, edited: str, unedited: str) -> None:
    own_case = replace(case, text=text)
    captured = text == "captured"
    answer, near_miss = (edited, edited == "Nobody") if captured else (unedited, False)
    expected = verdict(own_case, answer, unedited, "Ann Lee" if captured else None, near_miss=near_miss)
    assert expected.near_miss == near_miss
    model: Any = Answering(edited, unedited)
    assert report.judge(model, [own_case]) == [expected]


def test_development_rows_are_named_as_such(toy: Stream) -> None:
    rows = list(report.run(Options(quick=True, development=True)))
    assert {row.name.partition(" ")[0] for row in rows} == {"development"}


def test_development_rows_are_not_committed(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["scope", "--development", "--commit"]) == 2
    assert "rows of --development are not results; drop --commit" in capfd.readouterr().err


def test_the_curve_is_drawn_and_shown_on_the_page(tmp_path: Path) -> None:
    rows = [
        Row(f"curve {kind}/layer, held/{at:g}/captured", at / 4, "share", None, (at / 8, at / 3))
        for kind in ("counterfact paraphrase", "counterfact neighbour")
        for at in (1.0, 2.0)
    ]
    path = write_results("scope", rows, MACHINE, tmp_path)
    draw(read_results(path), path.with_suffix(".svg"))
    first = path.with_suffix(".svg").read_text(encoding="utf-8")
    assert "captured: counterfact neighbour" in first
    assert "![scope](scope-cpu.svg)" in pages(tmp_path)["cpu.md"]
    draw(read_results(path), path.with_suffix(".svg"))
    assert path.with_suffix(".svg").read_text(encoding="utf-8") == first
    draw([], tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_equal_training_runs_once_for_both_methods(toy: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return train_value(*given)

    monkeypatch.setattr(edits, "train_value", counted)
    monkeypatch.setattr(report, "METHODS", (METHODS[0], replace(METHODS[0], name="again")))
    list(report.run(Options(quick=True)))
    assert 0 < len(calls) <= len(toy.corrections)
