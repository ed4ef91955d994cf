"""The wait for Kafka at start: what is reported how often, and which errors end it at once."""

import itertools
from collections.abc import Iterator

import pytest
from kafka.errors import KafkaConnectionError

from gracestream.pipeline.kafka import clients, waiting
from gracestream.pipeline.kafka.clients import wait_for_kafka
from gracestream.pipeline.kafka.waiting import UnreachableError
from gracestream.pipeline.settings import SettingsError, load_settings


class Clock:
    """Time that passes only where someone sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def printed_lines(monkeypatch: pytest.MonkeyPatch, reasons: Iterator[str]) -> list[str]:
    """The lines of a wait of 12 s, in each second of which Kafka fails for the next reason."""

    def ask(*_: object) -> None:
        raise KafkaConnectionError(next(reasons))

    monkeypatch.setattr(waiting, "time", Clock())
    monkeypatch.setattr(clients, "ping_kafka", ask)
    lines: list[str] = []
    with pytest.raises(UnreachableError, match="Kafka at broker:9092 does not answer over PLAINTEXT"):
        wait_for_kafka(load_settings(kafka="broker:9092", startup_timeout=12).kafka, lines.append)
    return lines


def test_the_same_is_told_at_once_and_then_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed_lines(monkeypatch, itertools.repeat("gone"))
    assert [line.partition(" (")[0] for line in lines] == [
        f"waiting for Kafka at broker:9092, {left} s more" for left in (12, 7, 2)
    ]
    assert all("gone" in line for line in lines)


def test_another_reason_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed_lines(monkeypatch, itertools.chain(["gone", "gone"], itertools.repeat("no leader")))
    assert [line.split(", ")[1].partition(" s")[0] for line in lines] == ["12", "10", "5"]
    assert ["no leader" in line for line in lines] == [False, True, True]


def test_whoever_has_set_no_kafka_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> None:
        raise KafkaConnectionError("gone")

    monkeypatch.delenv("GRACESTREAM_KAFKA", raising=False)
    monkeypatch.setattr(waiting, "time", Clock())
    monkeypatch.setattr(clients, "ping_kafka", ask)
    with pytest.raises(UnreachableError, match=r"; GRACESTREAM_KAFKA is not set: set it to .* `gracestream up` prints"):
        wait_for_kafka(load_settings().kafka, lambda _: None)


@pytest.mark.parametrize(
    ("kafka", "named"),
    [
        ("", "''"),
        ("localhost", "'localhost'"),
        ("broker:9092,", "''"),
        ("broker-1:9092, broker-2", "'broker-2'"),
        ("PLAINTEXT://broker:9092", "'PLAINTEXT://broker:9092'"),
        ("broker:kafka", "'broker:kafka'"),
        ("broker:70000", "'broker:70000'"),
        ("broker:0", "'broker:0'"),
        (":9092", "':9092'"),
        ("::1:9092", "'::1:9092'"),
    ],
)
def test_what_is_no_address_is_not_waited_for(kafka: str, named: str) -> None:
    lines: list[str] = []
    with pytest.raises(SettingsError) as caught:
        wait_for_kafka(load_settings(kafka=kafka).kafka, lines.append)
    assert str(caught.value).startswith(f"GRACESTREAM_KAFKA: {named} is not host:port; set it to ")
    assert lines == []


@pytest.mark.parametrize("kafka", ["broker:9092", "a.b-c_d:1, 10.0.0.1:65535", "[::1]:9092"])
def test_addresses_may_be_names_or_numbers_with_blanks_between(kafka: str) -> None:
    assert [server.strip() for server in kafka.split(",")] == clients._bootstrap_servers(
        load_settings(kafka=kafka).kafka
    )
