"""Hostile records on a topic: no worker dies, each is dead-lettered, and good records are answered.

`make chaos` sends ten thousand of each kind, the ordinary tests one of ten parts of them (`tests.support.rotation`).
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from kafka import TopicPartition
from msgspec import UNSET

from gracestream.pipeline.kafka.clients import consumer, producer
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import Feedback, Outcome, Prediction, Request, decode, encode
from tests.support.forked_commands import Forked
from tests.support.hostile import Hostile, Kind, Unreadable, hostile, readable_id, verdict
from tests.support.rotation import parts
from tests.support.running import Users, flag, headers_of, question, records, wait_for_open_transactions, wait_until
from tests.support.tiny_models import texts

HOSTILE = 1_000
"""Records of each kind per part that every model must reject."""

TIMEOUT = 900.0
"""Seconds for all records on a busy machine."""

MAX_IN_TRANSIT = 500
"""Limit on the records in transit to Kafka."""

Place = tuple[int, int]
"""Partition and offset."""


def place_of(sent: Any) -> Place:
    """The partition and offset of a sent record."""
    return sent.partition, sent.offset


def send(settings: Settings, topic: str, given: Sequence[Hostile], partitions: int) -> dict[Place, Hostile]:
    """Send all records to the partitions in turn; returns the place of each."""
    found = {}
    sender = producer(settings.kafka, linger_ms=5, compression_type="gzip")
    try:
        for start in range(0, len(given), MAX_IN_TRANSIT):
            sent = []
            for number, one in enumerate(given[start : start + MAX_IN_TRANSIT]):
                key = (
                    b"" if one.key is None and one.value is None else one.key
                )  # no client sends a record without key and value
                whole = Hostile(one.value, key, one.headers)
                name, partition = settings.kafka.topic(topic), number % partitions
                sent.append((sender.send(name, one.value, key, one.headers, partition), whole))
            sender.flush()
            found.update({place_of(future.get(timeout=60)): whole for future, whole in sent})
        return found
    finally:
        sender.close(timeout=10)


@pytest.fixture
def hostile_of(request: pytest.FixtureRequest) -> Callable[[Kind, int], list[Hostile]]:
    """The hostile records of all parts of this run."""

    def made(kind: Kind, max_bytes: int) -> list[Hostile]:
        return [one for part in parts(request.config) for one in hostile(kind, HOSTILE, max_bytes, start=part)]

    return made


def scattered(bad: Sequence[Hostile], good: Sequence[Request | Feedback], seed: int) -> list[Hostile]:
    """The hostile records with good records in between."""
    mixed = [*bad, *(Hostile(encode(message), None, []) for message in good)]
    random.Random(seed).shuffle(mixed)
    return mixed


def wait_until_done(settings: Settings, topic: str, group: str, timeout: float = TIMEOUT) -> None:
    """Wait until the group has committed every record of the topic, and its own records can be read."""
    reader = consumer(settings.kafka, group_id=settings.kafka.topic(group))
    try:
        name = settings.kafka.topic(topic)
        partitions = [TopicPartition(name, number) for number in reader.partitions_for_topic(name)]
        ends = reader.end_offsets(partitions)

        def left() -> int:
            return sum(max(0, end - (reader.committed(partition) or 0)) for partition, end in ends.items())

        wait_until(lambda: left() == 0, timeout, f"the end of {topic}, {left()} records away,")
    finally:
        reader.close()
    wait_for_open_transactions(settings, "deltas", "edits", f"{topic}.dlq")


def check_dead_letters(settings: Settings, topic: str, given: dict[Place, Hostile]) -> Counter[Place]:
    """Check that each dead letter is a sent record, unchanged, with reason and place; returns the counts by place."""
    found: Counter[Place] = Counter()
    for letter in records(settings, f"{topic}.dlq"):
        headers = headers_of(letter)
        place = int(headers["source_partition"]), int(headers["source_offset"])
        found[place] += 1
        assert headers["source_topic"] == settings.kafka.topic(topic)
        assert headers["reason"].isprintable()
        assert headers["reason"]
        assert len(letter.headers) == len(headers) == 4
        assert (letter.key, letter.value) == (given[place].key, given[place].value)
    return found


def memory(worker: Forked) -> int:
    """The memory of a worker in bytes."""
    resident: int = psutil.Process(worker.process.pid).memory_info().rss
    return resident


def check_requests(settings: Settings, given: dict[Place, Hostile], good: Sequence[Request]) -> Counter[Place]:
    """Check that each request is either dead-lettered or answered; returns the counts of dead letters."""
    answers: dict[str, list[Prediction]] = {}
    for record in records(settings, "predictions"):
        prediction = decode(record.value, Prediction)
        answers.setdefault(prediction.request_id, []).append(prediction)
        assert record.key == prediction.request_id.encode()
    dead_letters = check_dead_letters(settings, "requests", given)
    for place, one in given.items():
        request_id = readable_id("request", one.value)
        judged = verdict("request", one.value, settings.kafka.max_record_bytes)
        assert judged == "depends" or (place in dead_letters) == (judged == "bad"), (judged, one)
        if place not in dead_letters:
            assert request_id in answers, one
        elif request_id is not None:
            assert any(answer.error is not UNSET for answer in answers[request_id]), one
    known = {readable_id("request", one.value) for one in given.values()}
    assert answers.keys() <= known
    for request in good:
        assert all(answer.outputs is not UNSET for answer in answers[request.request_id])
    return dead_letters


def check_feedback(settings: Settings, given: dict[Place, Hostile]) -> tuple[Counter[Place], dict[int, Outcome]]:
    """Check that each feedback record has the right number of dead letters, and one outcome if its id can be read.

    Returns the counts of dead letters, and the outcomes by offset.
    """
    outcomes: dict[int, Outcome] = {}
    for record in records(settings, "edits"):
        offset = int(headers_of(record)["feedback_offset"])
        assert offset not in outcomes, "a second outcome"
        outcomes[offset] = decode(record.value, Outcome)
    dead_letters = check_dead_letters(settings, "feedback", given)
    assert max(dead_letters.values()) == 1, "dead-lettered twice"
    for place, one in given.items():
        feedback_id = readable_id("feedback", one.value)
        judged = verdict("feedback", one.value, settings.kafka.max_record_bytes)
        assert judged == "depends" or (place in dead_letters) == (judged == "bad"), (judged, one)
        if place not in dead_letters or feedback_id is not None:
            assert outcomes[place[1]].feedback_id == feedback_id
        else:
            assert place[1] not in outcomes
        if place in dead_letters and feedback_id is not None:
            assert outcomes[place[1]].status == "rejected"
    return dead_letters, outcomes


def test_a_header_name_that_is_not_utf8_stops_no_worker(deployment: Settings, users: Users, folder: Path) -> None:
    names: list[tuple[str, bytes]] = [(Unreadable("name"), b"value")]
    prompts = texts(16, seed=4, shortest=6)
    asked = [question(f"q{number}", prompt) for number, prompt in enumerate(prompts[:8])]
    flagged = [flag(f"f{number}", prompt, "museum") for number, prompt in enumerate(prompts[8:])]
    bad = [Hostile(b"no JSON", b"key", names), Hostile(b"{}", None, names)]
    with (
        Forked("editor", "edit", deployment, folder) as editor,
        Forked("replica", "infer", deployment, folder) as replica,
    ):
        editor.wait_ready(90)
        replica.wait_ready(90)
        requests = send(deployment, "requests", [*bad, *(Hostile(encode(one), None, names) for one in asked)], 1)
        feedback = send(deployment, "feedback", [*bad, *(Hostile(encode(one), None, names) for one in flagged)], 1)
        users.correct(flag("after", prompts[8], "museum"))
        users.ask(question("after", prompts[0]))
        wait_until_done(deployment, "requests", "inference")
        wait_until(lambda: editor.state()["traffic"] > 0, what="the editor's traffic")
    sent = {**requests, (0, len(requests)): Hostile(encode(question("after", prompts[0])), None, [])}
    assert check_requests(deployment, sent, asked).total() == len(bad)
    dead_letters, outcomes = check_feedback(deployment, feedback)
    assert dead_letters.total() == len(bad)
    assert [outcome.feedback_id for outcome in outcomes.values()] == [*(one.feedback_id for one in flagged), "after"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hostile_requests_are_dead_lettered_and_good_requests_answered(
    deploy: Callable[..., Settings], prefix: str, folder: Path, hostile_of: Callable[[Kind, int], list[Hostile]]
) -> None:
    settings = deploy("llama", prefix, min_seq_wait=0.05)
    prompts = texts(50, seed=1)
    good = [question(f"good-{number}", prompts[number % 50]) for number in range(500)]
    bad = hostile_of("request", settings.kafka.max_record_bytes)
    with (
        Forked("editor", "edit", settings, folder) as editor,
        Forked("first", "infer", settings, folder) as first,
        Forked("second", "infer", settings, folder) as second,
    ):
        workers = (editor, first, second)
        for worker in workers:
            worker.wait_ready(90)
        given = send(settings, "requests", scattered(bad, good, seed=1), partitions=4)
        wait_until_done(settings, "requests", "inference")
        dead_letters = check_requests(settings, given, good)
        assert len(dead_letters) >= HOSTILE
        assert all(worker.running and worker.ready()[0] == 200 for worker in workers)
        before = [memory(worker) for worker in workers]
        large = [Hostile(b"x" * 900_000, None, []) for _ in range(400)]
        send(settings, "requests", large, partitions=4)
        wait_until_done(settings, "requests", "inference")
        grown = [memory(worker) - was for worker, was in zip(workers, before, strict=True)]
        assert max(grown) < 200 * 2**20, "400 records of 900 kB do not stay in memory"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hostile_feedback_is_dead_lettered_once_and_good_feedback_decided(
    deploy: Callable[..., Settings], prefix: str, folder: Path, hostile_of: Callable[[Kind, int], list[Hostile]]
) -> None:
    settings = deploy("llama", prefix)
    good = [flag(f"good-{number}", prompt, "museum") for number, prompt in enumerate(texts(12, seed=2, shortest=6))]
    bad = hostile_of("feedback", settings.kafka.max_record_bytes)
    with Forked("editor", "edit", settings, folder) as editor:
        editor.wait_ready(90)
        given = send(settings, "feedback", scattered(bad, good, seed=2), partitions=1)
        wait_until_done(settings, "feedback", "editor")
        dead_letters, outcomes = check_feedback(settings, given)
        assert len(dead_letters) >= HOSTILE
        taken = {one.feedback_id: one.status for one in outcomes.values()}
        edited = {"added", "expanded", "split", "replaced", "unchanged"}
        assert {taken[one.feedback_id] for one in good} <= edited
        assert editor.ready()[0] == 200
