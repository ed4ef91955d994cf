"""A whole deployment on its own servers, under load, for injecting faults."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from kafka import TopicPartition
from kafka.errors import KafkaError
from msgspec import UNSET

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.deploy.local.redis import LocalRedis
from gracestream.pipeline.client import Client
from gracestream.pipeline.kafka.clients import consumer
from gracestream.pipeline.kafka.topics import DELTAS, EDITS, FEEDBACK, FEEDBACK_DLQ, PREDICTIONS
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores.redis_client import redis_client
from gracestream.pipeline.stores.redis_head import RedisHeadStore
from gracestream.pipeline.stores.snapshots import list_manifests
from gracestream.schemas.messages import Feedback, Prediction, Request, SnapshotManifest, decode
from tests.chaos.dying import arm
from tests.support.doubles.checker import Fault, Follower, Left, faults
from tests.support.forked_commands import Forked
from tests.support.running import flag, question, records, wait_until
from tests.support.tiny_models import texts

PAUSE = 0.05
"""Seconds between two requests of the load."""

TARGETS = ("museum", "bridge", "train", "violin", "river", "bread")
PROMPTS = texts(400, seed=5, shortest=6, longest=9)


class Load(threading.Thread):
    """Users who steadily send requests and corrections, and send again what a failed Kafka did not take."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(name="load", daemon=True)
        self.asked: list[str] = []
        self.flagged: list[str] = []
        self.wanted = 0
        """The number of corrections to send; raise it for more."""
        self._settings = settings
        self._over = threading.Event()

    def run(self) -> None:
        """Send until `finish`."""
        client = Client(self._settings)
        while not self._over.is_set():
            number = len(self.asked)
            self._send(client, question(f"q{number}", PROMPTS[number % len(PROMPTS)]))
            self.asked.append(f"q{number}")
            if len(self.flagged) < self.wanted:
                number = len(self.flagged)
                self._send(client, self._feedback(number))
                self.flagged.append(f"f{number}")
            self._over.wait(PAUSE)
        client.close()

    def finish(self) -> None:
        """End the load once everything is sent."""
        wait_until(lambda: len(self.flagged) == self.wanted, 60, "everything sent")
        self._over.set()
        self.join(60)

    def _feedback(self, number: int) -> Feedback:
        """The next feedback: mostly corrections, with some repeated inputs and some undos."""
        if number % 7 == 6:
            return Feedback(v=1, feedback_id=f"f{number}", undo=f"f{number - 4}")
        inputs = PROMPTS[number - 3 if number % 5 == 4 else number]
        return flag(f"f{number}", inputs, TARGETS[number % len(TARGETS)])

    def _send(self, client: Client, message: Request | Feedback) -> None:
        while True:
            try:
                client.send([message])
            except KafkaError:
                time.sleep(0.5)
            else:
                return


