"""`send` and `correct`: requests and corrections from JSON lines."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from pipeline.client import Client, Replies, feedback, request
from pipeline.settings import Settings
from schemas.messages import Feedback, InvalidMessage, Outcome, Prediction, Request
from workers.cli.common import Kafka, Lines, Prefix, connected, notes, read_lines, say

M = TypeVar("M", Request, Feedback)
R = TypeVar("R", Prediction, Outcome)

Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for what becomes of them, and print it.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the next reply before giving up.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (send, correct):
        app.command(rich_help_panel="Traffic")(command)


def send(
    lines: Lines = Path("-"),
    wait: Wait = True,
    timeout: Timeout = 60.0,
    kafka: Kafka = None,
    prefix: Prefix = None,
) -> None:
    """Send requests: JSON lines, each a text or an object with `inputs`; a missing id is made up.

    Prints one prediction a line. Example: echo '{"inputs": "The capital of Mongolia is"}' | gracestream send
    """
    settings = connected(kafka=kafka, prefix=prefix)
    requests = _read(lines, request)
    with_client(
        settings, requests, wait, timeout, lambda client: client.predictions(), [r.request_id for r in requests]
    )


def correct(
    lines: Lines = Path("-"),
    wait: Wait = True,
    timeout: Timeout = 120.0,
    kafka: Kafka = None,
    prefix: Prefix = None,
) -> None:
    """Send corrections: JSON lines, each an object with `inputs` and `target`; a missing id is made up.

    Prints one outcome a line.
    Example: echo '{"inputs": "The capital of Mongolia is", "target": "Ulaanbaatar"}' | gracestream correct
    """
    settings = connected(kafka=kafka, prefix=prefix)
    corrections = _read(lines, feedback)
    ids = [correction.feedback_id for correction in corrections]
    with_client(settings, corrections, wait, timeout, lambda client: client.outcomes(), ids)


def with_client(
    settings: Settings,
    messages: list[M],
    wait: bool,
    timeout: float,
    open_replies: Callable[[Client], Any],
    ids: list[str],
) -> None:
    """Send, and print replies as they come; exit status 1 where some do not."""
    client = Client(settings)
    try:
        if not wait:
            client.send(messages)
            notes.print(f"sent {len(messages)}")
            return
        with open_replies(client) as replies:
            client.send(messages)
            came = _print_replies(replies, ids, timeout)
        if came < len(set(ids)):
            notes.print(f"{len(set(ids)) - came} of {len(set(ids))} got no reply in {timeout:g} s")
            raise typer.Exit(1)
    finally:
        client.close()


def _print_replies(replies: Replies[R], ids: list[str], timeout: float) -> int:
    return len(replies.wait(ids, timeout, on_reply=lambda reply: say(msgspec.to_builtins(reply))))


def _read(path: Path, make: Callable[[Any], M]) -> list[M]:
    """All lines, before the first is sent: a mistake in the last one sends nothing."""
    messages = []
    for number, fields in read_lines(path):
        try:
            messages.append(make(fields))
        except InvalidMessage as error:
            raise typer.BadParameter(f"{path}, line {number}: {error}") from error
    return messages
