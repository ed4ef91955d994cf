"""Pages of the console at 100,000 predictions and 10,000 edits.

Each edit answers one request, and another request is its near miss; 80 % of the requests have neither. Words come from
the README. A page is rendered by the application in this process, without a network and a browser.

- `page`: CPU milliseconds of a page, the median of five. The baseline is the goal of 100 ms.
- `bytes`: of its answer.
- `build/seconds`: CPU seconds until all records are stored. `build/megabytes`: its files.

Pages with `text`: `rare` has no match, `common` is in a third of all rows, `short` has two letters and no match, so
that every row is compared.
"""

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.console.app import create_app
from gracestream.pipeline.read_model import ReadModelStore
from gracestream.schemas.deltas import Cause, EntryChange
from gracestream.schemas.headers import FEEDBACK_OFFSET_HEADER
from gracestream.schemas.messages import (
    AppliedEdit,
    Feedback,
    Message,
    NearMiss,
    Outcome,
    Outputs,
    Prediction,
    Request,
    encode,
)
from tests.bench.framework import Options, Row
from tests.support.repository import ROOT
from tests.support.tiny_models import added, new_codebook, sealed

PREDICTIONS, EDITS, BATCH = 100_000, 10_000, 2000
QUICK_PREDICTIONS, QUICK_EDITS = 2000, 200
AUTHORS, REPLICAS = 20, 8
REPEATS = 5
GOAL_MS = 100.0
ADDRESS = "http://127.0.0.1:8090"

Records = list[tuple[str, Any]]


def run(options: Options) -> Iterator[Row]:
    """The build, and each page. `--quick` has 2,000 predictions and 200 edits."""
    predictions, edits = (QUICK_PREDICTIONS, QUICK_EDITS) if options.quick else (PREDICTIONS, EDITS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "console.db"
        with ReadModelStore(path, "cluster", "", 10 * PREDICTIONS) as store:
            started = time.process_time()
            for number, records in enumerate(_all_records(predictions, edits)):
                options.report(f"batch {number + 1}")
                store.add(records, {})
            yield Row("console/build/seconds", time.process_time() - started, "s")
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
            yield Row("console/build/megabytes", size / 1e6, "MB")
            caught_up = threading.Event()
            caught_up.set()
            follower: Any = SimpleNamespace(failure="", caught_up=caught_up)
            sender: Any = None  # no page sends
            browser = TestClient(create_app(store, follower, sender), ADDRESS)
            for name, address in _pages(predictions).items():
                options.report(name)
                yield from _page_rows(browser, name, address)


def _pages(predictions: int) -> dict[str, str]:
    return {
        "queue": "/queue",
        "queue, rare text": "/queue?text=zzzzqq",
        "queue, common text": "/queue?text=the",
        "queue, short text": "/queue?text=zq",
        "queue, edited": "/queue?kind=edited",
        "queue, errors": "/queue?kind=error",
        "queue, common text of errors": "/queue?text=the&kind=error",
        "queue, author": "/queue?author=author3",
        "queue, replica": "/queue?replica=r3",
        "request": f"/requests/r{predictions // 2}",
        "feedback": "/feedback",
        "history": "/history",
        "history, author": "/history?author=author7",
        "entry": "/entries/e17",
    }


def _page_rows(browser: TestClient, name: str, address: str) -> Iterator[Row]:
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        answer = browser.get(address)
        seconds.append(time.process_time() - started)
        assert answer.status_code == 200, answer.text
    yield Row(f"console/{name}/page", 1000 * statistics.median(seconds), "ms", GOAL_MS)
    yield Row(f"console/{name}/bytes", len(answer.content), "count")


def _all_records(predictions: int, edits: int) -> Iterator[Records]:
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    generator = random.Random(1)

    def text(count: int) -> str:
        return " ".join(generator.choices(words, k=count))

    codebook = new_codebook()
    yield [_delta(codebook, op="lead")]
    for start in range(0, edits, BATCH):
        records: Records = []
        for number in range(start, min(start + BATCH, edits)):
            name, author = f"f{number}", f"author{number % AUTHORS}"
            feedback = Feedback(v=1, feedback_id=name, inputs=text(10), target=text(2), author=author)
            cause = Cause(feedback_id=name, offset=number, author=author, entry_id=f"e{number}")
            outcome = Outcome(v=1, feedback_id=name, status="added", entry_id=f"e{number}", seq=number + 2)
            records.append(_record("feedback", number, feedback))
            records.append(_delta(codebook, added(f"e{number}", [float(number), 0.0], 1.0), cause=cause))
            records.append(_record("edits", number, outcome, (FEEDBACK_OFFSET_HEADER, str(number).encode())))
        yield records
    for start in range(0, predictions, BATCH):
        records = []
        for number in range(start, min(start + BATCH, predictions)):
            records.append(_record("requests", number, Request(v=1, request_id=f"r{number}", inputs=text(12))))
            records.append(_record("predictions", number, _prediction(number, edits, text(6))))
        yield records


def _prediction(number: int, edits: int, answer: str) -> Prediction:
    entry_id = f"e{number // 10 % edits}"
    match: dict[str, Any] = {}
    if number % 10 == 0:
        match["edit"] = AppliedEdit(entry_id=entry_id, distance=0.1, radius=1.0)
    elif number % 10 == 1:
        match["near_miss"] = NearMiss(entry_id=entry_id, distance=0.1, radius=1.0, reason="wording")
    return Prediction(
        v=1, request_id=f"r{number}", outputs=Outputs(text=answer), codebook_seq=edits, term=1, model="m",
        replica=f"r{number % REPLICAS}", latency_ms=3.0, **match,
    )  # fmt: skip


def _record(topic: str, offset: int, message: Message | bytes, *headers: tuple[str, bytes]) -> tuple[str, Any]:
    value = message if isinstance(message, bytes) else encode(message)
    return topic, SimpleNamespace(
        partition=0, offset=offset, timestamp=100 * offset, value=value, headers=list(headers)
    )


def _delta(codebook: Codebook, *entries: EntryChange, **fields: Any) -> tuple[str, Any]:
    record = sealed(codebook, *entries, **fields)
    codebook.apply(record)
    return _record("deltas", codebook.seq - 1, record)
