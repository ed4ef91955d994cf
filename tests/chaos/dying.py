"""Faults of a worker, armed in its own process.

An editor dies or hangs at a named step, or trains or undoes slowly; a replica reads the log slowly.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from gracestream.pipeline.editing import value_search
from gracestream.pipeline.editing.counterfactual import CounterfactualReplay
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editor.log import EditorLog
from gracestream.pipeline.editor.redis_publisher import RedisPublisher
from gracestream.pipeline.kafka.topics import EDITS
from gracestream.pipeline.kafka.transactions import TransactionalProducer
from gracestream.pipeline.model.suffix_pass import SuffixRunner
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.stores.redis_head import RedisHeadStore
from gracestream.pipeline.stores.snapshot_files import SnapshotStore
from gracestream.workers import shutdown

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Step:
    """The call at which the process dies: `before` or `after` the `turn`-th call whose first text ends in `ending`."""

    owner: Any
    call: str
    when: Literal["before", "after"]
    turn: int = 1
    ending: str = ""


STEPS = {
    "training": Step(SuffixRunner, "evaluate", "before", turn=15),
    "decided": Step(EditEngine, "edit", "after", turn=2),
    "term begun": Step(TransactionalProducer, "begin_transaction", "after"),
    "term sent": Step(TransactionalProducer, "send", "after", ending="deltas"),
    "term committed": Step(TransactionalProducer, "commit_transaction", "after"),
    "begun": Step(TransactionalProducer, "begin_transaction", "after", turn=3),
    "delta sent": Step(TransactionalProducer, "send", "after", turn=3, ending="deltas"),
    "outcome sent": Step(TransactionalProducer, "send", "after", turn=2, ending="edits"),
    "offset sent": Step(TransactionalProducer, "send_offsets_to_transaction", "after", turn=3),
    "committing": Step(TransactionalProducer, "commit_transaction", "before", turn=3),
    "committed": Step(TransactionalProducer, "commit_transaction", "after", turn=3),
    "applied": Step(RedisPublisher, "publish", "before", turn=2),
    "publishing": Step(RedisHeadStore, "publish", "before", turn=2),
    "published": Step(RedisHeadStore, "publish", "after", turn=2),
    "snapshot begun": Step(SnapshotStore, "put", "before"),
    "snapshot filed": Step(SnapshotStore, "put", "after"),
}
"""The steps by name. An editor's first transaction begins its term, so those of feedback begin with the second.

Snapshots are written in a thread of their own, parallel to the other steps.
"""


def arm(name: str, signum: signal.Signals = signal.SIGKILL) -> None:
    """Make this process die at a step, as in a crash, or hang there with SIGSTOP."""
    step = STEPS[name]
    call: Callable[..., Any] = getattr(step.owner, step.call)
    turns = 0

    def deadly(*arguments: Any, **named: Any) -> Any:
        nonlocal turns
        texts = [argument for argument in arguments if isinstance(argument, str)]
        turns += not step.ending or (bool(texts) and texts[0].endswith(step.ending))
        if turns == step.turn and step.when == "before":
            os.kill(os.getpid(), signum)
        done = call(*arguments, **named)
        if turns == step.turn:
            if hasattr(done, "get"):
                done.get(timeout=30)  # the sent records have reached the broker
            os.kill(os.getpid(), signum)
        return done

    setattr(step.owner, step.call, deadly)


def tear(*kept: str, turn: int) -> None:
    """Make this process die after it has committed only these parts of a transaction: topics, `offset`.

    `turn` counts transactions with feedback. A late EndTxn had this effect on a producer that kept its epoch.
    """
    transact = EditorLog._transact
    turns = 0

    def torn(log: EditorLog, position: int, records: list[Any]) -> None:
        nonlocal turns
        turns += any(topic == EDITS for topic, *_ in records)
        if turns < turn:
            transact(log, position, records)
            return
        found = [record for record in records if record[0] in kept]
        transact(log, position if "offset" in kept else log._committed_offset, found)
        os.kill(os.getpid(), signal.SIGKILL)

    EditorLog._transact = torn  # type: ignore[assignment, method-assign]


def train_slowly(seconds: float) -> None:
    """Repeat the training of each single value for `seconds`, so that other threads wait.

    The event `training_slowly` is logged at its start.
    """
    train: Callable[..., Any] = getattr(value_search, "train_value")  # noqa: B009  (it is imported there)

    def trained(*arguments: Any) -> Any:
        log.info("training_slowly", seconds=seconds)
        end = time.monotonic() + seconds
        while True:
            done = train(*arguments)
            if time.monotonic() > end:
                return done

    setattr(value_search, "train_value", trained)  # noqa: B010


def hang(seconds: float) -> None:
    """Train the first single value for ever, and let a stalled process live for so long."""
    shutdown.MAX_STALL_SECONDS = seconds
    train_slowly(float("inf"))


def undo_slowly(seconds: float) -> None:
    """Make an undo take so long for each delta of the history."""
    fold = CounterfactualReplay.apply

    def folded(rewritten: CounterfactualReplay, record: bytes) -> bool:
        time.sleep(seconds)
        return fold(rewritten, record)

    CounterfactualReplay.apply = folded  # type: ignore[assignment, method-assign]


def read_slowly(seconds: float) -> None:
    """Make a starting replica take so long for each delta that the log held at its start."""
    keep = DeltaFollower._buffer_records

    def kept(follower: DeltaFollower, records: list[tuple[int, bytes]]) -> None:
        for record in records:
            if not follower.at_end:
                time.sleep(seconds)
            keep(follower, [record])

    DeltaFollower._buffer_records = kept  # type: ignore[method-assign, assignment]
