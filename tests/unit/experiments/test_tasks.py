"""The experiments' data: the right rows in the right order and place, and one sentence for what is wrong."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from gracestream.pipeline.experiments import data
from gracestream.pipeline.experiments.data import DataError, QuestionRow, read_rows
from gracestream.pipeline.experiments.tasks import (
    HELD_OUT_DIVISOR,
    ISSUE_AREAS,
    MAX_RETENTION_EXAMPLES,
    NUM_TRAFFIC_QUESTIONS,
    TASKS,
    ExperimentTask,
    answer_names,
    format_question,
    scotus_training,
    zsre_training,
)
from tests.support.repository import DATA

NOTHING = "nothing.jsonl.gz"


def write(folder: Path, name: str, rows: list[Any]) -> None:
    with gzip.open(folder / name, "wt", encoding="utf-8") as lines:
        lines.write("\n".join(map(json.dumps, rows)))


def case(term: int, area: int, facts: str = "facts") -> dict[str, object]:
    return {"term": term, "issue_area": area, "facts": facts, "question": "question?"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data, with questions in it."""
    monkeypatch.setenv(data.DATA_VARIABLE, str(tmp_path))
    questions = [{"question": f"what is {number}", "answer": [str(number), "other"]} for number in range(2000)]
    write(tmp_path, "nq_open_dev_3610.jsonl.gz", questions)
    return tmp_path


def test_data_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match=rf"^this needs nothing\.jsonl\.gz: it is not in {folder}$"):
        read_rows(NOTHING, QuestionRow)


def test_without_the_variable_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(data.DATA_VARIABLE, raising=False)
    with pytest.raises(DataError, match=rf"^this needs nothing\.jsonl\.gz: set {data.DATA_VARIABLE} to its folder$"):
        read_rows(NOTHING, QuestionRow)


ROW = b'{"question": "q", "answer": ["a"]}'


@pytest.mark.parametrize(
    "written",
    [
        b"not gzip",
        gzip.compress(ROW + b'\n{"question": '),
        gzip.compress(ROW)[:-9],
        gzip.compress(b'{"question": "\xff"}'),
        gzip.compress(b'{"question": "q"}'),
        gzip.compress(b'{"question": "q", "answer": []}'),
        gzip.compress(b"[]"),
    ],
    ids=[
        "not gzip",
        "not JSON",
        "cut off",
        "not UTF-8",
        "no answer",
        "no answers",
        "no object",
    ],  # gzip writes the time
)
def test_a_broken_file_is_named(folder: Path, written: bytes) -> None:
    (folder / NOTHING).write_bytes(written)
    with pytest.raises(DataError, match=rf"^{folder / NOTHING} cannot be read: "):
        read_rows(NOTHING, QuestionRow)


def test_a_question_is_asked_in_one_form() -> None:
    assert format_question(" who wrote Emma?") == "Question: who wrote Emma? Answer:"


def test_zsre_has_rephrases_and_asks_of_other_questions_what_was_retained(folder: Path) -> None:
    asked = [
        {"src": f"Who is {name}?", "rephrase": f"{name} is who?", "answers": [name, "x"], "subject": name,
         "loc": "nq question: where is it", "loc_ans": "there"}
        for name in ("a", "b", "a")
    ]  # fmt: skip
    write(folder, "zsre_700.jsonl.gz", asked)
    task = TASKS["zsre"]()
    assert [edit.example.target for edit in task.edits] == ["a", "b"]
    assert task.edits[0].example.inputs == "Question: Who is a? Answer:"
    assert task.edits[0].rephrases == ("Question: a is who? Answer:",)
    assert task.unrelated == ["Question: where is it? Answer:"]
    assert (len(task.traffic), len(task.retention)) == (NUM_TRAFFIC_QUESTIONS, MAX_RETENTION_EXAMPLES)
    assert not {example.inputs for example in task.retention} & set(task.traffic)
    assert all(example.inputs == format_question(f"what is {example.target}") for example in task.retention)


def test_of_zsre_some_questions_are_not_edited_but_taught_together_with_what_is_retained(folder: Path) -> None:
    asked = [
        {"src": f"Who is {number}?", "rephrase": f"{number}?", "answers": [str(number)], "subject": "s", "loc": "q"}
        for number in range(3 * HELD_OUT_DIVISOR)
    ]
    write(folder, "zsre_700.jsonl.gz", asked)
    task = TASKS["zsre"]()
    assert (len(task.edits), len(task.accurate)) == (3 * (HELD_OUT_DIVISOR - 1), 3)
    assert not {edit.example for edit in task.edits} & set(task.accurate)
    assert zsre_training() == [*task.retention, *task.accurate]


