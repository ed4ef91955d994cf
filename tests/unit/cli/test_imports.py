"""`import`: what other tools export, and what becomes of it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gracestream.pipeline.client import build_feedback
from gracestream.pipeline.imports import ExportError, FieldNames, Source, read_export
from gracestream.workers.cli.app import app

Import = Callable[..., list[dict[str, Any]]]

DATASET_ITEM = {
    "id": "a1b2", "status": "ACTIVE", "input": "Where is the bank?", "expectedOutput": "By the river.",
    "metadata": None, "sourceTraceId": "trace-7", "sourceObservationId": None, "datasetId": "d", "datasetName": "fixes",
    "createdAt": "2026-11-01T10:00:00Z", "updatedAt": "2026-11-01T10:00:00Z",
}  # fmt: skip
"""An item as Langfuse's API gives it."""

TASK = {
    "id": 17, "project": 3, "created_at": "2026-11-01T10:00:00Z", "data": {"text": "Where is the bank?"},
    "annotations": [
        {
            "id": 1001, "completed_by": {"id": 4, "email": "ann@example.com"}, "was_cancelled": False,
            "result": [
                {
                    "id": "x", "from_name": "answer", "to_name": "text", "type": "textarea",
                    "value": {"text": ["By the river."]},
                }
            ],
        }
    ],
}  # fmt: skip
"""A task as Label Studio exports it as JSON."""


@pytest.fixture
def imported(tmp_path: Path) -> Import:
    """Returns the fields of the items of a file that are not left out; each is valid feedback."""

    def read(source: Source, text: str | bytes, name: str = "export.json", **names: str) -> list[dict[str, Any]]:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        found = [dict(item.fields) for item in read_export(path, source, FieldNames(**names)) if not item.left_out]
        for fields in found:
            build_feedback(fields)
        return found

    return read


def changed(item: dict[str, Any], **fields: Any) -> str:
    return json.dumps([item | fields])


