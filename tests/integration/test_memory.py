"""What Kafka holds compressed is read in bounded memory, by whichever reader, and holds up nothing behind it."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.clients import producer
from pipeline.records import BATCH_BYTES, KEPT_BYTES
from pipeline.settings import Settings, as_environment
from pipeline.topics import FEEDBACK, FEEDBACK_DLQ, REQUESTS, REQUESTS_DLQ
from tests.hostile import Hostile
from tests.integration.forked import Forked, as_given
from tests.integration.running import Users, flag, headers_of, question, records, wait_until_settled
from tests.integration.test_poison import send, wait_until_done
from tests.unit.engine.tiny import texts

MIB = 2**20
LARGE = {"gzip": 200 * MIB, "lz4": 200 * MIB, "zstd": 200 * MIB, "snappy": 20 * MIB}
"""Bytes of a record that Kafka takes as one of less than 1 MiB; snappy makes little of it less small."""

COUNT = 12
BOUND = 48 * MIB
"""What a reader may need beyond what it needs for small records; a worker may need five times that."""

PROMPT = texts(1, seed=3, shortest=6)[0]

READ = """
import json, sys
from pathlib import Path
import pipeline.reading as reading
from pipeline.settings import load_settings

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

if sys.argv[1] == "aiokafka":
    reading.BULK = 1
settings = load_settings()
list(reading.read_topic(settings, "edits"))
before, found = memory("VmRSS"), []
for record in reading.read_topic(settings, sys.argv[2]):
    found.append([record.offset, len(record.value), getattr(record.value, "size", len(record.value))])
print(json.dumps([memory("VmHWM") - before, found]))
"""


def send_large(settings: Settings, topic: str, codec: str, count: int) -> list[int]:
    """So many records as large as they may be, each followed by a small one; their offsets."""
    name, offsets = settings.topic(topic), []
    sender = producer(settings, compression_type=codec)
    try:
        sender._max_request_size = sender.config["max_request_size"] = 2 * LARGE[codec]
        for number in range(count):
            offsets.append(sender.send(name, b"x" * LARGE[codec], b"%d" % number, partition=0).get(120).offset)
            sender.send(name, b"small", partition=0).get(60)
    finally:
        sender.close(timeout=10)
    return offsets


def peak(worker: Forked) -> int:
    """The most memory that a worker has ever held."""
    lines = Path(f"/proc/{worker.process.pid}/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def resident(worker: Forked) -> int:
    """The memory that a worker holds."""
    held: int = psutil.Process(worker.process.pid).memory_info().rss
    return held


@pytest.mark.parametrize("library", ["kafka-python", "aiokafka"])
@pytest.mark.parametrize("codec", LARGE)
def test_a_reader_holds_no_large_record_whole(deployment: Settings, library: str, codec: str) -> None:
    large = send_large(deployment, FEEDBACK, codec, 3)
    send(deployment, "edits", [Hostile(b"{}", None, [])] * 10, partitions=1)
    ran = subprocess.run(
        [sys.executable, "-c", READ, library, FEEDBACK],
        env=as_environment(as_given(deployment)),
        capture_output=True,
        check=True,
        timeout=120,
    )
    grown, found = json.loads(ran.stdout)
    kept = [[offset, KEPT_BYTES, LARGE[codec]] for offset in large]
    assert [one for one in found if one[0] in large] == kept
    assert [one[1] for one in found if one[0] not in large] == [5] * len(large)
    assert grown < BOUND, f"{grown / MIB:.0f} MiB"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", ["lz4"])
def test_workers_set_large_records_aside_in_bounded_memory(
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
        wait_until_settled(deployment, FEEDBACK_DLQ)
        grown = [peak(worker) - was for worker, was in zip(workers, before, strict=True)]
    for topic, queue in ((REQUESTS, REQUESTS_DLQ), (FEEDBACK, FEEDBACK_DLQ)):
        letters = {int(headers_of(letter)["source_offset"]): letter for letter in records(deployment, queue)}
        assert len(letters) == 2 * COUNT
        for offset in sent[topic]:
            headers = headers_of(letters[offset])
            assert headers["value_bytes"] == str(LARGE[codec])
            assert headers["reason"] == (
                f"the batch decompresses to more than {BATCH_BYTES} bytes,"
                f" so the record at offset {offset} cannot be read"
            )
            assert letters[offset].value == b"x" * KEPT_BYTES
    assert max(grown) < 5 * BOUND, [f"{one / MIB:.0f} MiB" for one in grown]
