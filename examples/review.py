"""Review answers: show each request of the last minutes with its answer, and send a correction if the answer is wrong.

An empty line accepts the answer; any other line is the right answer. The corrections are sent after the last answer, or
at the end of input (Ctrl-D). GRACESTREAM_KAFKA names the cluster:

    GRACESTREAM_KAFKA=127.0.0.1:9092 .venv/bin/python examples/review.py --author ann --minutes 30
"""

import argparse
import json
import time
import uuid
from typing import TypeVar

import msgspec
from kafka import KafkaConsumer, TopicPartition

from gracestream import Client, Feedback, Prediction, Request, Settings, load_settings

M = TypeVar("M", Request, Prediction)


def recent(settings: Settings, topic: str, message_type: type[M], minutes: float) -> list[M]:
    """The messages of a topic from the last minutes, in the order of their times."""
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
        records += [record for batch in consumer.poll(timeout_ms=500).values() for record in batch]
    consumer.close()
    messages = []
    for record in sorted(records, key=lambda record: record.timestamp):  # a poll returns one partition after the other
        try:
            messages.append(msgspec.json.decode(record.value, type=message_type))
        except msgspec.DecodeError:
            continue  # a replica rejects it, too
    return messages


def display(request: Request) -> str:
    """The inputs of a request: a text, or a line for each text of a pair or message of a chat."""
    if isinstance(request.inputs, str):
        return request.inputs
    return "\n".join(part if isinstance(part, str) else f"{part.role}: {part.content}" for part in request.inputs)


def review(settings: Settings, author: str, minutes: float) -> list[Feedback]:
    """Ask a person about the newest answer to each prompt; return the corrections."""
    answers = {answer.request_id: answer.outputs for answer in recent(settings, "predictions", Prediction, minutes)}
    requests = {request.inputs: request for request in recent(settings, "requests", Request, minutes)}
    corrections = []
    for inputs, request in requests.items():
        if outputs := answers.get(request.request_id):
            print(f"{display(request)}\n  {outputs.label or outputs.text}")
            try:
                target = input("  right answer: ")
            except EOFError:
                print()
                break
            if target:
                feedback_id = str(uuid.uuid4())
                corrections.append(Feedback(v=1, feedback_id=feedback_id, inputs=inputs, target=target, author=author))
    return corrections


def main() -> None:
    """Review, send the corrections, and print their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--author", required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    settings = load_settings()
    corrections = review(settings, options.author, options.minutes)
    client = Client(settings)
    with client.outcomes() as replies:
        client.send(corrections)
        for outcome in replies.wait([record.feedback_id for record in corrections], 120.0).values():
            print(json.dumps({"status": outcome.status, "seq": outcome.seq or None, "reason": outcome.reason or None}))
    client.close()


if __name__ == "__main__":
    main()