def test_names_are_all_answers_that_are_given_first(folder: Path) -> None:
    rows = [
        {"src": "q", "rephrase": "r", "answers": given, "subject": "s", "loc": "l"} for given in (["b", "c"], ["a"])
    ]
    write(folder, "zsre_700.jsonl.gz", rows)
    write(folder, "nq_open_dev_3610.jsonl.gz", [{"question": "q", "answer": [name]} for name in ("a", "d", " ")])
    assert answer_names() == ["b", "a", "d"]


def test_text_from_the_web_is_cut_between_words(folder: Path) -> None:
    cut = [
        ("the old map, historica", "l print or pl"),
        ("the old map", " or plan of i"),
        ("the old map ", "or plan of it"),
    ]
    rows = [
        {
            "prompt": f"{number}",
            "target_new": "t",
            "subject": "s",
            "locality_prompt": begun,
            "locality_ground_truth": rest,
        }
        for number, (begun, rest) in enumerate([*cut, ("histo", "rical"), ("map", "s x")])
    ]
    write(folder, "hallucination_edit_450.jsonl.gz", rows)
    write(folder, "hallucination_other_306.jsonl.gz", rows[:1])
    retained = [(one.inputs, one.target) for one in TASKS["hallucination"]().retention]
    assert retained == [("the old map,", "historical print or"), *[("the old map", "or plan of")] * 2]


def test_what_has_no_target_is_not_edited_and_what_is_edited_is_not_unrelated(folder: Path) -> None:
    rows = [
        {"prompt": prompt, "target_new": target, "rephrase_prompt": "r", "subject": "s", "locality_prompt": other}
        for prompt, target, other in (("A is", "b", "C is"), ("C is", "d", "E is"), ("F is", " ", "E is"))
    ]
    write(folder, "counterfact_val_1919.jsonl.gz", rows)
    task = TASKS["counterfact"]()
    assert [edit.example.inputs for edit in task.edits] == ["A is", "C is"]
    assert task.unrelated == ["E is"]


def test_scotus_is_edited_in_the_order_of_its_terms_and_relabels_what_it_trains_on_alone(folder: Path) -> None:
    first_amendment = ISSUE_AREAS.index("First Amendment") + 1
    terms = [2009, 1946, 1982, 1983, 1990, 1991, 1991]
    write(
        folder,
        "scotus_facts_to_2009.jsonl.gz",
        [case(term, first_amendment, str(row)) for row, term in enumerate(terms)],
    )
    task = TASKS["scotus"]()
    assert [edit.example.inputs for edit in task.edits] == ["5 question?", "6 question?", "0 question?"]
    assert {edit.example.target for edit in task.edits} == {"First Amendment"}
    assert [(example.inputs, example.target) for example in task.retention] == [
        ("3 question?", "Civil Rights"), ("4 question?", "Civil Rights"),
    ]  # fmt: skip
    assert task.traffic == ["1 question?", "2 question?"]
    assert [(example.inputs, example.target) for example in scotus_training()] == [
        ("1 question?", "Civil Rights"), ("2 question?", "Civil Rights"),
    ]  # fmt: skip


@pytest.mark.skipif(not DATA.is_dir(), reason="the experiments' data are not on this machine")
@pytest.mark.parametrize("name", TASKS)
class TestRealData:
    @pytest.fixture
    def task(self, name: str, monkeypatch: pytest.MonkeyPatch) -> ExperimentTask:
        monkeypatch.setenv(data.DATA_VARIABLE, str(DATA))
        return TASKS[name]()

    def test_no_edit_is_among_what_must_stay(self, task: ExperimentTask) -> None:
        edited = {edit.example.inputs for edit in task.edits}
        assert len(edited) == len(task.edits) >= 450
        for others in (task.traffic, task.unrelated, [example.inputs for example in task.retention]):
            assert not edited & set(others)
        assert not set(task.traffic) & {example.inputs for example in task.retention}

    def test_nothing_is_empty_and_what_must_stay_is_enough_to_tell(self, task: ExperimentTask) -> None:
        examples = [*task.retention, *(edit.example for edit in task.edits)]
        assert all(example.inputs.strip() and example.target.strip() for example in examples)
        assert len(task.retention) >= 300
        assert len(task.traffic) >= 300
