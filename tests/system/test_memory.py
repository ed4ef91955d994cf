"""Compressed records are read in bounded memory by each reader, and block no record behind them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from gracestream.pipeline.editor.editor import MAX_UNCOMMITTED_BYTES
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.kafka.lenient_records import MAX_BATCH_BYTES, TRUNCATED_BYTES, record_memory_bytes
from gracestream.pipeline.kafka.topics import DELTAS, FEEDBACK, FEEDBACK_DLQ, PREDICTIONS, REQUESTS, REQUESTS_DLQ
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.settings import Settings, to_environment_variables
from tests.support.forked_commands import Forked, explicit_settings
from tests.support.hostile import Hostile, crowded_batches
from tests.support.running import Users, flag, headers_of, question, records, wait_for_open_transactions, wait_until
from tests.support.tiny_models import added, sealed, texts
from tests.support.written_history import History
from tests.system.test_poison import send, wait_until_done

MIB = 2**20
LARGE = {"gzip": 200 * MIB, "lz4": 200 * MIB, "zstd": 200 * MIB, "snappy": 20 * MIB}
"""Bytes of a record that Kafka stores in less than 1 MiB; snappy compresses least."""

COUNT = 6
BOUND = 48 * MIB
"""Memory that a reader may use beyond that for small records; a worker may use five times as much."""

KEYS, KEY_BYTES = 80, 16 * MIB

WIDTH = 5 * MIB
"""The width of an entry's key; with its value a delta has eight times as many bytes."""

PROMPT = texts(1, seed=3, shortest=6)[0]

READ = """
import json, sys
from pathlib import Path
from typing import Any
import gracestream.pipeline.kafka.reader as reader
from gracestream.pipeline.settings import load_settings

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

if sys.argv[1] == "aiokafka":
    reader.BULK_MIN_OFFSETS = 1
settings = load_settings().kafka
list(reader.read_topic(settings, "edits"))
before, found = memory("VmRSS"), []
for record in reader.read_topic(settings, sys.argv[2]):
    found.append([record.offset, len(record.value), getattr(record.value, "size", len(record.value))])
print(json.dumps([memory("VmHWM") - before, found]))
"""


def send_large(settings: Settings, topic: str, codec: str, count: int) -> list[int]:
    """Send this many records of the largest size, each followed by a small record; returns their offsets."""
    name, offsets = settings.kafka.topic(topic), []
    sender = producer(settings.kafka, compression_type=codec)
    try:
        sender._max_request_size = sender.config["max_request_size"] = 2 * LARGE[codec]
        for number in range(count):
            offsets.append(sender.send(name, b"x" * LARGE[codec], b"%d" % number, partition=0).get(120).offset)
            sender.send(name, b"small", partition=0).get(60)
    finally:
        sender.close(timeout=10)
    return offsets


