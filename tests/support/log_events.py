"""The workers' log events: their meanings, and a scan of the code for the rest.

The code is the source of an event's name, level, fields and consequence. `MEANINGS` is the source of its meaning and of
its workers. `tests/unit/observability/test_log_events.py` compares both, and `tests/support/reference_pages.py` renders
them.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.repository import ROOT

MEANINGS = {
    "Replicas and the editor": {
        "setting_ignored": "A variable of the environment looks like a misspelt setting; `meant` is the likely one.",
        "worker_starting": "The worker has read its settings; `url` is the address of its HTTP endpoints.",
        "waiting_for_dependency": "Kafka or Redis does not answer yet; `progress` says which one, and how long it may"
        " take.",
        "redis_wait_timeout": "Redis did not answer in time at the start.",
        "model_build_progress": "A model that is known by name is being built in the cache.",
        "model_loaded": "The model is on its device. `query` says what makes the queries: a token or the encoder.",
        "gpu_not_used": "The machine has a driver for a GPU, but PyTorch cannot use it.",
        "worker_ready": "The worker can take work: `/ready` answers 200. An editor also logs its `leadership`"
        " each time it changes, and once it leads the `feedback_offset` where it goes on.",
        "manifest_skipped": "A record of `snapshots` cannot be read.",
        "redis_lost": "Redis did not answer in time, or its answer cannot be read.",
        "redis_distrusted": "Redis contradicts the log. `reason` of a replica: `redis_empty` (no head),"
        " `redis_ahead` (a delta that the log does not hold), `redis_behind` (the head has not followed the log for a"
        " grace period) or `redis_disagrees` (another digest; the replica stops after the grace period). The editor's"
        " `reason` names the newer head.",
        "worker_stopping": "A signal asks the worker to stop; it has `seconds` to finish its work.",
        "worker_stopped": "The worker has stopped. `signal` and `reason` are there if it had no work to finish.",
        "forced_exit": "A second signal ended the process.",
        "shutdown_timeout": "The worker still ran after its shutdown timeout.",
        "killed_after_stall": "One piece of work exceeded the limit by a minute; `reason` names the part that stalled.",
    },
    "The console": {
        "console_ready": "The console answers at `address`; it sends feedback as `author`.",
        "read_model_ready": "Everything is shown that the topics had at the start.",
        "read_model_stalled": "Kafka or the disk does not answer; the console tries again.",
        "read_model_rebuilt": "A topic ends before what was read of it, so it was created again.",
    },
    "Replicas": {
        "continuous_engine_unsupported": "The model cannot decode rows of different ages together; `reason` says why.",
        "snapshot_loaded": "The replica starts from this snapshot.",
        "snapshot_rejected": "A snapshot is missing or corrupt, belongs to another log, or exceeds the memory.",
        "snapshot_search_failed": "Kafka or the snapshot store does not answer, so no snapshot was found.",
        "catch_up_progress": "A starting replica reads the log; `percent` of the log at its start.",
        "startup_catch_up_timeout": "A starting replica made no progress in the log for its startup timeout.",
        "delta_applied": "The codebook has applied a delta; `ms` is the time of all deltas applied together.",
        "deltas_applied": "The codebook has applied more than 16 deltas together; `seq` is the newest.",
        "stale_delta_ignored": "A delta in the log has a lower term than an earlier delta.",
        "delta_read_failed": "Kafka does not answer a read of `deltas`.",
        "history_error": "A record of `deltas` cannot be read or applied, or Redis and the log are of two histories.",
        "device_lost": "The device that runs the model failed.",
        "replica_behind_head": "A published delta cannot be read from the log.",
        "head_follower_failed": "A defect ended the task that follows the head.",
        "request_plane_failed": "A failure that it cannot recover from stopped the Kafka consumer of requests.",
        "redis_recovered": "Redis agrees with the log again.",
        "subscription_lost": "Redis rejected or ended the subscription to the channel of published deltas.",
        "subscription_recovered": "The replica is subscribed to the channel again.",
        "radius_mismatch_found": "A radius in Redis (`redis`) differs from the log's (`log`).",
        "request_rejected": "A record of `requests` cannot be read, or asks for something invalid.",
        "request_failed": "The model failed on a request.",
        "requests_restarted": "The model failed on several requests together, or on one that joined others.",
        "batch_failed": "The replies to a batch of requests could not be made or sent; `offset` is its first request.",
        "reply_rejected": "A topic rejected a reply.",
        "reply_lost": "No topic accepted the reply to a request, its error or its dead letter.",
        "unfinished_requests_released": "The replica stopped before it had answered all requests that it had taken.",
        "group_leave_timeout": "Kafka did not answer when the replica left the consumer group.",
    },
    "The editor": {
        "kafka_connection_lost": "Kafka did not answer the editor, or has ended its membership.",
        "undecided_feedback_found": "The consumer group's offset is behind feedback without an outcome.",
        "feedback_decided": "Feedback has an outcome. The other fields are those of the message on `edits`.",
        "feedback_dead_lettered": "A record of `feedback` cannot be read.",
        "feedback_blocked": "A producer has left a transaction open on `feedback`.",
        "draft_training_failed": "The values of a batch of corrections could not be trained together.",
        "decision_failed": "The model failed on a correction, an undo or an exception.",
        "traffic_catch_up_incomplete": "The editor did not read all requests that were sent before a correction.",
        "traffic_request_skipped": "The model failed on a request that was to join the traffic sample.",
        "redis_command_rejected": "Redis rejected a command of the editor.",
        "snapshot_started": "The editor begins to write a snapshot; `copy_ms` is the pause for the copy.",
        "snapshot_written": "A snapshot and its manifest are written.",
        "snapshot_failed": "A snapshot could not be written.",
        "snapshot_not_deleted": "An outdated snapshot could not be deleted.",
        "authors_reloaded": "The file of authors has changed, and the new list is in force.",
        "authors_reload_failed": "The file of authors has changed, and is not valid.",
        "editor_stopped": "An error ended the editor; `reason` gives it with its remedy.",
    },
}
"""The meaning of each event, by the workers that log it."""

LEVELS = {"info": "info", "warning": "warning", "error": "error", "exception": "error"}
"""Levels of structlog's methods."""

