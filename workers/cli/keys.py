"""`keys new` and `keys sign`: making an author's key, and signing feedback."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gracestream.pipeline.auth import create_key_file, encode_public_key, read_key_file, sign
from gracestream.pipeline.client import feedback_to_sign
from gracestream.pipeline.settings import load_settings
from gracestream.schemas.deltas import DEFAULT_ROLES
from gracestream.schemas.messages import Id, InvalidMessage
from gracestream.workers.cli.common import CodebookOption, LinesArgument, read_json_lines, stderr_console

AuthorOption = Annotated[str, typer.Option("--author", help="Name of the author, as in the list of authors.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    keys = typer.Typer(
        help="Make keys, and sign feedback with them. Example: gracestream keys new --author ann", no_args_is_help=True
    )
    keys.command("new")(new_key)
    keys.command("sign")(sign_feedback)
    app.add_typer(keys, name="keys", rich_help_panel="Traffic")


def new_key(
    author: AuthorOption,
    output: Annotated[Path, typer.Option(help="New file for the private key; it must not exist.")] = Path("key.pem"),
) -> None:
    """Make a private key in a new file, and print its author's line for the list of authors (GRACESTREAM_AUTHORS_FILE).

    The line has the roles `propose` and `undo_own`; `undo_any` lets an author undo the feedback of others.
    Example: gracestream keys new --author ann --output ann.pem >> authors.toml
    """
    try:
        msgspec.convert(author, Id)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(f"--author {author!r}: {error}") from error
    key = create_key_file(output)
    stderr_console.print(f"the private key is in {output}; keep it secret")
    name, roles = (json.dumps(value, ensure_ascii=False) for value in (author, DEFAULT_ROLES))
    print(f'{name} = {{ keys = ["{encode_public_key(key.public_key())}"], roles = {roles} }}')


def sign_feedback(
    key: Annotated[Path, typer.Argument(help="File of the private key.")],
    author: AuthorOption,
    lines: LinesArgument = Path("-"),
    codebook: CodebookOption = None,
) -> None:
    """Sign feedback: JSON lines as for `correct`, printed with author and signature; a missing id is generated.

    A signature is valid for one codebook.
    Example: gracestream keys sign ann.pem --author ann < corrections.jsonl | gracestream correct
    """
    private_key, settings = read_key_file(key), load_settings(codebook=codebook)
    signed = []  # all lines are signed before the first is printed: a wrong line prints nothing
    for number, fields in read_json_lines(lines):
        try:
            signed.append(sign(feedback_to_sign(fields, author), private_key, settings.model.codebook))
        except InvalidMessage as error:
            raise typer.BadParameter(f"{lines}, line {number}: {error}") from error
    for record in signed:
        print(record.decode(), flush=True)