def peak(worker: Forked) -> int:
    """The peak memory of a worker."""
    lines = Path(f"/proc/{worker.process.pid}/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def resident(worker: Forked) -> int:
    """The present memory of a worker."""
    held: int = psutil.Process(worker.process.pid).memory_info().rss
    return held


@pytest.mark.slow
@pytest.mark.parametrize("library", ["kafka-python", "aiokafka"])
@pytest.mark.parametrize("codec", LARGE)
def test_a_reader_never_holds_a_whole_large_record(deployment: Settings, library: str, codec: str) -> None:
    large = send_large(deployment, FEEDBACK, codec, 3)
    send(deployment, "edits", [Hostile(b"{}", None, [])] * 10, partitions=1)
    ran = subprocess.run(
        [sys.executable, "-c", READ, library, FEEDBACK],
        env=to_environment_variables(explicit_settings(deployment)),
        capture_output=True,
        check=True,
        timeout=120,
    )
    grown, found = json.loads(ran.stdout)
    kept = [[offset, TRUNCATED_BYTES, LARGE[codec]] for offset in large]
    assert [one for one in found if one[0] in large] == kept
    assert [one[1] for one in found if one[0] not in large] == [5] * len(large)
    assert grown < BOUND, f"{grown / MIB:.0f} MiB"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", ["lz4"])
def test_workers_dead_letter_large_records_in_bounded_memory(
    deployment: Settings, users: Users, folder: Path, codec: str
) -> None:
    with (
        Forked("editor", "edit", deployment, folder) as editor,
        Forked("replica", "infer", deployment, folder) as replica,
    ):
        workers = (editor, replica)
        for worker in workers:
            worker.wait_ready(90)
        assert users.correct(flag("before", PROMPT, "museum"))["before"].status == "added"
        assert users.ask(question("before", PROMPT))["before"].outputs
        before = [resident(worker) for worker in workers]
        sent = {topic: send_large(deployment, topic, codec, COUNT) for topic in (REQUESTS, FEEDBACK)}
        assert users.correct(flag("after", PROMPT, "museum"), timeout=90)["after"].status == "unchanged"
        users.client.send([question("after", PROMPT)], partition=0)
        wait_until_done(deployment, REQUESTS, "inference")
        wait_for_open_transactions(deployment, FEEDBACK_DLQ)
        grown = [peak(worker) - was for worker, was in zip(workers, before, strict=True)]
    for topic, queue in ((REQUESTS, REQUESTS_DLQ), (FEEDBACK, FEEDBACK_DLQ)):
        dead_letters = {int(headers_of(letter)["source_offset"]): letter for letter in records(deployment, queue)}
        assert len(dead_letters) == 2 * COUNT
        for offset in sent[topic]:
            headers = headers_of(dead_letters[offset])
            assert headers["value_bytes"] == str(LARGE[codec])
            assert headers["reason"] == (
                f"the batch decompresses to more than {MAX_BATCH_BYTES} bytes,"
                f" so the record at offset {offset} cannot be read"
            )
            assert dead_letters[offset].value == b"x" * TRUNCATED_BYTES
    assert max(grown) < 5 * BOUND, [f"{one / MIB:.0f} MiB" for one in grown]


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("codec", "each", "batches"), [(None, 1, 6), ("zstd", 16, 20)], ids=["none", "zstd"])
def test_workers_go_on_behind_records_with_hundreds_of_thousands_of_headers(
    deployment: Settings,
    users: Users,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str | None,
    each: int,
    batches: int,
) -> None:
    with (
        Forked("editor", "edit", deployment, folder) as editor,
        Forked("replica", "infer", deployment, folder) as replica,
    ):
        workers = (editor, replica)
        for worker in workers:
            worker.wait_ready(90)
        assert users.correct(flag("before", PROMPT, "museum"))["before"].status == "added"
        assert users.ask(question("before", PROMPT))["before"].outputs
        before = [resident(worker) for worker in workers]
        sender = producer(deployment.kafka, compression_type=codec, enable_idempotence=False)
        with monkeypatch.context() as crowded:
            crowded_batches(crowded, each, b"{}", 450_000)
            for topic in (REQUESTS, FEEDBACK):
                for _ in range(batches):
                    sender.send(deployment.kafka.topic(topic), b"", partition=0).get(60)
        sender.close(timeout=10)
        users.client.send([question("after", PROMPT)], partition=0)
        wait_until_done(deployment, REQUESTS, "inference", timeout=90)
        assert users.correct(flag("after", PROMPT, "museum"), timeout=90)["after"].status == "unchanged"
        wait_for_open_transactions(deployment, FEEDBACK_DLQ)
        grown = [peak(worker) - was for worker, was in zip(workers, before, strict=True)]
    for queue in (REQUESTS_DLQ, FEEDBACK_DLQ):
        assert [(letter.key, letter.value) for letter in records(deployment, queue)] == [(b"key", b"{}")] * (
            each * batches
        )
    answered = [json.loads(record.value)["request_id"] for record in records(deployment, PREDICTIONS)]
    assert answered == ["before", "after"]
    assert max(grown) < 5 * BOUND, [f"{one / MIB:.0f} MiB" for one in grown]


