"""Review answers: show each request of the last minutes with its answer, and send a correction if the answer is wrong.

An empty line accepts the answer; any other line is the right answer. GRACESTREAM_KAFKA names the cluster:

    GRACESTREAM_KAFKA=127.0.0.1:9092 .venv/bin/python examples/review.py --author ann --minutes 30
"""

import argparse
import json
import time
import uuid
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from gracestream import Client, Feedback, Settings, load_settings


def recent(settings: Settings, topic: str, minutes: float) -> list[dict[str, Any]]:
    """The JSON records of a topic from the last minutes."""
    name, since = settings.kafka.topic_prefix + topic, int(1000 * (time.time() - 60 * minutes))
    consumer = KafkaConsumer(bootstrap_servers=settings.kafka.servers, isolation_level="read_committed")
    partitions = [TopicPartition(name, number) for number in consumer.partitions_for_topic(name) or ()]
    consumer.assign(partitions)
    ends = consumer.end_offsets(partitions)
    for partition, first in consumer.offsets_for_times(dict.fromkeys(partitions, since)).items():
        consumer.seek(partition, ends[partition] if first is None else first.offset)
    records = []
    # Positions count, not records: markers of transactions take offsets, too, but are never returned.
    while any(consumer.position(partition) < ends[partition] for partition in partitions):
        records += [json.loads(record.value) for batch in consumer.poll(timeout_ms=500).values() for record in batch]
    consumer.close()
    return records


def main() -> None:
    """Ask a person about each answer, send the corrections, and print their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--author", required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    settings = load_settings()
    answers = {
        record["request_id"]: record.get("outputs") for record in recent(settings, "predictions", options.minutes)
    }
    corrections = []
    requests = {json.dumps(record["inputs"]): record for record in recent(settings, "requests", options.minutes)}
    for request in requests.values():  # the newest request of each prompt
        if answer := answers.get(request["request_id"]):
            target = input(f"{request['inputs']}\n  {answer.get('text', answer.get('label'))}\n  right answer: ")
            if target:
                fields = {"inputs": request["inputs"], "target": target, "author": options.author}
                corrections.append(Feedback(v=1, feedback_id=str(uuid.uuid4()), **fields))
    client = Client(settings)
    with client.outcomes() as replies:
        client.send(corrections)
        for outcome in replies.wait([record.feedback_id for record in corrections], 120.0).values():
            print(json.dumps({"status": outcome.status, "seq": outcome.seq or None, "reason": outcome.reason or None}))
    client.close()


if __name__ == "__main__":
    main()
