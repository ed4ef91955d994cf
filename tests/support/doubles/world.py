"""Two editors, their users, and all faults that may occur: one random story per seed.

The editors are real, with their logs, engines and publishers; only the clients of Kafka and Redis are test doubles.
Each editor is a thread, and one thread runs at a time. At every operation of a client the story decides which thread
runs and which fault occurs. So equal seeds give equal stories.
"""

import random
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kafka import TopicPartition
from kafka.errors import (
    CoordinatorLoadInProgressError,
    InvalidTxnStateError,
    KafkaConnectionError,
    KafkaTimeoutError,
    NotCoordinatorError,
    NotLeaderForPartitionError,
    OutOfOrderSequenceNumberError,
    TransactionAbortedError,
    UnknownError,
)
from msgspec import UNSET
from redis.exceptions import TimeoutError as RedisTimeout

from gracestream.pipeline.auth.admission import Admission
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editor.editor import Editor, EditorServices
from gracestream.pipeline.editor.feedback_processor import FeedbackProcessor
from gracestream.pipeline.editor.log import EditorLog
from gracestream.pipeline.editor.redis_publisher import RedisPublisher
from gracestream.pipeline.editor.snapshot_writer import SnapshotWriter
from gracestream.pipeline.editor.traffic_reader import TrafficReader
from gracestream.pipeline.kafka.topics import DELTAS, EDITS, FEEDBACK, FEEDBACK_DLQ, REQUESTS, TOPICS
from gracestream.pipeline.observability.health import Health
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.pipeline.stores.redis_head import RedisHeadStore, StaleHeadError
from gracestream.schemas.deltas import decode_delta
from gracestream.schemas.messages import SCHEMA_VERSION, Feedback, InvalidMessage, Request, decode, encode
from tests.support.chosen_queries import CLASSES, PointModel, at
from tests.support.doubles.checker import Follower, Left
from tests.support.doubles.kafka import Epochs, MemoryKafka, Passage
from tests.support.doubles.redis import MemoryRedis
from tests.support.tiny_models import CODEBOOK

SETTINGS = load_settings(codebook=CODEBOOK, traffic_sample_size=4)
PLANS = [
    EditConfig(policy, radius=0.5, radius_unit="absolute", traffic_sample_size=4) for policy in ("nearest", "paper")
]
AUTHORS = ("ann", "bob")
FAILURES = [
    *(KafkaTimeoutError, KafkaConnectionError, NotCoordinatorError, NotLeaderForPartitionError, UnknownError),
    *(CoordinatorLoadInProgressError, TransactionAbortedError, OutOfOrderSequenceNumberError, InvalidTxnStateError),
]
FAULTS = ["kill", "kill", "fail", "fail", "pause", "redis away", "redis emptied", "expire", "group forgotten"]
PASSAGES: list[Passage] = ["arrives twice", "arrives twice", "arrives too late"]
MAX_STEPS = 20_000
"""The limit on the steps of a story: a longer story never ends."""


class Killed(BaseException):
    """Ends the thread of a killed process. No code of the process may run after it, not even a clean-up."""


class Stop(threading.Event):
    """An editor's stop event. Waiting for it takes no time, but lets other threads run."""

    def __init__(self, step: Callable[[str], None]) -> None:
        super().__init__()
        self._step = step

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        self._step("wait")
        return self.is_set()


class History:
    """The committed log, as an undo reads it."""

    def __init__(self, kafka: MemoryKafka) -> None:
        self._kafka = kafka

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        all(on_record(record.value or b"") for record in self._kafka.committed(SETTINGS.kafka.topic(DELTAS)))

    def feedback_since(self, since: int) -> Mapping[int, Feedback]:
        found = {}
        for record in self._kafka.committed(SETTINGS.kafka.topic(FEEDBACK), since):
            with suppress(InvalidMessage):
                found[record.offset] = decode(record.value, Feedback)
        return found