NAME_PATTERN = re.compile(r"[a-z]+(_[a-z]+)+")

OWNERS = {
    "pipeline/replica": "Replicas",
    "pipeline/editor": "The editor",
    "pipeline/auth": "The editor",
    "workers/editor.py": "The editor",
}
"""The worker that alone runs this code. The rest belongs to both, or to one as `MEANINGS` says."""


@dataclass(slots=True)
class LogEvent:
    """An event as all of its log calls together show it, in the order of the code."""

    levels: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    consequences: list[str] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)

    def add(self, level: str, call: ast.Call, owner: str) -> None:
        """Add what a further log call shows."""
        names = [keyword.arg for keyword in call.keywords if keyword.arg not in (None, "consequence")]
        for known, found in ((self.levels, [level]), (self.fields, names), (self.consequences, [consequence_of(call)])):
            known += [text for text in found if text and text not in known]
        self.owners.add(owner)


@dataclass(frozen=True, slots=True)
class LogCall:
    """A log call; `event` is None where the name is no literal."""

    place: str
    level: str
    event: str | None
    call: ast.Call

    def fault(self) -> str | None:
        """What is wrong with the call; None if nothing is."""
        if self.event is None:
            return f"{self.place}: the event must be a literal, so that it can be found and documented"
        if not NAME_PATTERN.fullmatch(self.event):
            return f"{self.place}: {self.event!r} is not of the form noun_verb"
        if self.level in {"warning", "error"} and not consequence_of(self.call):
            return f"{self.place}: {self.event} is of level {self.level} and needs a literal consequence=..."
        return None


def consequence_of(call: ast.Call) -> str:
    """The literal `consequence` of a log call; empty if there is none."""
    for keyword in call.keywords:
        if keyword.arg == "consequence" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    return ""


def log_calls_in(source: str, name: str) -> Iterator[LogCall]:
    """The log calls in a module: `log.LEVEL("event", ...)`, and calls that are given `log.LEVEL, "event", ...`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        for method, event in zip([node.func, *node.args], [*node.args, None], strict=True):
            match method:
                case ast.Attribute(value=ast.Name(id="log"), attr=level) if level in LEVELS:
                    literal = event.value if isinstance(event, ast.Constant) and isinstance(event.value, str) else None
                    yield LogCall(f"{name}:{node.lineno}", LEVELS[level], literal, node)


def log_calls() -> list[LogCall]:
    """All log calls of the product, in the order of files and lines."""
    files = sorted(path for folder in ("pipeline", "workers", "deploy") for path in (ROOT / folder).rglob("*.py"))
    found = [
        call for path in files for call in log_calls_in(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())
    ]
    return sorted(found, key=lambda call: (call.place.rpartition(":")[0], call.call.lineno))


def log_events() -> dict[str, LogEvent]:
    """Every event of the product, by name."""
    events: dict[str, LogEvent] = {}
    for found in log_calls():
        if found.event is not None:
            owner = next((owner for start, owner in OWNERS.items() if found.place.startswith(start)), "")
            events.setdefault(found.event, LogEvent()).add(found.level, found.call, owner)
    return events
