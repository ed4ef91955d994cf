"""Topics and headers of answers, and the fallbacks of answers that Kafka rejects."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from kafka.admin import ConfigResource, ConfigResourceType, NewTopic
from msgspec import UNSET

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.kafka.clients import admin, producer
from gracestream.pipeline.kafka.topics import TOPICS, create_topics
from gracestream.pipeline.settings import Settings
from gracestream.schemas.headers import MAX_COPIED_HEADER_BYTES, MAX_COPIED_HEADERS, RESERVED_HEADERS
from gracestream.schemas.messages import MAX_ID_LENGTH, Parameters, Prediction, Request, decode, encode
from tests.support.forked_commands import Command, Forked, status_of
from tests.support.running import BUILDERS, Users, llama, metric, question, records, wait_until
from tests.support.tiny_models import texts, tokenizer

PROMPTS = texts(40, seed=31, shortest=6, longest=9)
TOKENS = 1000
LARGEST = 2500
"""Batch limit of `predictions` in bytes: enough for one answer or error, not for two or for a long text."""

TINY = 1000
"""Batch limit in bytes that fits an answer, but not one with a header of this size."""


@pytest.fixture(scope="module")
def creating_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    """A Kafka that creates every requested topic, as its default is."""
    with LocalKafka(tmp_path_factory.mktemp("kafka"), properties={"auto.create.topics.enable": "true"}) as local:
        yield local


@dataclass(frozen=True, slots=True)
class Service:
    """A replica, its users, and their reply topics."""

    settings: Settings
    users: Users
    replica: Forked

    def send(self, message: Request, *headers: tuple[str, bytes | None], value: bytes | None = None) -> str:
        sender = producer(self.settings.kafka)
        sender.send(self.settings.kafka.topic("requests"), value=value or encode(message), headers=list(headers)).get(
            30
        )
        sender.close(timeout=5)
        return message.request_id

    def found(self, topic: str, request_id: str) -> list[Any]:
        return [one for one in records(self.settings, topic) if (one.key or b"").decode() == request_id]

    def answer(self, topic: str, request_id: str) -> tuple[Prediction, list[tuple[str, bytes | None]]]:
        """The answer to a request on a topic, and its headers."""
        (record,) = wait_until(lambda: self.found(topic, request_id))
        return decode(record.value, Prediction), list(record.headers)


@pytest.fixture(scope="module")
def service(
    creating_kafka: LocalKafka, redis_url: str, deploy: Callable[..., Settings], tmp_path_factory: Any
) -> Iterator[Service]:
    prefix = f"t{secrets.token_hex(4)}-"
    folder, checkpoint = tmp_path_factory.mktemp("replies"), tmp_path_factory.mktemp("long")
    llama(positions=TOKENS + 100).save_pretrained(checkpoint)
    tokenizer(BUILDERS["llama"][1]).save_pretrained(checkpoint)
    chosen = {"kafka": creating_kafka.bootstrap, "model": str(checkpoint), "max_new_tokens": TOKENS}
    settings = deploy("llama", prefix).replace(**chosen)
    create_topics(settings.kafka, partitions=1, replication=1)
    client = admin(settings.kafka)
    client.create_topics([NewTopic(f"{prefix}{name}", 1, 1) for name in ("answers", "small-answers", "tiny-answers")])
    by_age = next(topic.config for topic in TOPICS if topic.name == "predictions")
    for name, largest in (("predictions", LARGEST), ("small-answers", LARGEST), ("tiny-answers", TINY)):
        limited = {**by_age, "max.message.bytes": str(largest)}
        client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, f"{prefix}{name}", configs=limited)])
    client.close()
    users = Users(settings)
    with Forked("replica", "infer", settings, folder) as replica:
        replica.wait_ready(90)
        yield Service(settings, users, replica)
    users.close()


def long(request_id: str, number: int = 0) -> Request:
    return question(
        request_id, PROMPTS[number], parameters=Parameters(max_new_tokens=TOKENS, min_new_tokens=TOKENS - 1)
    )


class TestTooLarge:
    @pytest.mark.slow
    def test_a_reply_that_kafka_rejects_becomes_an_error_and_other_requests_are_answered(
        self, service: Service
    ) -> None:
        asked = [question(f"n{number}", prompt) for number, prompt in enumerate(PROMPTS)]
        answers = service.users.ask(*asked[:20], long("long"), *asked[20:], timeout=90)
        error = answers.pop("long").error
        assert f"larger than a record of topic {service.settings.kafka.topic('predictions')} may be" in str(error)
        assert len(answers) == len(asked)
        assert {answer.error for answer in answers.values()} == {UNSET}
        assert metric(service.replica.port, "gracestream_replies_rejected_total") >= 1

    def test_an_error_that_is_rejected_too_leaves_a_dead_letter(self, service: Service) -> None:
        name = "\U0001f600" * (MAX_ID_LENGTH - 8) + secrets.token_hex(4)
        service.send(long(name), ("k", bytes(600)))
        asked = service.users.ask(*(question(f"beside-{number}", PROMPTS[number]) for number in range(4)))
        assert {answer.error for answer in asked.values()} == {UNSET}

        def dead_letters() -> list[Any]:
            found = records(service.settings, "requests.dlq")
            return [one for one in found if one.value == encode(long(name))]

        (letter,) = wait_until(dead_letters)
        assert b"larger than a record of topic" in dict(letter.headers)["reason"]
        assert service.found("predictions", name) == []

    @pytest.mark.slow
    def test_resend_all_includes_requests_without_any_answer(
        self, service: Service, run: Callable[..., Command]
    ) -> None:
        silent, answered = (f"{name}-{secrets.token_hex(4)}" for name in ("silent", "answered"))
        service.send(long(silent), ("k", bytes(LARGEST)))
        service.send(question(answered, PROMPTS[0]), value=b'{"v": 1, "request_id": "%b"}' % answered.encode())

        def letter_of(name: str) -> Any:
            return next((one for one in records(service.settings, "requests.dlq") if name.encode() in one.value), None)

        left, kept = wait_until(lambda: letter_of(silent)), wait_until(lambda: letter_of(answered))
        assert dict(left.headers)["unanswered"] == b"true"
        assert "unanswered" not in dict(kept.headers)
        assert service.found("predictions", silent) == []
        assert status_of(run("dlq", "resend", "requests", "--all", settings=service.settings)) == 0
        sent = {dict(one.headers).get("replayed_from") for one in records(service.settings, "requests")}
        assert f"requests.dlq/{left.offset}".encode() in sent
        assert f"requests.dlq/{kept.offset}".encode() not in sent
        assert "larger than a record" in str(service.answer("predictions", silent)[0].error), "its headers are gone"


class TestHeaders:
    def test_headers_are_copied_to_the_answer(self, service: Service) -> None:
        headers = [("traceparent", b"00-1-2-01"), ("k", b"1"), ("k", b"2"), ("empty", b"")]
        name = service.send(question("h1", PROMPTS[0]), *headers)
        answer, found = service.answer("predictions", name)
        assert answer.error is UNSET
        assert found == headers

    def test_headers_are_copied_to_an_error(self, service: Service) -> None:
        bad = question("h2", PROMPTS[0], parameters=Parameters(max_new_tokens=TOKENS + 1))
        answer, found = service.answer("predictions", service.send(bad, ("k", b"1")))
        assert answer.error is not UNSET
        assert found == [("k", b"1")]

    def test_copied_headers_are_limited_and_exclude_reserved_names(self, service: Service) -> None:
        ours = [(name, b"1") for name in sorted(RESERVED_HEADERS) if name != "reply_to"]
        many = [(f"m{number}", b"x") for number in range(2 * MAX_COPIED_HEADERS)]
        name = service.send(question("h3", PROMPTS[0]), *ours, ("huge", bytes(MAX_COPIED_HEADER_BYTES)), *many)
        assert service.answer("predictions", name)[1] == many[:MAX_COPIED_HEADERS]


class TestReplyTo:
    def test_an_answer_goes_to_the_topic_of_its_request(self, service: Service) -> None:
        topic = service.settings.kafka.topic("answers").encode()
        bad = question("r2", PROMPTS[0], parameters=Parameters(max_new_tokens=TOKENS + 1))
        for request in (question("r1", PROMPTS[0]), bad):
            name = service.send(request, ("reply_to", b"of several the last"), ("k", b"1"), ("reply_to", topic))
            answer, headers = service.answer("answers", name)
            assert (answer.error is UNSET) == (request is not bad)
            assert headers == [("k", b"1")]
            assert service.found("predictions", name) == []

    @pytest.mark.slow
    def test_an_answer_too_large_for_its_topic_becomes_an_error_there(self, service: Service) -> None:
        to = ("reply_to", service.settings.kafka.topic("small-answers").encode())
        names = [service.send(question(f"rl{number}", PROMPTS[number]), to) for number in range(8)]
        large = service.send(long("rl-large"), to)
        assert "larger than a record of topic" in str(service.answer("small-answers", large)[0].error)
        for name in names:
            assert service.answer("small-answers", name)[0].error is UNSET

    def test_an_error_too_large_for_its_topic_goes_to_predictions(self, service: Service) -> None:
        to = ("reply_to", service.settings.kafka.topic("tiny-answers").encode())
        rejected = service.send(question("rt-large", PROMPTS[0]), to, ("k", bytes(TINY)))
        error = str(service.answer("predictions", rejected)[0].error)
        assert (
            f"larger than a record of topic {service.settings.kafka.topic('tiny-answers')} may be; ask for less"
            in error
        )
        assert service.answer("tiny-answers", service.send(question("rt", PROMPTS[0]), to))[0].error is UNSET

    def test_reply_to_may_name_predictions(self, service: Service) -> None:
        to = ("reply_to", service.settings.kafka.topic("predictions").encode())
        assert service.answer("predictions", service.send(question("r3", PROMPTS[0]), to))[0].error is UNSET

    @pytest.mark.parametrize(
        ("topic", "reason"),
        [
            *((topic.name, "one of gracestream's own topics") for topic in TOPICS if topic.name != "predictions"),
            ("another-deltas", "one of gracestream's own topics"),
            ("nowhere", "does not exist"),
            ("a b", "not a valid topic name"),
            ("x" * 300, "not a valid topic name"),
            ("/../etc", "not a valid topic name"),
        ],
    )
    def test_an_unusable_topic_gives_an_error_on_predictions(self, service: Service, topic: str, reason: str) -> None:
        self.is_rejected(service, service.settings.kafka.topic(topic), reason)

    @pytest.mark.parametrize("topic", ["", "__consumer_offsets", "elsewhere", "\udcff"])
    def test_a_topic_outside_the_deployment_gives_an_error_on_predictions(self, service: Service, topic: str) -> None:
        self.is_rejected(service, topic, "not a valid topic name|must begin with the deployment's prefix")

    def is_rejected(self, service: Service, topic: str, reason: str) -> None:
        before = topics_of(service.settings)
        raw = topic.encode(errors="surrogateescape")
        name = service.send(question(f"to-{secrets.token_hex(4)}", PROMPTS[0]), ("reply_to", raw), ("k", b"1"))
        beside = service.users.ask(question(f"by-{secrets.token_hex(4)}", PROMPTS[1]))
        assert {answer.error for answer in beside.values()} == {UNSET}
        answer, headers = service.answer("predictions", name)
        assert any(part in str(answer.error) for part in reason.split("|")), answer.error
        assert headers == [("k", b"1")]
        assert topics_of(service.settings) == before

    def test_a_deleted_topic_is_not_created_again(self, service: Service) -> None:
        topic = service.settings.kafka.topic("gone-soon")
        client = admin(service.settings.kafka)
        client.create_topics([NewTopic(topic, 1, 1)])
        to = ("reply_to", topic.encode())
        assert service.answer("gone-soon", service.send(question("d1", PROMPTS[0]), to))[0].error is UNSET
        client.delete_topics([topic])
        client.close()
        wait_until(lambda: topic not in topics_of(service.settings))
        assert service.answer("predictions", service.send(question("d2", PROMPTS[0]), to))[0].error is not UNSET
        assert topic not in topics_of(service.settings)


def topics_of(settings: Settings) -> Sequence[str]:
    client = admin(settings.kafka)
    try:
        return sorted(client.list_topics())
    finally:
        client.close()
