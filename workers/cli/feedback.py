"""`send`, `correct` and `undo`: sending requests, corrections and undos."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gracestream.pipeline.auth import read_key_file, sign
from gracestream.pipeline.client import (
    Client,
    SignedFeedback,
    build_feedback,
    build_request,
    feedback_to_sign,
    parse_signed_feedback,
)
from gracestream.pipeline.settings import load_settings
from gracestream.schemas.messages import Feedback, InvalidMessage, Request
from gracestream.workers.cli.common import (
    CodebookOption,
    KafkaOption,
    LinesArgument,
    PrefixOption,
    connect,
    read_lines_with_bytes,
)
from gracestream.workers.cli.send_and_wait import message_id, send_and_wait

M = TypeVar("M", Request, Feedback | SignedFeedback)
"""A kind of message to send."""

RepliesJsonOption = Annotated[
    bool, typer.Option("--json", help="JSON lines at a terminal, too; elsewhere they are the default.")
]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the replies, and print them.")]
FILE_NAME_PATTERN = re.compile(r"\S*/\S*|\S+\.(jsonl?|ndjson|txt)")
"""An argument that must be a file name, even if there is no such file: one word with a slash or a known suffix."""

TimeoutOption = Annotated[
    float, typer.Option(min=0.1, help="Seconds to wait for the next reply; for Kafka: GRACESTREAM_STARTUP_TIMEOUT.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (send, correct, undo):
        app.command(rich_help_panel="Traffic")(command)


def send(
    text_or_file: Annotated[
        str, typer.Argument(help="A text to ask, or a file of JSON lines; - is standard input.", metavar="TEXT_OR_FILE")
    ] = "-",
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask each text as a user's message of a chat, in the model's chat template.")
    ] = False,
    wait: WaitOption = True,
    timeout: TimeoutOption = 60.0,
    as_json: RepliesJsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Send a text as a request, or JSON lines: each is a text or an object with `inputs`; a missing id is generated.

    The argument is a text unless it is a file, a file name, or a JSON object. A file name is one word with a / or a
    suffix such as .jsonl. `inputs` may be the messages of a chat: [{"role": "user", "content": "a text"}].
    An unknown field or another fault of a line is an error; then nothing is sent.
    Shows the answers in the order of the requests: in a table at a terminal, elsewhere as JSON lines.
    Ends with status 1 if an answer is an error or is missing.
    Example: gracestream send "The capital of Mongolia is"
    """
    requests = _read_requests(text_or_file, chat=chat)
    settings = connect(kafka=kafka, topic_prefix=prefix)
    send_and_wait(settings, requests, Client.predictions, wait=wait, timeout=timeout, as_json=as_json)


