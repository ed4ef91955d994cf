"""The words with which the demo explains its numbers."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from gracestream.deploy.demo.cases import DemoCase, load_script
from gracestream.deploy.demo.story import MAX_ANSWER_WIDTH, _answers_table, _describe_answers, _explain_statuses
from gracestream.schemas.messages import Inputs


@pytest.mark.parametrize(("model", "name"), [("smollm2", "facts"), ("intent", "routes")])
def test_it_counts_wrong_cases_and_names_the_other_requests(model: str, name: str) -> None:
    script = load_script(model)
    control, few = _describe_answers(script, script.cases[:6])
    assert f"{len(script.cases)} ask for {name}; {len(script.controls)} are a control" in control
    assert few == f"  6 of {len(script.cases)} {name} are wrong:"
    assert _describe_answers(script, script.cases[:7])[1].endswith(" are wrong, for example:")


def test_a_long_answer_ends_with_an_ellipsis_and_a_short_one_is_whole() -> None:
    cases = [DemoCase(text, "target", ()) for text in ("long", "short", "exact")]
    answers: dict[Inputs, str] = {"long": "word " * 20, "short": "a [b] [/]", "exact": "x" * MAX_ANSWER_WIDTH}
    shown = printed(_answers_table("answer", cases, answers))
    assert ("word " * 10)[: MAX_ANSWER_WIDTH - 1] + "…" in shown
    assert "a [b] [/]" in shown
    assert "x" * MAX_ANSWER_WIDTH in shown


def test_a_table_shows_six_answers() -> None:
    cases = [DemoCase(f"prompt {number}", "target", ()) for number in range(8)]
    assert printed(_answers_table("answer", cases, {})).count("prompt") == 6


def test_each_status_that_occurs_is_explained() -> None:
    explained = _explain_statuses(["split", "added", "added"])
    assert explained == [
        "added: a new entry", "split: a new entry beside one with another target, whose radius may shrink",
    ]  # fmt: skip


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]