class own_id(str):  # noqa: N801 - used as a function
    """Equal to an id that begins with this one, and goes on with a digest of the content."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and re.fullmatch(f"{re.escape(self)}-[0-9a-f]{{16}}", other) is not None


class TestCsv:
    def test_each_row_is_a_correction(self, imported: Import) -> None:
        text = 'id,inputs,target,author,note,request_id,rephrases\n7,"a, b",c,ann,why,r1,"d\ne"\n,f,g,,,,\n'
        first, second = imported("csv", text)
        assert first == {
            "feedback_id": own_id("csv-7"), "inputs": "a, b", "target": "c", "author": "ann", "note": "why",
            "request_id": "r1", "rephrases": ["d", "e"],
        }  # fmt: skip
        assert (second["inputs"], second["target"]) == ("f", "g")

    def test_a_row_without_an_id_is_known_by_its_content_wherever_it_stands(self, imported: Import) -> None:
        one, two = imported("csv", "inputs,target\na,b\nc,d\n")
        moved = imported("csv", "inputs,target\nc,d\na,b\n")
        assert [two, one] == moved
        assert one["feedback_id"] != two["feedback_id"]

    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    @pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"])
    def test_spreadsheets_use_other_delimiters_and_marks(self, imported: Import, delimiter: str, begin: bytes) -> None:
        text = f"inputs{delimiter}target\r\nété?{delimiter}summer\r\n".encode()
        assert imported("csv", begin + text)[0]["inputs"] == "été?"

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("prompt,target\na,b\n", "no column 'inputs'"), ("inputs,target,x\na,b,c\n", "'x', which is unknown"),
            ("inputs,target\na\n", "line 2: it has not as many cells"), ("inputs,target\na,b,c\n", "line 2"),
            ('inputs,target\n"a,b\n', "line"), ("", "no column 'inputs'"), (b"inputs,target\n\xff,b\n", "not UTF-8"),
        ],
    )  # fmt: skip
    def test_a_fault_names_its_place(self, imported: Import, text: str | bytes, fault: str) -> None:
        with pytest.raises(ExportError, match=fault):
            imported("csv", text)

    def test_a_changed_row_is_another_correction(self, imported: Import) -> None:
        ids = {imported("csv", f"id,inputs,target\n7,a,{target}\n")[0]["feedback_id"] for target in ("b", "b", "c")}
        assert len(ids) == 2

    def test_a_row_without_a_target_is_left_out(self, imported: Import) -> None:
        assert len(imported("csv", "inputs,target\na,\nb,c\n")) == 1


class TestLangfuse:
    @pytest.mark.parametrize(
        "text",
        [
            json.dumps([DATASET_ITEM]), json.dumps({"data": [DATASET_ITEM], "meta": {"page": 1}}),
            json.dumps(DATASET_ITEM) + "\n" + "\n", json.dumps(DATASET_ITEM),
        ],
    )  # fmt: skip
    def test_an_item_of_a_dataset_is_a_correction(self, imported: Import, text: str) -> None:
        assert imported("langfuse", text) == [
            {
                "feedback_id": own_id("langfuse-a1b2"), "inputs": "Where is the bank?", "target": "By the river.",
                "note": "Langfuse trace trace-7",
            }
        ]  # fmt: skip

    def test_a_csv_export_holds_json_in_its_cells(self, imported: Import) -> None:
        text = 'id,input,expected_output,source_trace_id\na1,"""Where?""","""Here.""",t1\na2,Who?,42,\n'
        first, second = imported("langfuse", text, "export.csv")
        assert (first["inputs"], first["target"]) == ("Where?", "Here.")
        assert (second["inputs"], second["target"]) == ("Who?", "42")

    @pytest.mark.parametrize("wrapped", [True, False])
    def test_messages_become_a_chat(self, imported: Import, wrapped: bool) -> None:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?", "name": "x"}]
        given = {"messages": messages, "temperature": "0"} if wrapped else messages
        (found,) = imported(
            "langfuse", changed(DATASET_ITEM, input=given, expectedOutput={"role": "assistant", "content": "So."})
        )
        assert found["inputs"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
        assert found["target"] == "So."

    def test_fields_of_objects_are_named_where_there_are_several(self, imported: Import) -> None:
        text = changed(
            DATASET_ITEM, input={"question": "Why?", "user": "u"}, expectedOutput={"answer": "So.", "by": "x"}
        )
        with pytest.raises(ExportError, match="it has 2 texts \\(question, user\\); name one with --inputs-field"):
            imported("langfuse", text)
        (found,) = imported("langfuse", text, inputs="question", target="answer")
        assert (found["inputs"], found["target"]) == ("Why?", "So.")
        (found,) = imported("langfuse", changed(DATASET_ITEM, input={"question": "Why?"}, expectedOutput={"a": "So."}))
        assert (found["inputs"], found["target"]) == ("Why?", "So.")

    @pytest.mark.parametrize("fields", [{"status": "ARCHIVED"}, {"expectedOutput": None}, {"expectedOutput": ""}])
    def test_items_without_an_answer_are_left_out(self, imported: Import, fields: dict[str, Any]) -> None:
        assert imported("langfuse", changed(DATASET_ITEM, **fields)) == []

    @pytest.mark.parametrize(
        "fields",
        [{"id": None}, {"input": 7}, {"input": [{"text": "x"}]}, {"expectedOutput": 7}, {"expectedOutput": []}],
    )
    def test_a_fault_names_its_place(self, imported: Import, fields: dict[str, Any]) -> None:
        with pytest.raises(ExportError, match="item 1"):
            imported("langfuse", changed(DATASET_ITEM, **fields))

    @pytest.mark.parametrize("text", ["7", '"text"', "[7]", "not json", '{"a": 1}\nnot json'])
    def test_another_file_is_an_error(self, imported: Import, text: str) -> None:
        with pytest.raises(ExportError):
            imported("langfuse", text)


class TestLabelStudio:
    def test_each_annotation_is_a_correction(self, imported: Import) -> None:
        assert imported("label-studio", json.dumps([TASK])) == [
            {
                "feedback_id": own_id("label-studio-17-1001"), "inputs": "Where is the bank?",
                "target": "By the river.", "author": "ann@example.com",
            }
        ]  # fmt: skip

    def test_a_choice_is_a_label(self, imported: Import) -> None:
        result = [{"from_name": "intent", "to_name": "text", "type": "choices", "value": {"choices": ["lost_card"]}}]
        (found,) = imported("label-studio", changed(TASK, annotations=[{"id": 1, "completed_by": 4, "result": result}]))
        assert found["target"] == "lost_card"
        assert "author" not in found  # a number names nobody here

    def test_several_controls_need_a_name(self, imported: Import) -> None:
        results = [{"from_name": name, "type": "textarea", "value": {"text": [name]}} for name in ("answer", "comment")]
        text = changed(TASK, annotations=[{"id": 1, "result": results}])
        with pytest.raises(ExportError, match="several answers \\(answer, comment\\)"):
            imported("label-studio", text)
        assert imported("label-studio", text, target="answer")[0]["target"] == "answer"

    @pytest.mark.parametrize(
        "annotations", [[], [{"id": 1, "was_cancelled": True, "result": []}], [{"id": 1, "result": []}]]
    )
    def test_tasks_without_an_answer_are_left_out(self, imported: Import, annotations: list[Any]) -> None:
        assert imported("label-studio", changed(TASK, annotations=annotations)) == []

    @pytest.mark.parametrize("value", [{"text": []}, {"text": ["a", "b"]}, {}, {"text": [7]}])
    def test_an_answer_that_is_not_one_text_is_an_error(self, imported: Import, value: dict[str, Any]) -> None:
        result = [{"from_name": "answer", "type": "textarea", "value": value}]
        with pytest.raises(ExportError, match="answer has not exactly one answer"):
            imported("label-studio", changed(TASK, annotations=[{"id": 1, "result": result}]))

    def test_another_file_is_an_error(self, imported: Import) -> None:
        with pytest.raises(ExportError, match="no task of Label Studio"):
            imported("label-studio", json.dumps([DATASET_ITEM]))


def test_the_command_prints_lines_for_correct_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    path.write_text(json.dumps([DATASET_ITEM, DATASET_ITEM | {"id": "x", "expectedOutput": None}]))
    done = CliRunner().invoke(app, ["import", "langfuse", str(path), "--author", "bob"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["author"] == "bob"
    assert "1 correction; 1 left out: it has no expected output" in done.stderr


def test_the_command_prints_equal_rows_once(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    path.write_text("inputs,target\na,b\na,b\na,c\n")
    done = CliRunner().invoke(app, ["import", "csv", str(path)])
    assert [json.loads(line)["target"] for line in done.stdout.splitlines()] == ["b", "c"]
    assert "2 corrections; 1 left out: it is in the file twice" in done.stderr


def test_the_command_prints_nothing_if_one_item_is_no_feedback(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    path.write_text("inputs,target,rephrases\na,b,\nc,d,c\n")
    done = CliRunner().invoke(app, ["import", "csv", str(path)])
    assert isinstance(done.exception, ExportError)
    assert "line 3" in str(done.exception)
    assert done.stdout == ""
