"""Batches that Kafka takes and its Python clients misread: each record is read once, at its offset."""

from pathlib import Path
from typing import Any

import pytest

from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import Prediction, decode, encode
from tests.support.forked_commands import Forked
from tests.support.hostile import Unreadable, odd_batches
from tests.support.running import flag, outcomes_in_log, question, records, wait_until
from tests.support.tiny_models import texts

PROMPTS = texts(20, seed=7, shortest=6, longest=9)
FAR = 2**31 - 1

ODD = pytest.mark.parametrize(
    ("attributes", "delta", "name"),
    [(0x80, 1, "any"), (0x80, 1, Unreadable("odd")), (0, FAR, "any"), (0, 7, "any"), (0, -5, "any")],
    ids=["attributes", "attributes and a name", "far ahead", "ahead", "behind"],
)


def send(settings: Settings, topic: str, *messages: Any, name: str = "any") -> None:
    """Send records in one batch, or in few."""
    writer = producer(settings.kafka, linger_ms=200)
    for message in messages:
        writer.send(settings.kafka.topic(topic), value=encode(message), headers=[(name, b"\xff")], partition=0)
    writer.flush()
    writer.close()


@pytest.mark.slow
@ODD
def test_a_replica_answers_every_request_once(
    deployment: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attributes: int, delta: int, name: str
) -> None:
    def answered() -> list[str]:
        return [decode(record.value, Prediction).request_id for record in records(deployment, "predictions")]

    with Forked("replica", "infer", deployment, tmp_path) as replica:
        replica.wait_ready()
        with monkeypatch.context() as odd:
            odd_batches(odd, attributes, delta)
            send(deployment, "requests", *(question(each, PROMPTS[0]) for each in ("a", "odd", "b")), name=name)
        wait_until(lambda: len(answered()) >= 3)
        later = [f"c{number}" for number in range(8)]
        send(deployment, "requests", *(question(each, PROMPTS[0]) for each in later))
        wait_until(lambda: len(answered()) >= 11)
        assert replica.stop() == 0
    assert sorted(answered()) == sorted(["a", "odd", "b", *later])


@pytest.mark.slow
@ODD
def test_a_restarted_editor_continues_at_the_right_offset(
    deployment: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attributes: int, delta: int, name: str
) -> None:
    def decided() -> list[str]:
        return [outcome.feedback_id for outcome in outcomes_in_log(deployment)]

    def corrections(*names: str) -> list[Any]:
        return [flag(each, PROMPTS[number], "museum") for number, each in enumerate(names)]

    with Forked("editor", "edit", deployment, tmp_path) as editor:
        editor.wait_ready(90)
        with monkeypatch.context() as odd:
            odd_batches(odd, attributes, delta)
            send(deployment, "feedback", *corrections("a", "odd"), name=name)
            send(deployment, "feedback", *corrections("odd alone"), name=name)
        wait_until(lambda: len(decided()) >= 3)
        editor.kill()
    later = [f"c{number}" for number in range(8)]
    send(deployment, "feedback", *corrections(*later))
    with Forked("next", "edit", deployment, tmp_path) as editor:
        wait_until(lambda: len(decided()) >= 11, 120)
        assert editor.stop() == 0
    assert decided() == ["a", "odd", "odd alone", *later]