class Process:
    """One process of an editor, from its start to its end."""

    def __init__(self, story: "Story", name: str) -> None:
        self.name, self._story = name, story
        self.started, self.paused, self.killed, self.over = False, False, False, False
        self.error: BaseException | None = None
        self.member: Any = None
        self.stop = Stop(self.step)
        self.engine = EditEngine(PointModel(2), CODEBOOK, story.plan)
        self._turn, self._back = (
            threading.Lock(),
            threading.Lock(),
        )  # each lock is held until the other side releases it
        self._turn.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run_editor, name=name, daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Run the thread until its next step."""
        self._turn.release()
        self._back.acquire()

    def step(self, operation: str) -> None:
        """Called before and after each operation of its clients."""
        if not self.killed:
            self._story.deliver_late_request()
            self._story.inject_fault(self, operation)
        while not self.killed and (self.paused or self._story.switches()):
            self._back.release()
            self._turn.acquire()
            if not self.paused:
                break
        if self.killed:
            raise Killed

    def end(self) -> None:
        """Let the thread of a killed process end."""
        self.killed = True
        if not self.over:
            self._turn.release()
        self._thread.join()

    def _run_editor(self) -> None:
        self._turn.acquire()
        try:
            if not self.killed:
                self._build_and_run()
        except Killed:
            return
        except BaseException as error:  # noqa: BLE001 - whatever it is, the story must go on to report it
            self.error = error
        finally:
            self.over = True
            self._back.release()

    def _build_and_run(self) -> None:
        story = self._story
        new_consumer = partial(self._consumer, story)
        new_producer = partial(story.kafka.producer, step=self.step)
        store = RedisHeadStore(
            story.redis.client(self.redis_step), SETTINGS.kafka.topic_prefix, SETTINGS.model.codebook
        )
        admission = Admission(
            CODEBOOK, None, require_signature=False, per_minute=0, accepted_since=lambda _: (), marks=lambda _: ()
        )
        log = EditorLog(SETTINGS.kafka, new_consumer, new_producer)
        history, at_work = History(story.kafka), partial(log.keep_alive, 0.0)
        traffic = TrafficReader(SETTINGS.kafka, self.engine, new_consumer)
        parts = EditorServices(
            engine=self.engine,
            log=log,
            feedback_processor=FeedbackProcessor(
                self.engine, admission, history, SETTINGS.kafka.max_record_bytes, traffic.catch_up_to_now, at_work
            ),
            traffic_reader=traffic,
            redis_publisher=RedisPublisher(store, self.engine.codebook, 0.0, retry_seconds=0.0),
            snapshot_writer=SnapshotWriter(SETTINGS.kafka, SETTINGS.snapshots),
            environment={"editor": self.name},
        )
        self.started = True
        Editor(parts, Health(), story.together).run(self.stop)

    def _consumer(self, story: "Story", settings: Settings, **options: Any) -> Any:
        made = story.kafka.consumer(settings, self.step, **options)
        if "group_id" in options:
            self.member = made
        return made

    def leave_group(self) -> None:
        """Remove the editor from its group, as the broker does without heartbeats."""
        if self.member is not None and self.member.member_id:
            self._story.kafka.remove(SETTINGS.kafka.topic("editor"), self.member.member_id)

    def redis_step(self, operation: str) -> None:
        """Called before and after each operation of its Redis client."""
        self.step(operation)
        if self._story.redis_is_away:
            raise RedisTimeout("Redis is away")


class Story:
    """The story of one seed. `play` it, then check what is `left`, and how each process ended.

    `epochs`: the lifetime of producers' epochs; by default one of the two of the product. `torn`: the probability of a
    fault of the network per request.
    """

    def __init__(self, seed: int, epochs: Epochs | None = None, torn: float = 0.05) -> None:
        self._random = random.Random(seed)
        chosen: Epochs = self._random.choice(("per end", "after a resent end"))
        self.plan = self._random.choice(PLANS)
        self.together = self._random.choice((1, 3))
        self.kafka = MemoryKafka([SETTINGS.kafka.topic(topic.name) for topic in TOPICS], epochs or chosen)
        self.kafka.network = self._passage
        self._torn = torn
        self.redis = MemoryRedis()
        self.redis_is_away = False
        self.processes: list[Process] = []
        self.happened: list[tuple[str, str, str]] = []
        """The faults so far: process, kind and operation."""
        self._troubles = self._random.randint(0, 10)
        self._unsent = [self._feedback(number) for number in range(self._random.randint(3, 8))]
        self._reader = self.kafka.consumer(SETTINGS)
        self._read: list[tuple[int, bytes]] = []

    def switches(self) -> bool:
        """True if another process runs next."""
        return self._random.random() < 0.25

    def deliver_late_request(self) -> None:
        """Sometimes deliver a late request."""
        if self.kafka.late and self._random.random() < 0.1:
            self.kafka.deliver(self._random.randrange(len(self.kafka.late)))

    def inject_fault(self, process: Process, operation: str) -> None:
        """Let a fault occur at this operation, or none in most cases."""
        if self._troubles == 0 or self._random.random() > 0.03:
            return
        self._troubles -= 1
        kind = self._random.choice(FAULTS)
        self.happened.append((process.name, kind, operation))
        match kind:
            case "kill":
                process.killed = True
            case "pause":
                process.paused = True
            case "expire":
                process.leave_group()
            case "group forgotten":
                self.kafka.forget(SETTINGS.kafka.topic("editor"))
            case "redis away":
                self.redis_is_away = True
            case "redis emptied":
                self.redis.flush()
            case "fail" if operation.startswith("redis"):
                raise RedisTimeout("Redis did not answer")
            case "fail" if operation not in ("wait", "close", "leave"):
                raise self._random.choice(FAILURES)("Kafka failed")

    def _passage(self, operation: str) -> Passage:
        """The network's effect on a request, none in most cases."""
        if operation == "send":
            return self._random.choice(("arrives", "arrives later"))
        if self._troubles == 0 or self._random.random() > self._torn:
            return "arrives"
        self._troubles -= 1
        found = self._random.choice(PASSAGES)
        self.happened.append(("the network", found, operation))
        return found

    def play(self) -> None:
        """Run the story from the first feedback to the end of all faults and all work."""
        for _ in range(MAX_STEPS):
            self._events()
            running = [process for process in self._alive() if not process.paused]
            if running:
                self._random.choice(running).run()
            if self._is_finished():
                break
        else:
            raise AssertionError(f"the story came to no rest: {self.happened}")
        self._troubles = 0
        for _ in range(30):  # so that standbys have read everything, and a fenced editor knows it
            for process in self._alive():
                process.run()

    def finish(self) -> None:
        """Stop every editor."""
        for process in self._alive():
            process.stop.set()
            while not process.over:
                process.run()
        for process in self.processes:
            process.end()

    def left(self) -> Left:
        """The input of the checker."""
        store = RedisHeadStore(self.redis.client(), SETTINGS.kafka.topic_prefix, SETTINGS.model.codebook)
        self._read_deltas()
        group = self.kafka.group(SETTINGS.kafka.topic("editor"))
        books = [(process.name, process.engine.codebook) for process in self._alive()]
        return Left(
            feedback=list(self.kafka.committed(SETTINGS.kafka.topic(FEEDBACK))),
            edits=list(self.kafka.committed(SETTINGS.kafka.topic(EDITS))),
            deltas=list(self.kafka.committed(SETTINGS.kafka.topic(DELTAS))),
            dead_letters=list(self.kafka.committed(SETTINGS.kafka.topic(FEEDBACK_DLQ))),
            position=next(iter(group.offsets.values()), None),
            head=store.read_head(0),
            radii=store.read_radii(),
            followers=[Follower(name, book.seq, book.digest.hex(), book.state_digest()) for name, book in books],
            read={"a follower": self._read},
        )

    def errors(self) -> list[BaseException]:
        """The errors of editors, without those of a newer editor and of a Kafka that did not answer at their start."""
        errors = [process.error for process in self.processes if process.started]
        return [error for error in errors if error is not None and not isinstance(error, StaleHeadError)]

    def outlived(self) -> set[str]:
        """Editors that still run although another editor has led since they did."""
        deltas = (decode_delta(record.value or b"") for record in self.kafka.committed(SETTINGS.kafka.topic(DELTAS)))
        leads = [delta.environment["editor"] for delta in deltas if delta.environment is not UNSET]
        followed = {name for place, name in enumerate(leads) if set(leads[place:]) != {name}}
        return followed & {process.name for process in self._alive()}

    def _feedback(self, number: int) -> bytes:
        if self._random.random() < 0.1:
            return b"what is this"
        target = self._random.randint(1, CLASSES)  # the last target is no class, so it is rejected
        author = self._random.choice(AUTHORS)
        if number and self._random.random() < 0.2:
            all_of = self._random.random() < 0.25
            taken_back: dict[str, Any] = (
                {"undo_author": author} if all_of else {"undo": f"f{self._random.randrange(number)}"}
            )
            return encode(Feedback(v=SCHEMA_VERSION, feedback_id=f"f{number}", **taken_back))
        if number and self._random.random() < 0.15:
            edit = f"f{self._random.randrange(number)}"
            return encode(
                Feedback(
                    v=SCHEMA_VERSION, feedback_id=f"f{number}", inputs=self._point(), except_from=edit, author=author
                )
            )
        name = "f0" if self._random.random() < 0.05 else f"f{number}"
        given = Feedback(v=SCHEMA_VERSION, feedback_id=name, inputs=self._point(), target=str(target), author=author)
        return encode(given)

    def _point(self) -> str:
        return at(self._random.randint(0, 3) * 0.4, self._random.randint(0, 1) * 0.4)

    def _events(self) -> None:
        """Events of users, brokers and the supervisor of processes."""
        chance = self._random.random
        if self._unsent and chance() < 0.1:
            self.kafka.append(SETTINGS.kafka.topic(FEEDBACK), self._unsent.pop(0))
        if chance() < 0.05:
            request = Request(v=SCHEMA_VERSION, request_id="r", inputs=self._point())
            self.kafka.append(SETTINGS.kafka.topic(REQUESTS), encode(request))
        if chance() < 0.1:
            self._read_deltas()
        for process in self.processes:
            if (process.killed or process.paused or process.over) and chance() < 0.05:
                process.leave_group()
            if process.paused and chance() < 0.03:
                process.paused = False
        if self.redis_is_away and chance() < 0.03:
            self.redis_is_away = False
        if len(self._alive()) < 2 and chance() < 0.1:
            self.processes.append(Process(self, f"editor-{len(self.processes) + 1}"))

    def _is_finished(self) -> bool:
        if (
            self._unsent
            or self.kafka.late
            or self.redis_is_away
            or len(self._alive()) < 2
            or any(p.paused for p in self._alive())
        ):
            return False
        group = self.kafka.group(SETTINGS.kafka.topic("editor"))
        feedback = self.kafka.end(SETTINGS.kafka.topic(FEEDBACK))
        if set(group.offsets.values()) != {feedback}:
            return False
        deltas = [record.value for record in self.kafka.committed(SETTINGS.kafka.topic(DELTAS))]
        head = RedisHeadStore(self.redis.client(), SETTINGS.kafka.topic_prefix, SETTINGS.model.codebook).read_head(0)
        leaders = [process for process in self._alive() if process.member and process.member.member_id == group.owner]
        return (
            head is not None
            and len(leaders) == 1
            and head.seq == decode_delta(deltas[-1] or b"").seq
            and len(
                RedisHeadStore(self.redis.client(), SETTINGS.kafka.topic_prefix, SETTINGS.model.codebook).read_radii()
            )
            == len(leaders[0].engine.codebook)
            and leaders[0].engine.codebook.seq == head.seq
        )

    def _alive(self) -> list[Process]:
        return [process for process in self.processes if not process.killed and not process.over]

    def _read_deltas(self) -> None:
        partition = TopicPartition(SETTINGS.kafka.topic(DELTAS), 0)
        if not self._reader.assignment():
            self._reader.assign([partition])
        for record in self._reader.poll().get(partition, []):
            self._read.append((record.offset, record.value or b""))