def correct(
    lines: LinesArgument = Path("-"),
    rephrase: Annotated[
        list[str] | None, typer.Option(help="A rephrase of the inputs, if there is one correction; may be repeated.")
    ] = None,
    wait: WaitOption = True,
    timeout: TimeoutOption = 120.0,
    as_json: RepliesJsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Send corrections: JSON lines, each an object with `inputs` and `target`; a missing id is generated.

    `inputs` is a text, a pair of texts, or the messages of a chat: [{"role": "user", "content": "a text"}].
    `rephrases` may list up to 16 other inputs that ask the same; --rephrase adds texts to the list of a single line.
    A line with `except_from` instead of `target` is an exception: the edit with this id does not answer these inputs.
    An unknown field or another fault of a line is an error; then nothing is sent.

    A line that `gracestream keys sign` has signed is sent unchanged, byte for byte.
    Shows the outcomes in the order of the corrections: in a table at a terminal, elsewhere as JSON lines.
    Ends with status 1 if an outcome is `rejected` or is missing.
    Example: echo '{"inputs": "The capital of Mongolia is", "target": "Ulaanbaatar"}' | gracestream correct
    """
    corrections = _read_messages(lines, lambda fields, line: _make_correction(fields, line, rephrase or []))
    if rephrase and len(corrections) != 1:
        raise typer.BadParameter(f"--rephrase needs one correction, and there are {len(corrections)}; use `rephrases`")
    settings = connect(kafka=kafka, topic_prefix=prefix)
    send_and_wait(settings, corrections, Client.outcomes, wait=wait, timeout=timeout, as_json=as_json)


def undo(
    feedback_id: Annotated[list[str] | None, typer.Argument(help="Ids of the feedback to undo.")] = None,
    author: Annotated[list[str] | None, typer.Option(help="Undo all feedback of this author; may be repeated.")] = None,
    by: Annotated[str | None, typer.Option(help="The author of the undo.")] = None,
    key: Annotated[Path | None, typer.Option(help="Sign the undo with the private key in this file.")] = None,
    wait: WaitOption = True,
    timeout: TimeoutOption = 120.0,
    as_json: RepliesJsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
    codebook: CodebookOption = None,
) -> None:
    """Undo feedback: the codebook becomes what it would be without this feedback.

    An undo is feedback, too, so its own id can be undone. With --key it is signed by its author (--by), for one
    codebook. Shows outcomes as `correct` does, and ends with status 1 if an outcome is `rejected` or is missing.
    Example: gracestream undo 2f6d7a9e-5a0a-4c7c-9a53-1f4f4b8f3c11 --by ann --key ann.pem
    """
    targets = [{"undo": name} for name in feedback_id or ()] + [{"undo_author": name} for name in author or ()]
    if not targets:
        raise typer.BadParameter("name the feedback to undo, or its --author")
    if key is not None and by is None:
        raise typer.BadParameter("--key signs in an author's name, so it needs --by")
    private_key = None if key is None else read_key_file(key)
    signed_for = load_settings(codebook=codebook).model.codebook
    undos = [_make_undo(fields, by, private_key, signed_for) for fields in targets]
    settings = connect(kafka=kafka, topic_prefix=prefix, codebook=codebook)
    send_and_wait(settings, undos, Client.outcomes, wait=wait, timeout=timeout, as_json=as_json)


def _make_undo(
    fields: dict[str, str], author: str | None, key: Ed25519PrivateKey | None, codebook: str
) -> Feedback | SignedFeedback:
    """An undo, signed if there is a key.

    Raises:
        typer.BadParameter: it is not valid feedback.
    """
    try:
        if author is None:
            return build_feedback(fields)
        if key is None:
            return build_feedback({**fields, "author": author})
        return parse_signed_feedback(sign(feedback_to_sign(fields, author), key, codebook))
    except InvalidMessage as error:
        raise typer.BadParameter(str(error)) from error


def _make_correction(fields: Any, line: bytes, rephrases: Sequence[str]) -> Feedback | SignedFeedback:
    """A line as feedback, with further rephrases; a signed line stays unchanged.

    Raises:
        InvalidMessage: the line is not valid feedback, or is signed and there are further rephrases.
    """
    if isinstance(fields, dict) and "signature" in fields:
        if rephrases:
            raise InvalidMessage("it is signed already; put `rephrases` into the line before you sign it")
        return parse_signed_feedback(line)
    if rephrases and isinstance(fields, dict) and isinstance(fields.get("rephrases", []), list):
        fields = {**fields, "rephrases": [*fields.get("rephrases", []), *rephrases]}
    return build_feedback(fields)


def _read_requests(text_or_file: str, *, chat: bool) -> list[Request]:
    """The requests of a text, a JSON object or a file; with `chat` each text becomes a user's message.

    Raises:
        typer.BadParameter: the file cannot be read, or a request is not valid.
    """
    if text_or_file == "-" or FILE_NAME_PATTERN.fullmatch(text_or_file) or _file_exists(text_or_file):
        return _read_messages(Path(text_or_file), lambda fields, _: build_request(_as_chat(fields) if chat else fields))
    try:
        fields = json.loads(text_or_file) if text_or_file.startswith("{") else text_or_file
    except ValueError:
        fields = text_or_file
    try:
        return [build_request(_as_chat(fields) if chat else fields)]
    except InvalidMessage as error:
        raise typer.BadParameter(str(error)) from error


def _as_chat(fields: Any) -> Any:
    """The fields of a request with its text as a user's message; other fields are returned unchanged."""
    if isinstance(fields, str):
        return {"inputs": [{"role": "user", "content": fields}]}
    if isinstance(fields, dict) and isinstance(fields.get("inputs"), str):
        return {**fields, **_as_chat(fields["inputs"])}
    return fields


def _file_exists(name: str) -> bool:
    """Whether a file or pipe of this name exists."""
    try:
        return Path(name).exists() and not Path(name).is_dir()
    except OSError:  # the text is too long for a file name
        return False


def _read_messages(path: Path, parse: Callable[[Any, bytes], M]) -> list[M]:
    """The messages of all lines. They are read before the first is sent, so a wrong last line sends nothing.

    Raises:
        typer.BadParameter: a line is not a valid message, or repeats an id: ids distinguish replies.
    """
    messages: dict[str, M] = {}
    numbers: dict[str, int] = {}
    for number, fields, line in read_lines_with_bytes(path):
        try:
            message = parse(fields, line)
        except InvalidMessage as error:
            raise typer.BadParameter(f"{path}, line {number}: {error}") from error
        name = message_id(message)
        if name in messages:
            raise typer.BadParameter(
                f"{path}, line {number} has the id {name!r} of line {numbers[name]}; give each line an id of its own,"
                " or leave it out"
            )
        messages[name], numbers[name] = message, number
    return list(messages.values())
