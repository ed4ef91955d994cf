"""Run both streams, from the state of an earlier run if there is one, and yield the rows of their checkpoints."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.provenance import describe_environment
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.settings import load_settings
from gracestream.workers.bootstrap import edit_config_from_settings, load_model
from tests.bench.framework import BenchError, Options, Row
from tests.bench.stream.corrections import Data, stream_data
from tests.bench.stream.edits import (
    CODEBOOK,
    STREAM_KINDS,
    PromptCache,
    StreamKind,
    apply_correction,
    start_engine,
    to_feedback,
)
from tests.bench.stream.identity import MEASURING, code_digest, stream_key
from tests.bench.stream.log import CheckpointRows, LeadRecord, LoggedCorrection, StreamLog
from tests.bench.stream.measure import StreamState, checkpoint
from tests.bench.stream.undone import undo_rows

SETTINGS: dict[str, object] = {"query_source": "encoder"}
"""The differences from the defaults."""

COUNTS = {"trained": 3_000, "keys": 10_000}
QUICK_COUNTS = {"trained": 50, "keys": 200}
"""Corrections of each stream."""

CHECKPOINTS = (100, 1_000, 3_000, 10_000)

REPORT_INTERVAL = 30.0
"""Seconds between two lines of progress."""


def run(options: Options) -> Iterator[Row]:
    """The rows of both streams, or of the stream in `--only`."""
    if options.only not in ("", *COUNTS):
        raise BenchError(f"no stream is named {options.only!r}; the names are {', '.join(COUNTS)}")
    settings = load_settings(device=options.device, **SETTINGS)
    data, model = stream_data(), load_model(settings.model, settings.editing.policy)
    plan = edit_config_from_settings(settings.editing, uses_encoder=model.reads_text)
    folder = settings.model.cache_dir.expanduser() / "bench" / f"stream-{stream_key(model, plan, data)}"
    options.report(f"the logs are in {folder}; an interrupted run resumes from them")
    setup = Setup(model, plan, data, PromptCache(model), folder)
    for kind in STREAM_KINDS:
        if options.only in ("", kind.name):
            count = min((QUICK_COUNTS if options.quick else COUNTS)[kind.name], len(data.corrections))
            yield from stream_rows(setup, kind, count, options.report)


@dataclass
class Progress:
    """Reports at intervals: steps done, seconds per step, and the remaining time."""

    name: str
    total: int
    report: Callable[[str], None]
    started: float = field(default_factory=time.monotonic)
    last_report: float = -math.inf
    done: int = 0
    first_step: int | None = None

    def step(self, done: int | None = None) -> None:
        """Count one more step, or set the number of steps done."""
        now = time.monotonic()
        self.done = self.done + 1 if done is None else done
        if self.first_step is None:
            self.started, self.first_step = now, self.done
        if now - self.last_report < REPORT_INTERVAL:
            return
        self.last_report = now
        line = f"{self.name}: {self.done:,} of {self.total:,}"
        if (steps := self.done - self.first_step) > 0:
            each = (now - self.started) / steps
            left = timedelta(seconds=round(each * max(0, self.total - self.done)))
            line += f", {each:.3g} s each, {left} left"
        self.report(line)


@dataclass(frozen=True, slots=True)
class Setup:
    """The shared parts of both streams: model, configuration, data, and the folder of the logs."""

    model: EditableModel
    plan: EditConfig
    data: Data
    prompt_cache: PromptCache
    folder: Path


def stream_rows(setup: Setup, kind: StreamKind, count: int, report: Callable[[str], None]) -> Iterator[Row]:
    """The rows of all checkpoints of one stream, then of the undo."""
    points = sorted({count, *(point for point in CHECKPOINTS if point < count)})
    by = code_digest(MEASURING)
    with StreamLog(setup.folder / f"{kind.name}.jsonl") as log:
        measured = log.measured()
        run: StreamRun | None = None
        for after, what in [*((point, "checkpoint") for point in points), (count, "undo")]:
            rows = measured.get((after, what, by))
            if rows is None:
                run = run or StreamRun(log, start_stream(setup, kind, log), count, report)
                run.advance(after)
                rows = list(run.undo() if what == "undo" else run.checkpoint())
                log.append(CheckpointRows(after, what, by, rows))
            yield from rows


def start_stream(setup: Setup, kind: StreamKind, log: StreamLog) -> StreamState:
    """A stream before its first correction. Its engine starts with the lead delta of the log, if it has one."""
    lead_record = next(log.records(0), None)
    if lead_record is None:
        lead_record = EditEngine(setup.model, CODEBOOK, setup.plan).lead_delta(
            describe_environment(setup.model, setup.plan)
        )
        log.append(LeadRecord(lead_record))
    engine = start_engine(setup.model, setup.plan, setup.data.traffic, setup.prompt_cache, lead_record)
    return StreamState(kind, engine, setup.prompt_cache, setup.data, to_feedback(setup.data.corrections))


class StreamRun:
    """A running stream. It applies the corrections in its log, then decides on further ones."""

    def __init__(self, log: StreamLog, state: StreamState, count: int, report: Callable[[str], None]) -> None:
        self._log, self._state, self._report = log, state, report
        self._logged: Iterator[LoggedCorrection] = log.corrections()
        self._decide_progress = Progress(state.kind.name, count, report)
        self._apply_progress = Progress(f"{state.kind.name}: applying the log", count, report)

    def advance(self, count: int) -> None:
        """Continue up to `count` corrections.

        Raises:
            BenchError: The log lacks a correction.
        """
        while (number := len(self._state.corrections)) < count:
            correction = next(self._logged, None)
            if correction is None:
                correction = self._make(number)
            else:
                self._apply(correction)
            if correction.number != number:
                raise BenchError(
                    f"the log has correction {correction.number} instead of {number}; remove its folder and start again"
                )
            self._state.corrections.append(msgspec.structs.replace(correction, record=None))
            self._state.sizes.append(len(correction.record or b""))

    def checkpoint(self) -> Iterator[Row]:
        """The rows of a checkpoint."""
        self._report(f"{self._state.setting}: measuring")
        return checkpoint(self._state)

    def undo(self) -> Iterator[Row]:
        """The rows of the undo. No correction can follow it."""
        self._report(f"{self._state.setting}: undoing the corrections of one author")
        progress = Progress(f"{self._state.kind.name}: records read", 2 * len(self._state.not_rejected()), self._report)
        return undo_rows(self._state, self._log, progress.step)

    def _make(self, number: int) -> LoggedCorrection:
        correction = apply_correction(
            self._state.engine, self._state.kind, self._state.prompt_cache, self._state.feedback[number], number
        )
        self._log.append(correction)
        self._decide_progress.step(number + 1)
        return correction

    def _apply(self, correction: LoggedCorrection) -> None:
        if correction.record is not None:
            self._state.engine.apply(correction.record)
        self._apply_progress.step(correction.number + 1)
