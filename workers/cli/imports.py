"""`import`: corrections that people made in other tools, as lines for `correct`."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from gracestream.pipeline.client import build_feedback
from gracestream.pipeline.imports import ExportError, FieldNames, Source, read_export
from gracestream.schemas.messages import InvalidMessage
from gracestream.workers.cli.common import pluralize, print_json, stderr_console


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("import", rich_help_panel="Traffic")(import_corrections)


def import_corrections(
    source: Annotated[Source, typer.Argument(help="The tool that wrote the file: csv, langfuse or label-studio.")],
    file: Annotated[Path, typer.Argument(help="The exported file.")],
    inputs_field: Annotated[
        str, typer.Option(help="Key of Langfuse's input or of Label Studio's data with the request.")
    ] = "",
    target_field: Annotated[
        str, typer.Option(help="Key of Langfuse's expected output, or control of Label Studio, with the answer.")
    ] = "",
    author: Annotated[str, typer.Option(help="The author of each correction, in place of the file's.")] = "",
) -> None:
    """Turn corrections that people made in another tool into lines for `correct`.

    csv: a file whose first line names the columns: inputs, target, and id, author, note, request_id, rephrases if
    wanted. langfuse: items of a dataset, as JSON, JSON Lines or CSV. label-studio: annotated tasks, as JSON.
    An item gets the same feedback id each time, so a file can be sent again: what is known already is `unchanged`.
    Items without an answer are left out and counted. Any other fault is an error; then nothing is printed.
    Example: gracestream import langfuse dataset.json | gracestream correct
    """
    lines: dict[str, dict[str, object]] = {}
    left_out: Counter[str] = Counter()
    for item in read_export(file, source, FieldNames(inputs_field, target_field)):
        if item.left_out:
            left_out[item.left_out] += 1
            continue
        fields = {**item.fields, **({"author": author} if author else {})}
        try:
            build_feedback(fields)  # only checks it
        except InvalidMessage as error:
            raise ExportError(f"{item.place}: {error}") from error
        if fields["feedback_id"] in lines:
            left_out["it is in the file twice"] += 1
        lines[str(fields["feedback_id"])] = fields
    for fields in lines.values():
        print_json(fields)
    summary = [pluralize(len(lines), "correction", "corrections")]
    summary += [f"{count} left out: {reason}" for reason, count in left_out.items()]
    stderr_console.print("; ".join(summary), soft_wrap=True)
