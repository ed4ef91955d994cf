"""Sending requests or feedback, and showing their replies in the order of the messages.

A terminal gets a table of messages and replies; any other output gets one JSON line with each complete reply.
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
"""A message that gets a reply."""

R = TypeVar("R", Prediction, Outcome)
"""A kind of reply."""


def send_and_wait(
    settings: Settings,
    messages: Sequence[SentMessage],
    open_replies: Callable[[Client], AbstractContextManager[ReplyCollector[R]]],
    *,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Send messages with distinct ids, and show the replies.

    Args:
        settings: The settings of the deployment.
        messages: The messages.
        open_replies: Opens the topic of the replies; it is opened before the messages are sent, so none is missed.
        wait: Wait for the replies and show them.
        timeout: Seconds to wait for the next reply.
        as_json: Print JSON lines at a terminal, too.

    Raises:
        typer.Exit: with status 1: a reply is missing, an error or a rejection.
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
                received = _print_replies(replies, ids, timeout)
            else:
                with stderr_console.status(f"waiting for {len(ids)}"):
                    received = replies.wait(ids, timeout)
                print_table(_replies_table(messages, received))
    finally:
        client.close()
    missing, failed = len(ids) - len(received), sum(map(_is_failure, received.values()))
    if missing:
        worker = "a replica" if isinstance(messages[0], Request) else "an editor"
        stderr_console.print(
            f"{missing} of {len(ids)} got no reply within {timeout:g} s; check that {worker} runs with this --prefix,"
            " or raise --timeout"
        )
    if failed:
        stderr_console.print(
            f"{failed} of {len(ids)} {'got an error' if isinstance(messages[0], Request) else 'rejected'}"
        )
    if missing or failed:
        raise typer.Exit(1)


def _print_replies(replies: ReplyCollector[R], ids: Sequence[str], timeout: float) -> dict[str, R]:
    """Print replies as JSON lines in the order of `ids`; return them by id.

    A reply is printed as soon as all replies before it are printed. The others follow when waiting ends.
    """
    waiting, received = deque(ids), dict[str, R]()

    def on_reply(reply: R) -> None:
        received[message_id(reply)] = reply
        while waiting and waiting[0] in received:
            print_json(msgspec.to_builtins(received[waiting.popleft()]))

    try:
        replies.wait(ids, timeout, on_reply)
    finally:
        for name in waiting:
            if name in received:
                print_json(msgspec.to_builtins(received[name]))
    return received


def message_id(message: SentMessage | Prediction | Outcome) -> str:
    """The id that a message and its reply share."""
    return message.request_id if isinstance(message, Request | Prediction) else message.feedback_id


def _is_failure(reply: Prediction | Outcome) -> bool:
    return reply.error is not UNSET if isinstance(reply, Prediction) else reply.status == "rejected"


def _replies_table(messages: Sequence[SentMessage], replies: Mapping[str, Prediction | Outcome]) -> Table:
    """The table of messages and replies; it has every column that at least one row fills."""
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
        fields = {"undoes": sent.undo}
    elif sent.undo_author is not UNSET:
        fields = {"undoes": f"all by {sent.undo_author}"}
    elif sent.except_from is not UNSET:
        fields = {"inputs": to_display_text(sent.inputs or ""), "except from": sent.except_from}
    else:
        fields = {"inputs": to_display_text(sent.inputs or ""), "target": sent.target or ""}
    return {**fields, "feedback": sent.feedback_id, "outcome": "no reply"}


def _describe_reply(reply: Prediction | Outcome) -> dict[str, str]:
    if isinstance(reply, Outcome):
        outcome = reply.status if reply.reason is UNSET else f"{reply.status}: {reply.reason}"
        left_out = "; ".join(
            f"rephrase {rejected.rephrase} is left out: {rejected.reason}" for rejected in reply.left_out
        )
        outcome = f"{outcome}; {left_out}" if left_out else outcome
        return {"outcome": outcome, **({} if reply.seq is UNSET else {"delta": str(reply.seq)})}
    if reply.outputs is UNSET:
        return {"answer": f"error: {reply.error}"}
    answer = reply.outputs.label if reply.outputs.text is UNSET else reply.outputs.text
    return {"answer": str(answer), **({} if reply.edit is UNSET else {"entry": reply.edit.entry_id})}
