"""Sending requests or feedback, and showing what becomes of them in the order in which they were given.

At a terminal that is a table, with what was sent beside each reply; elsewhere one JSON line for each reply, whole.
"""

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import msgspec
import typer
from msgspec import UNSET
from rich.table import Column, Table

from gracestream.pipeline.client import Client, ReplyCollector, SignedFeedback
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import Feedback, Outcome, Prediction, Request, decode, to_display_text
from gracestream.workers.cli.common import plain_cell, print_json, print_table, stderr_console

SentMessage = Request | Feedback | SignedFeedback
R = TypeVar("R", Prediction, Outcome)


def send_and_wait(
    settings: Settings,
    messages: Sequence[SentMessage],
    open_replies: Callable[[Client], AbstractContextManager[ReplyCollector[R]]],
    *,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Send messages, each of an id of its own, and show the replies.

    Exit status 1 where one is missing, an error or a rejection.

    Raises:
        typer.Exit: with that status.
    """
    if not messages:
        stderr_console.print("there were no lines, so nothing was sent")
        return
    client = Client(settings)
    try:
        if not wait:
            client.send(messages)
            stderr_console.print(f"sent {len(messages)}")
            return
        ids = list(map(message_id, messages))
        with open_replies(client) as replies:
            client.send(messages)
            if as_json or not sys.stdout.isatty():
                came = _print_replies(replies, ids, timeout)
            else:
                with stderr_console.status(f"waiting for {len(ids)}"):
                    came = replies.wait(ids, timeout)
                print_table(_replies_table(messages, came))
    finally:
        client.close()
    missing, failed = len(ids) - len(came), sum(map(_is_failure, came.values()))
    if missing:
        worker = "a replica" if isinstance(messages[0], Request) else "an editor"
        stderr_console.print(
            f"{missing} of {len(ids)} got no reply in {timeout:g} s; see whether {worker} runs with this --prefix, or"
            " raise --timeout"
        )
    if failed:
        stderr_console.print(
            f"{failed} of {len(ids)} {'got an error' if isinstance(messages[0], Request) else 'rejected'}"
        )
    if missing or failed:
        raise typer.Exit(1)


def _print_replies(replies: ReplyCollector[R], ids: Sequence[str], timeout: float) -> dict[str, R]:
    """Replies as JSON lines in the order of their ids: each once those before it have come, or nothing more comes."""
    waiting, came = deque(ids), dict[str, R]()

    def take(reply: R) -> None:
        came[message_id(reply)] = reply
        while waiting and waiting[0] in came:
            print_json(msgspec.to_builtins(came[waiting.popleft()]))

    try:
        replies.wait(ids, timeout, take)
    finally:
        for name in waiting:
            if name in came:
                print_json(msgspec.to_builtins(came[name]))
    return came


def message_id(message: SentMessage | Prediction | Outcome) -> str:
    """What a message and its reply have in common."""
    return message.request_id if isinstance(message, Request | Prediction) else message.feedback_id


def _is_failure(reply: Prediction | Outcome) -> bool:
    return reply.error is not UNSET if isinstance(reply, Prediction) else reply.status == "rejected"


def _replies_table(messages: Sequence[SentMessage], replies: Mapping[str, Prediction | Outcome]) -> Table:
    """Each message, and what became of it; the columns are what there is to say of any of them."""
    rows = []
    for message in messages:
        sent = decode(message.record, Feedback) if isinstance(message, SignedFeedback) else message
        reply = replies.get(message_id(message))
        rows.append({**_describe_sent(sent), **({} if reply is None else _describe_reply(reply))})
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(Column(name, overflow="fold") for name in names))
    for row in rows:
        table.add_row(*(plain_cell(row.get(name, "")) for name in names))
    return table


def _describe_sent(sent: Request | Feedback) -> dict[str, str]:
    if isinstance(sent, Request):
        return {"inputs": to_display_text(sent.inputs), "answer": "no reply"}
    if sent.undo is not UNSET:
        told = {"takes back": sent.undo}
    elif sent.undo_author is not UNSET:
        told = {"takes back": f"all by {sent.undo_author}"}
    elif sent.except_from is not UNSET:
        told = {"inputs": to_display_text(sent.inputs or ""), "except from": sent.except_from}
    else:
        told = {"inputs": to_display_text(sent.inputs or ""), "target": sent.target or ""}
    return {**told, "feedback": sent.feedback_id, "outcome": "no reply"}


def _describe_reply(reply: Prediction | Outcome) -> dict[str, str]:
    if isinstance(reply, Outcome):
        outcome = reply.status if reply.reason is UNSET else f"{reply.status}: {reply.reason}"
        left_out = "; ".join(f"rephrase {one.rephrase} is left out: {one.reason}" for one in reply.left_out)
        outcome = f"{outcome}; {left_out}" if left_out else outcome
        return {"outcome": outcome, **({} if reply.seq is UNSET else {"delta": str(reply.seq)})}
    if reply.outputs is UNSET:
        return {"answer": f"error: {reply.error}"}
    answer = reply.outputs.label if reply.outputs.text is UNSET else reply.outputs.text
    return {"answer": str(answer), **({} if reply.edit is UNSET else {"entry": reply.edit.entry_id})}
