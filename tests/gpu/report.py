"""The report of `make gpu`: the result of each part and case, in one JSON file that is always complete.

The file is replaced after each case, so a killed run leaves its results so far. This module needs only the standard
library.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

PARTS = ("tests", "lookup", "tolerance", "determinism", "edit", "serve", "engines", "memory")

Status = Literal["running", "passed", "failed", "skipped"]


@dataclass(slots=True)
class CaseReport:
    """One case of a part. `reason` is one line on a failure or a skip; `error` is the full traceback."""

    status: Status
    seconds: float = 0.0
    reason: str = ""
    error: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class PartReport:
    """One part. `reason` is set if the part as a whole failed or was skipped."""

    status: Status
    reason: str = ""
    cases: dict[str, CaseReport] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of all cases."""
        return sum(case.seconds for case in self.cases.values())

    def reasons(self, status: Status) -> list[str]:
        """The reasons for this status, of the part and of its cases. Cases with the same reason share a line."""
        names_by_reason: dict[str, list[str]] = {}
        for name, case in self.cases.items():
            if case.status == status:
                names_by_reason.setdefault(case.reason, []).append(name)
        own = [self.reason] if self.status == status and self.reason else []
        return own + [f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]

    def close(self) -> None:
        """Derive the status from the cases."""
        statuses = {case.status for case in self.cases.values()}
        self.status = "failed" if "failed" in statuses else "passed" if "passed" in statuses else "skipped"
        if not self.cases:
            self.reason = "the part has no case on this device"


@dataclass(slots=True)
class Report:
    """The report of a run. `machine` is empty until a worker has described the device."""

    path: Path
    machine: dict[str, str | int] = field(default_factory=dict)
    parts: dict[str, PartReport] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "Report":
        """The report in a file; an empty report if there is no file."""
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
        """Replace the file with this report."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.partial")
        whole = {"machine": self.machine, "parts": {name: asdict(part) for name, part in self.parts.items()}}
        partial.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def fail(self, name: str, reason: str) -> None:
        """Record the failure of a part and of its running case."""
        part = self.parts.setdefault(name, PartReport("failed"))
        part.status, part.reason = "failed", reason
        for case in part.cases.values():
            if case.status == "running":
                case.status, case.reason = "failed", reason

    def rows(self) -> list[dict[str, Any]]:
        """All measured rows."""
        return [row for part in self.parts.values() for case in part.cases.values() for row in case.rows]
