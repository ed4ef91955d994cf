"""The report of `make gpu`: what each part and each of its cases came to, as one JSON file that is always whole.

It is written after each case, so a run that is killed leaves what it had. It needs the standard library alone.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

PARTS = ("tests", "lookup", "tolerance", "determinism", "edit", "serve", "memory")

Status = Literal["running", "passed", "failed", "skipped"]


@dataclass(slots=True)
class CaseReport:
    """One case of a part. `reason` says why it failed or was skipped, in one line; `error` is the whole traceback."""

    status: Status
    seconds: float = 0.0
    reason: str = ""
    error: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class PartReport:
    """One part; `reason` is set where the part as a whole failed or was skipped."""

    status: Status
    reason: str = ""
    cases: dict[str, CaseReport] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of all cases."""
        return sum(case.seconds for case in self.cases.values())

    def reasons(self, status: Status) -> list[str]:
        """Why the part, or cases of it, have that status; cases of one reason stand together."""
        names_by_reason: dict[str, list[str]] = {}
        for name, case in self.cases.items():
            if case.status == status:
                names_by_reason.setdefault(case.reason, []).append(name)
        own = [self.reason] if self.status == status and self.reason else []
        return own + [f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]

    def close(self) -> None:
        """Set the status that follows from those of the cases."""
        statuses = {case.status for case in self.cases.values()}
        self.status = "failed" if "failed" in statuses else "passed" if "passed" in statuses else "skipped"
        if not self.cases:
            self.reason = "it has no case on this device"


@dataclass(slots=True)
class Report:
    """A run. `machine` is empty until a worker has seen the device."""

    path: Path
    machine: dict[str, str | int] = field(default_factory=dict)
    parts: dict[str, PartReport] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "Report":
        """The report in a file; an empty one where there is none."""
        if not path.exists():
            return cls(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        parts = {
            name: PartReport(
                part["status"], part["reason"], {case: CaseReport(**fields) for case, fields in part["cases"].items()}
            )
            for name, part in content["parts"].items()
        }
        return cls(path, content["machine"], parts)

    def save(self) -> None:
        """Replace the file by this report."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.partial")
        whole = {"machine": self.machine, "parts": {name: asdict(part) for name, part in self.parts.items()}}
        partial.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def fail(self, name: str, reason: str) -> None:
        """Record that a part, and the case that it was at, failed."""
        part = self.parts.setdefault(name, PartReport("failed"))
        part.status, part.reason = "failed", reason
        for case in part.cases.values():
            if case.status == "running":
                case.status, case.reason = "failed", reason

    def rows(self) -> list[dict[str, Any]]:
        """All measured rows."""
        return [row for part in self.parts.values() for case in part.cases.values() for row in case.rows]