def transactions(found: list[Any]) -> list[list[Any]]:
    """The transactions of a partition's committed records. Each ends with a control record, a gap in the offsets."""
    taken: list[list[Any]] = []
    for record in found:
        if not taken or record.offset > taken[-1][-1].offset + 1:
            taken.append([])
        taken[-1].append(record)
    return taken


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_large_keys_are_committed_in_bounded_transactions_and_memory(
    deployment: Settings, users: Users, folder: Path
) -> None:
    key = b"k" * KEY_BYTES
    with Forked("editor", "edit", deployment, folder) as editor:
        editor.wait_ready(90)
        assert users.correct(flag("before", PROMPT, "museum"))["before"].status == "added"
        before = resident(editor)
        editor.pause()  # so that all of them wait together
        sender = producer(deployment.kafka, compression_type="zstd")
        sender._max_request_size = sender.config["max_request_size"] = 2 * KEY_BYTES
        for number in range(KEYS):
            sender.send(deployment.kafka.topic(FEEDBACK), b"%d" % number, key, partition=0).get(60)
        sender.close(timeout=10)
        editor.resume()
        assert users.correct(flag("after", PROMPT, "museum"), timeout=90)["after"].status == "unchanged"
        wait_for_open_transactions(deployment, FEEDBACK_DLQ)
        grown = peak(editor) - before
    dead_letters = records(deployment, FEEDBACK_DLQ)
    assert [letter.value for letter in dead_letters] == [b"%d" % number for number in range(KEYS)]
    assert {letter.key for letter in dead_letters} == {key[:TRUNCATED_BYTES]}
    assert {headers_of(letter)["key_bytes"] for letter in dead_letters} == {str(KEY_BYTES)}
    sizes = [sum(map(record_memory_bytes, together)) for together in transactions(dead_letters)]
    assert max(sizes) < MAX_UNCOMMITTED_BYTES + 8 * TRUNCATED_BYTES, (
        "one record more than the limit, and the headers of all"
    )
    assert grown < 5 * BOUND, f"{grown / MIB:.0f} MiB"


def test_a_replica_stops_at_a_batch_of_deltas_beyond_the_bound(deployment: Settings, folder: Path) -> None:
    with Forked("replica", "infer", deployment, folder) as replica:
        replica.wait_ready(90)
        before = resident(replica)
        (offset,) = send_large(deployment, DELTAS, "zstd", 1)
        wait_until(lambda: replica.ready()[0] == 503, what="the stop")
        assert replica.ready()[1].strip() == fault_of(offset)
        assert replica.state()["seq"] == 0
        grown = peak(replica) - before
    assert grown < 5 * BOUND, f"{grown / MIB:.0f} MiB"


def test_a_follower_returns_nothing_behind_a_batch_of_deltas_beyond_the_bound(deployment: Settings) -> None:
    history, follower = History(deployment), DeltaFollower(deployment.kafka)
    history.lead()
    together = []
    for number in range(2):  # each is within the bound, but not both together
        together.append(sealed(history.codebook, added(f"wide{number}", np.full(WIDTH, number, np.float32), 0.1)))
        history.codebook.apply(together[-1])
    sender = producer(deployment.kafka, compression_type="zstd", linger_ms=60_000, batch_size=32 * WIDTH)
    sender._max_request_size = sender.config["max_request_size"] = sender.config["batch_size"]
    sent = [sender.send(deployment.kafka.topic(DELTAS), record, partition=0) for record in together]
    sender.close(timeout=60)
    first, second = (one.get(1).offset for one in sent)
    history.step(added("narrow", np.zeros(WIDTH, np.float32), 0.1))
    follower.start()
    try:
        wait_until(lambda: follower.at_end)
        taken = follower.poll(history.codebook.seq, 0)
        assert [offset for offset, _ in taken] == [0, first]
        assert taken[1][1] == together[0]
        with pytest.raises(HistoryError, match=re.escape(fault_of(second))):
            follower.poll(history.codebook.seq, 0)
    finally:
        follower.close()
        history.close()


def fault_of(offset: int) -> str:
    """The error for a record of `deltas` that makes its batch too large."""
    return (
        f"the record at offset {offset} of deltas cannot be read: the batch decompresses to more than"
        f" {MAX_BATCH_BYTES} bytes, so the record at offset {offset} cannot be read"
    )
