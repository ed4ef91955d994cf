"""What `send`, `correct` and `undo` show: replies in the order of what was sent, and what was sent beside them."""

import io
import json
from collections.abc import Callable, Collection
from typing import Any

import pytest
from rich.console import Console

from gracestream.pipeline.client import SignedFeedback
from gracestream.schemas.messages import AppliedEdit, Feedback, Outcome, Outputs, Prediction, Request, encode
from gracestream.workers.cli.send_and_wait import SentMessage, _is_failure, _print_replies, _replies_table

SERVED: dict[str, Any] = {"v": 1, "codebook_seq": 3, "term": 1, "model": "m", "replica": "r", "latency_ms": 1.0}


def answer(request_id: str, **fields: Any) -> Prediction:
    return Prediction(request_id=request_id, **{"outputs": Outputs(text=f"to {request_id}"), **SERVED, **fields})


class Coming:
    """Replies in the order in which they come; an exception among them is raised."""

    def __init__(self, *replies: Any) -> None:
        self.replies = replies

    def wait(self, _ids: Collection[str], _timeout: float, on_reply: Callable[[Any], None]) -> None:
        for reply in self.replies:
            if isinstance(reply, BaseException):
                raise reply
            on_reply(reply)


def printed_ids(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [json.loads(line)["request_id"] for line in capsys.readouterr().out.splitlines()]


def test_lines_are_in_the_order_of_what_was_sent(capsys: pytest.CaptureFixture[str]) -> None:
    coming: Any = Coming(*(answer(name) for name in "cabed"))
    assert _print_replies(coming, list("abcde"), 1).keys() == set("abcde")
    assert printed_ids(capsys) == list("abcde")


def test_a_line_waits_for_those_before_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    class Watched(Coming):
        def wait(self, _ids: Collection[str], _timeout: float, on_reply: Callable[[Any], None]) -> None:
            for reply in self.replies:
                on_reply(reply)
                seen.append(printed_ids(capsys))

    coming: Any = Watched(answer("b"), answer("a"), answer("c"))
    _print_replies(coming, list("abc"), 1)
    assert seen == [[], ["a", "b"], ["c"]]


@pytest.mark.parametrize("end", [[], [KeyboardInterrupt()]], ids=["time is up", "ctrl-c"])
def test_what_came_is_told_though_some_before_it_did_not(
    capsys: pytest.CaptureFixture[str], end: list[BaseException]
) -> None:
    coming: Any = Coming(answer("d"), answer("b"), *end)
    if end:
        with pytest.raises(KeyboardInterrupt):
            _print_replies(coming, list("abcd"), 1)
    else:
        _print_replies(coming, list("abcd"), 1)
    assert printed_ids(capsys) == ["b", "d"]


def test_a_line_is_the_whole_reply(capsys: pytest.CaptureFixture[str]) -> None:
    whole = answer("a", edit=AppliedEdit(entry_id="e", distance=0.1, radius=0.5))
    coming: Any = Coming(whole)
    _print_replies(coming, ["a"], 1)
    assert json.loads(capsys.readouterr().out) == json.loads(encode(whole))


def cells(messages: list[SentMessage], *replies: Prediction | Outcome) -> list[list[str]]:
    """The table's rows, the names of its columns first."""
    by_id = {reply.request_id if isinstance(reply, Prediction) else reply.feedback_id: reply for reply in replies}
    console = Console(file=io.StringIO(), width=500)
    console.print(_replies_table(messages, by_id))
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]
        for line in shown[1::2][:1] + shown[3:-1]
    ]


def question(name: str, inputs: Any) -> Request:
    return Request(v=1, request_id=name, inputs=inputs)


def test_answers_stand_beside_their_inputs() -> None:
    sent: list[SentMessage] = [
        question("a", "who?"),
        question("b", ("[one]", "two\x1b[2J")),
        question("c", "x"),
        question("d", "y"),
    ]
    edited = answer("b", outputs=Outputs(label="yes"), edit=AppliedEdit(entry_id="e", distance=0.1, radius=0.5))
    failed = Prediction(request_id="c", error="too long", **SERVED)
    assert cells(sent, failed, edited, answer("a")) == [
        ["inputs", "answer", "entry"],
        ["who?", "to a", ""],
        [r"[one] | two\x1b[2J", "yes", "e"],
        ["x", "error: too long", ""],
        ["y", "no reply", ""],
    ]
    assert [_is_failure(reply) for reply in (failed, edited)] == [True, False]


def test_outcomes_stand_beside_what_was_flagged_or_taken_back() -> None:
    correction = Feedback(v=1, feedback_id="f", inputs="who?", target="me")
    signed = SignedFeedback("s", encode(Feedback(v=1, feedback_id="s", inputs="what?", target="this")))
    added = Outcome(v=1, feedback_id="f", status="added", seq=4)
    rejected = Outcome(v=1, feedback_id="s", status="rejected", reason="it is not signed")
    assert cells([correction, signed], rejected, added) == [
        ["inputs", "target", "feedback", "outcome", "delta"],
        ["who?", "me", "f", "added", "4"],
        ["what?", "this", "s", "rejected: it is not signed", ""],
    ]
    undos: list[SentMessage] = [
        Feedback(v=1, feedback_id="u", undo="f"),
        Feedback(v=1, feedback_id="w", undo_author="ann"),
    ]
    undone = Outcome(v=1, feedback_id="u", status="undone", seq=5)
    assert cells(undos, undone) == [
        ["undoes", "feedback", "outcome", "delta"],
        ["f", "u", "undone", "5"],
        ["all by ann", "w", "no reply", ""],
    ]
    assert [_is_failure(reply) for reply in (added, rejected, undone)] == [False, True, False]
