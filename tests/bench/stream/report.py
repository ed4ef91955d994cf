"""Runs both streams, from where an earlier run has come to, and yields the rows of their checkpoints."""

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
from tests.bench.stream.edits import CODEBOOK, WAYS, Texts, Way, begun, feedback_of, made
from tests.bench.stream.identity import MEASURING, code_digest, stream_key
from tests.bench.stream.log import Led, Made, Measured, StreamLog
from tests.bench.stream.measure import Past, checkpoint
from tests.bench.stream.undone import undo_rows

SETTINGS: dict[str, object] = {"query_source": "encoder"}
"""What differs from the defaults."""

COUNTS = {"trained": 3_000, "keys": 10_000}
QUICK = {"trained": 50, "keys": 200}
"""Corrections of each stream."""

CHECKPOINTS = (100, 1_000, 3_000, 10_000)

EVERY = 30.0
"""Seconds between two lines of progress."""


def run(options: Options) -> Iterator[Row]:
    """The rows of both streams, or of the one that is asked for."""
    if options.only not in ("", *COUNTS):
        raise BenchError(f"there is no stream named {options.only!r}; there are {', '.join(COUNTS)}")
    settings = load_settings(device=options.device, **SETTINGS)
    data, model = stream_data(), load_model(settings.model, settings.editing.policy)
    plan = edit_config_from_settings(settings.editing, uses_encoder=model.reads_text)
    folder = settings.model.cache_dir.expanduser() / "bench" / f"stream-{stream_key(model, plan, data)}"
    options.tell(f"the logs are in {folder}; a run that was ended goes on from there")
    setup = Setup(model, plan, data, Texts(model), folder)
    for way in WAYS:
        if options.only in ("", way.name):
            count = min((QUICK if options.quick else COUNTS)[way.name], len(data.corrections))
            yield from rows_of(setup, way, count, options.tell)


@dataclass
class Progress:
    """Says from time to time how far a stream is, how long a step takes, and when all will be done."""

    name: str
    total: int
    tell: Callable[[str], None]
    begun: float = field(default_factory=time.monotonic)
    told: float = -math.inf
    done: int = 0
    first: int | None = None

    def step(self, done: int | None = None) -> None:
        """One more step is done, or so many steps are."""
        now = time.monotonic()
        self.done = self.done + 1 if done is None else done
        if self.first is None:
            self.begun, self.first = now, self.done
        if now - self.told < EVERY:
            return
        self.told = now
        line = f"{self.name}: {self.done:,} of {self.total:,}"
        if (steps := self.done - self.first) > 0:
            each = (now - self.begun) / steps
            left = timedelta(seconds=round(each * max(0, self.total - self.done)))
            line += f", {each:.3g} s each, {left} left"
        self.tell(line)


@dataclass(frozen=True, slots=True)
class Setup:
    """What both streams share: the model, the plan, the data, and the folder of the logs."""

    model: EditableModel
    plan: EditConfig
    data: Data
    texts: Texts
    folder: Path


def rows_of(setup: Setup, way: Way, count: int, tell: Callable[[str], None]) -> Iterator[Row]:
    """The rows of all checkpoints of one stream, and of the undo after the last one."""
    points = sorted({count, *(point for point in CHECKPOINTS if point < count)})
    by = code_digest(MEASURING)
    with StreamLog(setup.folder / f"{way.name}.jsonl") as log:
        known = log.measured()
        run: Run | None = None
        for after, what in [*((point, "checkpoint") for point in points), (count, "undo")]:
            rows = known.get((after, what, by))
            if rows is None:
                run = run or Run(log, begun_past(setup, way, log), count, tell)
                run.advance(after)
                rows = list(run.undo() if what == "undo" else run.checkpoint())
                log.append(Measured(after, what, by, rows))
            yield from rows


def begun_past(setup: Setup, way: Way, log: StreamLog) -> Past:
    """A stream before its first correction; its engine begins by the record that the log has, if it has one."""
    led = next(log.records(0), None)
    if led is None:
        led = EditEngine(setup.model, CODEBOOK, setup.plan).lead_delta(describe_environment(setup.model, setup.plan))
        log.append(Led(led))
    engine = begun(setup.model, setup.plan, setup.data.traffic, setup.texts, led)
    return Past(way, engine, setup.texts, setup.data, feedback_of(setup.data.corrections))


class Run:
    """A stream under way: it applies what its log has, and then makes more corrections."""

    def __init__(self, log: StreamLog, past: Past, count: int, tell: Callable[[str], None]) -> None:
        self._log, self._past, self._tell = log, past, tell
        self._logged: Iterator[Made] = log.made()
        self._making = Progress(past.way.name, count, tell)
        self._applying = Progress(f"{past.way.name}: applying the log", count, tell)

    def advance(self, count: int) -> None:
        """Come to so many corrections.

        Raises:
            BenchError: the log leaves out a correction.
        """
        while (number := len(self._past.made)) < count:
            one = next(self._logged, None)
            if one is None:
                one = self._make(number)
            else:
                self._apply(one)
            if one.number != number:
                raise BenchError(f"the log has correction {one.number} where {number} follows; remove its folder")
            self._past.made.append(msgspec.structs.replace(one, record=None))
            self._past.sizes.append(len(one.record or b""))

    def checkpoint(self) -> Iterator[Row]:
        """The rows of a checkpoint."""
        self._tell(f"{self._past.setting}: measuring")
        return checkpoint(self._past)

    def undo(self) -> Iterator[Row]:
        """The rows of the undo; nothing can be added after it."""
        self._tell(f"{self._past.setting}: undoing a half")
        progress = Progress(f"{self._past.way.name}: records read", 2 * len(self._past.accepted()), self._tell)
        return undo_rows(self._past, self._log, progress.step)

    def _make(self, number: int) -> Made:
        one = made(self._past.engine, self._past.way, self._past.texts, self._past.feedback[number], number)
        self._log.append(one)
        self._making.step(number + 1)
        return one

    def _apply(self, one: Made) -> None:
        if one.record is not None:
            self._past.engine.apply(one.record)
        self._applying.step(one.number + 1)