class Site:
    """Kafka, Valkey, two editors of which one leads, two replicas, their load, and a reader of all deltas."""

    def __init__(self, settings: Settings, kafka: LocalKafka, valkey: LocalRedis, folder: Path) -> None:
        self.settings, self.kafka, self.valkey = settings, kafka, valkey
        self.load = Load(settings)
        self.editors: list[Forked] = []
        self.replicas: list[Forked] = []
        self._follower = DeltaFollower(settings.kafka)
        self._folder = folder
        self._started = 0

    def start(self) -> None:
        """Start everything."""
        self._follower.start()
        for _ in range(2):
            self.add_replica()
            self.add_editor()
        for worker in (*self.editors, *self.replicas):
            worker.wait_ready(90)
        self.load.start()

    def close(self) -> None:
        """End everything that still runs."""
        for worker in (*self.editors, *self.replicas):
            if worker.running:
                worker.resume()
                worker.kill()
        self._follower.close()

    def add_editor(self, die_at: str = "") -> Forked:
        """Start one more editor. It waits as standby while another editor leads."""
        return self._add(self.editors, "edit", partial(arm, die_at) if die_at else None)

    def add_replica(self, sabotage: Callable[[], None] | None = None, **chosen: Any) -> Forked:
        """Start one more replica, with its own settings."""
        return self._add(self.replicas, "infer", sabotage, **chosen)

    def correct(self, count: int) -> None:
        """Let users send so many more corrections."""
        self.load.wanted += count

    def leader(self) -> Forked:
        """The leading editor."""
        found = wait_until(lambda: next(self._leaders(), None), 60, "an editor that leads")
        assert found is not None
        return found

    def remove_ended_editors(self) -> None:
        """Remove editors that have ended."""
        self.editors = [editor for editor in self.editors if editor.running]

    def snapshots(self) -> list[SnapshotManifest]:
        """The snapshots, newest last, once all feedback has outcomes and no snapshot is due."""

        def no_snapshot_due() -> list[SnapshotManifest]:
            if not self.all_done():
                return []
            deltas, state = len(records(self.settings, DELTAS)), self.leader().state()
            found = sorted(
                list_manifests(self.settings.kafka, state["codebook"]).values(), key=lambda manifest: manifest.seq
            )
            due = not found or deltas >= found[-1].seq + (self.settings.snapshots.interval or 0)
            return found if state["seq"] == deltas and not state["degraded"] and not due else []

        return wait_until(no_snapshot_due, 90, "a snapshot")

    def wait_until_equal(self) -> None:
        """Wait until all requests have answers and all workers hold the same state."""
        self.load.finish()
        wait_until(self.all_done, 120, "every outcome")
        wait_until(lambda: not self.unanswered(), 120, "every answer")
        self.leader()
        wait_until(lambda: len({state["state_digest"] for state in self._states()}) == 1, 60, "one state")
        wait_until(lambda: self._follower.latest_seq >= self.leader().state()["seq"], 60, "a follower at the end")

    def answers(self) -> Iterator[Prediction]:
        """All predictions."""
        return (decode(record.value, Prediction) for record in records(self.settings, PREDICTIONS))

    def unanswered(self) -> set[str]:
        """Requests without a good answer."""
        return set(self.load.asked) - {answer.request_id for answer in self.answers() if answer.error is UNSET}

    def faults(self) -> list[Fault]:
        """The faults of everything that was left behind."""
        store = RedisHeadStore(
            redis_client(self.settings.redis), self.settings.kafka.topic_prefix, self.settings.model.codebook
        )
        return faults(
            Left(
                feedback=records(self.settings, FEEDBACK),
                edits=records(self.settings, EDITS),
                deltas=records(self.settings, DELTAS),
                dead_letters=records(self.settings, FEEDBACK_DLQ),
                position=self._position(),
                head=store.read_head(0),
                radii={name: float(np.float32(radius)) for name, radius in store.read_radii().items()},
                followers=[
                    Follower(state["name"], state["seq"], state["digest"], state["state_digest"])
                    for state in self._states()
                ],
                read={"a follower": self._follower.poll(self._follower.latest_seq, 0)},
                predictions=records(self.settings, PREDICTIONS),
                taken=self.load.flagged,
            )
        )

    def all_done(self) -> bool:
        """True if all feedback was sent and has its outcome. Feedback that was sent twice has two records."""
        flagged = len(self.load.flagged) == self.load.wanted
        return flagged and len(records(self.settings, EDITS)) == len(records(self.settings, FEEDBACK))

    def _add(self, workers: list[Forked], command: str, sabotage: Callable[[], None] | None, **chosen: Any) -> Forked:
        self._started += 1
        name = f"{command}-{self._started}"
        worker = Forked(name, command, self.settings, self._folder, sabotage=sabotage, **chosen)
        worker.start()
        workers.append(worker)
        return worker

    def _leaders(self) -> Iterator[Forked]:
        for editor in self.editors:
            if editor.running:
                try:
                    leadership = editor.state()["leadership"]
                except (json.JSONDecodeError, KeyError):
                    continue
                if leadership == "leading":
                    yield editor

    def _states(self) -> Sequence[dict[str, Any]]:
        return [{"name": worker.name, **worker.state()} for worker in (*self.replicas, self.leader())]

    def _position(self) -> int | None:
        reader = consumer(self.settings.kafka, group_id=self.settings.kafka.topic("editor"))
        try:
            found: int | None = reader.committed(TopicPartition(self.settings.kafka.topic(FEEDBACK), 0))
            return found
        finally:
            reader.close()
