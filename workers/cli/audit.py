"""`audit`: damage in the topics of a deployment."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.history import Damage, Finding
from gracestream.pipeline.history import audit_topics as find_damage
from gracestream.workers.cli.common import (
    JsonOption,
    KafkaOption,
    PrefixOption,
    connect,
    plain_cell,
    pluralize,
    print_json,
    print_table,
    stderr_console,
)

REMEDIES: dict[Damage, str] = {
    "no outcome": "send it again: gracestream correct",
    "delta without outcome": "none needed: the correction is in force",
    "outcome without delta": "send it again with a new feedback_id",
    "outcome without its delta": "none needed: the correction is in force",
    "several outcomes": "none needed: the first one was reported",
    "several deltas": "undo it, and send it again with a new feedback_id",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="History")(audit)


def audit(
    lost: Annotated[
        Path | None, typer.Option(help="Write feedback without an outcome to this file, for `gracestream correct`.")
    ] = None,
    as_json: JsonOption = False,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Check that every feedback record that the editor has passed has its outcome and its delta.

    Changes nothing, and needs no model. Ends with status 1 if a record is damaged. With --json each damaged record is a
    line, and the last line counts them.
    Example: gracestream audit --lost lost.jsonl
    """
    found = find_damage(connect(kafka=kafka, prefix=prefix))
    if lost is not None:
        undecided = [one.record for one in found.findings if one.damage == "no outcome"]
        try:
            lost.write_bytes(b"".join(record.replace(b"\n", b" ") + b"\n" for record in undecided))
        except OSError as error:
            raise UserError(f"{lost} cannot be written: {error.strerror}; choose another --lost") from error
    if as_json:
        for one in found.findings:
            print_json(_finding_fields(one))
        print_json({"checked": found.checked, "damaged": len(found.findings)})
    elif found.findings:
        table = Table("offset", Column("feedback", overflow="fold"), "damage", "remedy")
        for one in found.findings:
            table.add_row(str(one.offset), plain_cell(one.feedback_id), one.damage, REMEDIES[one.damage])
        print_table(table)
    checked = pluralize(found.checked, "feedback record", "feedback records")
    damaged = f"{len(found.findings)} damaged" if found.findings else "none is damaged"
    stderr_console.print(f"checked {checked}: {damaged}")
    raise typer.Exit(int(bool(found.findings)))


def _finding_fields(finding: Finding) -> dict[str, object]:
    return {
        "offset": finding.offset,
        "feedback_id": finding.feedback_id,
        "damage": finding.damage,
        "remedy": REMEDIES[finding.damage],
    }
