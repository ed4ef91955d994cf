"""`audit`: finding damaged records in the topics of a deployment."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from gracestream.pipeline.errors import UserError
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

if TYPE_CHECKING:
    from gracestream.pipeline.history import Damage, Finding

REMEDIES: dict["Damage", str] = {
    "no outcome": "send it again: gracestream correct",
    "delta without outcome": "none needed: the correction is in force",
    "outcome without delta": "send it again with a new feedback_id",
    "outcome without its delta": "none needed: the correction is in force",
    "several outcomes": "none needed: the first one was reported",
    "several deltas": "undo it, and send it again with a new feedback_id",
}
"""The advice to the user for each kind of damage."""


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
    """Check that every feedback record that the editor has processed has its outcome and its delta.

    Changes nothing, and needs no model. Ends with status 1 if a record is damaged. With --json each damaged record is a
    line, and the last line counts them.
    Example: gracestream audit --lost lost.jsonl
    """
    from gracestream.pipeline.history import audit_topics as find_damage

    report = find_damage(connect(kafka=kafka, topic_prefix=prefix).kafka)
    if lost is not None:
        undecided = [finding.record for finding in report.findings if finding.damage == "no outcome"]
        try:
            lost.write_bytes(b"".join(record.replace(b"\n", b" ") + b"\n" for record in undecided))
        except OSError as error:
            raise UserError(f"{lost} cannot be written: {error.strerror}; choose another --lost") from error
    if as_json:
        for finding in report.findings:
            print_json(_finding_fields(finding))
        print_json({"checked": report.checked, "damaged": len(report.findings)})
    elif report.findings:
        table = Table("offset", Column("feedback", overflow="fold"), "damage", "remedy")
        for finding in report.findings:
            table.add_row(
                str(finding.offset), plain_cell(finding.feedback_id), finding.damage, REMEDIES[finding.damage]
            )
        print_table(table)
    checked_count = pluralize(report.checked, "feedback record", "feedback records")
    damaged_count = f"{len(report.findings)} damaged" if report.findings else "none is damaged"
    stderr_console.print(f"checked {checked_count}: {damaged_count}")
    raise typer.Exit(int(bool(report.findings)))


def _finding_fields(finding: "Finding") -> dict[str, object]:
    return {
        "offset": finding.offset,
        "feedback_id": finding.feedback_id,
        "damage": finding.damage,
        "remedy": REMEDIES[finding.damage],
    }
