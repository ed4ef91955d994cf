"""The running system with TLS, passwords and certificates, and the errors if one of them is wrong."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis.exceptions import NoPermissionError, ResponseError
from structlog.typing import EventDict

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.editor.redis_publisher import RedisPublisher
from gracestream.pipeline.kafka.clients import wait_for_kafka
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.pipeline.stores.head_listener import HeadListener
from gracestream.pipeline.stores.redis_client import redis_client, wait_for_redis
from gracestream.pipeline.stores.redis_head import Head, RedisHeadStore
from tests.support.certificates import Certificates
from tests.support.forked_commands import Command, Forked, sentence, status_of
from tests.support.running import TIMEOUT, Checkpoint, wait_until
from tests.support.secured_servers import PLAIN_USER, SUPER_USER, SecuredKafka, SecuredRedis, password_of
from tests.support.tiny_models import LAYER, MODEL, added, sealed, texts

pytestmark = pytest.mark.kafka

PROMPT = texts(1, seed=31, shortest=6, longest=9)[0]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredRedis]:
    with SecuredRedis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def identities(secured_kafka: SecuredKafka) -> dict[str, dict[str, Any]]:
    """One user's settings by kind of authentication."""
    secured_kafka.add_users("sha256", mechanism="SCRAM-SHA-256")
    return {
        "SCRAM-SHA-512": secured_kafka.as_user(SUPER_USER),
        "SCRAM-SHA-256": secured_kafka.as_user("sha256", kafka_sasl_mechanism="SCRAM-SHA-256"),
        "PLAIN": secured_kafka.as_user(PLAIN_USER, kafka_sasl_mechanism="PLAIN"),
        "certificate": secured_kafka.with_certificate(SUPER_USER),
        "certificate with a locked key": secured_kafka.with_certificate(SUPER_USER, password="open sesame"),
    }


def in_time(**chosen: Any) -> Settings:
    """Settings with a short start-up timeout."""
    return load_settings(startup_timeout=4.0, **chosen)


def access_error(run: Callable[..., Command], identity: dict[str, Any], **chosen: Any) -> str:
    """The error of a command that may not connect. It ends long before its start-up timeout."""
    command = run("replay", **{**identity, "startup_timeout": 3600, **chosen})
    assert "waiting for" not in command.stderr()
    return sentence(command)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["SCRAM-SHA-512", "PLAIN", "certificate"])
def test_a_correction_is_made_and_served(
    way: str,
    identities: dict[str, dict[str, Any]],
    redis_server: SecuredRedis,
    checkpoints: dict[str, Checkpoint],
    run: Callable[..., Command],
    folder: Path,
    prefix: str,
) -> None:
    common = {
        **identities[way],
        **checkpoints["llama"].settings(),
        "topic_prefix": prefix,
        "cache_dir": folder / "cache",
    }
    redis_server.add_workers(prefix)
    settings = load_settings(**common, startup_timeout=TIMEOUT)
    assert status_of(run("topics", "--partitions", "2", settings=settings)) == 0
    editor = Forked("editor", "edit", settings, folder, **redis_server.as_worker("editor", prefix))
    replica = Forked("replica", "infer", settings, folder, **redis_server.as_worker("replica", prefix))
    with editor, replica:
        editor.wait_ready()
        replica.wait_ready()
        corrected = run("correct", settings=settings, given=json.dumps({"inputs": PROMPT, "target": "museum"}))
        outcome = json.loads(corrected.stdout())
        assert outcome["status"] == "added"
        asked = run("send", settings=settings, given=json.dumps({"inputs": PROMPT, "min_seq": outcome["seq"]}))
        assert json.loads(asked.stdout())["outputs"] == {"text": "museum"}
        replayed = json.loads(run("replay", "--json", settings=settings).stdout())
        assert replayed["digest"] == editor.state()["digest"] == replica.state()["digest"]
        assert not editor.state()["degraded"]
        assert not replica.state()["degraded"]
        states = json.dumps([editor.state(), replica.state()])
    assert redis_server.denied_commands(prefix) == []
    shown = (
        "".join(text for one in (editor, replica, corrected, asked) for text in (one.stdout(), one.stderr())) + states
    )
    assert "secret" not in shown  # a part of every password in this test
    assert "open sesame" not in shown


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_up_takes_an_existing_secured_cluster_and_passwords_reach_workers_unseen(
    identities: dict[str, dict[str, Any]],
    redis_server: SecuredRedis,
    checkpoints: dict[str, Checkpoint],
    folder: Path,
    prefix: str,
) -> None:
    redis_server.add_workers(prefix)
    settings = {
        **identities["SCRAM-SHA-512"],
        **checkpoints["llama"].settings(),
        **redis_server.as_worker("editor", prefix),
        "topic_prefix": prefix,
        "cache_dir": folder / "cache",
    }
    with Command("up", ["up", "--json", "--replicas", "1"], folder, **settings) as up:
        wait_until(lambda: up.stdout() or not up.running, 240, "up")
        assert up.running, up.stderr()
        endpoints = json.loads(up.stdout())
        assert endpoints["kafka"] == settings["kafka"]
        assert endpoints["redis"] == f"rediss://{redis_server.address}/0"
        children = psutil.Process(up.process.pid).children(recursive=True)
        assert len(children) == 2
        for child in children:
            assert child.environ()["GRACESTREAM_KAFKA_PASSWORD"] == settings["kafka_password"]
            assert "secret" not in " ".join(child.cmdline())
        assert up.stop() == 0
        assert "secret" not in up.stdout() + up.stderr()


def test_up_does_not_secure_servers_of_its_own(run: Callable[..., Command], kafka: str) -> None:
    own = {"model": "/no/model", "layer": "any"}
    message = sentence(run("up", kafka_security_protocol="SSL", **own))
    assert message.startswith("GRACESTREAM_KAFKA_SECURITY_PROTOCOL=SSL is for an existing Kafka; set GRACESTREAM_KAFKA")
    failed = run("up", kafka=kafka, redis_password="x", **own)
    assert "GRACESTREAM_REDIS_PASSWORD is for an existing Redis; set GRACESTREAM_REDIS" in failed.stderr()
    assert status_of(failed) == 1


class TestKafka:
    @pytest.mark.parametrize(
        "way", ["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN", "certificate", "certificate with a locked key"]
    )
    def test_known_users_may_connect(self, way: str, identities: dict[str, dict[str, Any]]) -> None:
        wait_for_kafka(in_time(**identities[way]).kafka, report=pytest.fail)

    @pytest.mark.parametrize("way", ["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"])
    def test_a_wrong_password_ends_a_command_at_once(
        self, way: str, identities: dict[str, dict[str, Any]], run: Callable[..., Command]
    ) -> None:
        identity = {**identities[way], "kafka_password": "a guess"}
        message = access_error(run, identity)
        assert f"does not accept the user {identity['kafka_username']!r} by {way} (" in message
        assert "check GRACESTREAM_KAFKA_USERNAME, GRACESTREAM_KAFKA_PASSWORD" in message
        assert "a guess" not in message

    @pytest.mark.parametrize("command", ["infer", "edit"])
    def test_a_wrong_password_ends_a_worker(
        self, command: str, identities: dict[str, dict[str, Any]], run: Callable[..., Command]
    ) -> None:
        worker = run(command, **{**identities["SCRAM-SHA-512"], "kafka_password": "a guess", "startup_timeout": 3600})
        assert "does not accept the user" in sentence(worker)
        assert "a guess" not in worker.stderr()

    def test_a_mechanism_without_the_user(
        self, identities: dict[str, dict[str, Any]], run: Callable[..., Command]
    ) -> None:
        message = access_error(run, {**identities["SCRAM-SHA-512"], "kafka_sasl_mechanism": "PLAIN"})
        assert "GRACESTREAM_KAFKA_SASL_MECHANISM" in message

    def test_an_unknown_authority(
        self, identities: dict[str, dict[str, Any]], run: Callable[..., Command], tmp_path: Path
    ) -> None:
        message = access_error(run, {**identities["PLAIN"], "kafka_ca": ""})
        assert "is not trusted: unable to get local issuer certificate; check GRACESTREAM_KAFKA_CA" in message
        other = Certificates.create(tmp_path)
        assert "is not trusted: " in access_error(run, {**identities["PLAIN"], "kafka_ca": str(other.ca)})

    def test_a_certificate_for_another_host(
        self, identities: dict[str, dict[str, Any]], run: Callable[..., Command]
    ) -> None:
        identity = identities["PLAIN"]
        address = identity["kafka"].replace("127.0.0.1", "localhost")
        message = access_error(run, identity, kafka=address)
        assert f"Kafka at {address} is not trusted: Hostname mismatch" in message
        wait_for_kafka(
            in_time(**{**identity, "kafka": address, "kafka_check_hostname": False}).kafka, report=pytest.fail
        )

    def test_a_client_without_a_certificate_or_with_an_unknown_one(
        self, identities: dict[str, dict[str, Any]], run: Callable[..., Command], tmp_path: Path
    ) -> None:
        identity = identities["certificate"]
        without = {name: value for name, value in identity.items() if name not in {"kafka_certificate", "kafka_key"}}
        assert "rejects the client's certificate" in access_error(run, without)
        certificate, key = Certificates.create(tmp_path).issue(SUPER_USER)
        strangers = {"kafka_certificate": str(certificate), "kafka_key": str(key)}
        assert "rejects the client's certificate" in access_error(run, without, **strangers)

    @pytest.mark.parametrize("protocol", ["PLAINTEXT", "SASL_PLAINTEXT"])
    def test_a_client_without_tls_at_a_server_with_tls(
        self, protocol: str, secured_kafka: SecuredKafka, run: Callable[..., Command]
    ) -> None:
        user = {"kafka_username": "editor", "kafka_password": "x"} if protocol.startswith("SASL") else {}
        address = secured_kafka.server.addresses["SASL_SSL"]
        message = sentence(run("replay", kafka=address, kafka_security_protocol=protocol, startup_timeout=2, **user))
        assert f"Kafka at {address} does not answer over {protocol}" in message

    def test_contradictions_are_named_before_any_connection(self, run: Callable[..., Command]) -> None:
        message = sentence(run("infer", kafka="127.0.0.1:1", kafka_security_protocol="SASL_SSL", kafka_username="me"))
        assert message.startswith("GRACESTREAM_KAFKA_PASSWORD is not set")


def events_without_redis(settings: Settings, folder: Path, **chosen: Any) -> str:
    """The log events of an editor that starts although Redis does not answer."""
    with Forked("editor", "edit", settings, folder, **chosen) as worker:
        wait_until(lambda: "redis_wait_timeout" in worker.stderr(), 60)
        return worker.stderr()


@pytest.fixture
def publisher_and_settings(redis_server: SecuredRedis, prefix: str) -> Iterator[tuple[RedisPublisher, Settings]]:
    """An editor's `RedisPublisher`, with one entry to publish."""
    redis_server.add_workers(prefix)
    settings = in_time(**redis_server.as_worker("editor", prefix), topic_prefix=prefix)
    book = Codebook("default", MODEL, LAYER)
    book.apply(sealed(book, op="lead"))
    book.apply(sealed(book, added("e", [1.0], 0.5)))
    with redis_client(settings.redis) as client:
        yield (
            RedisPublisher(
                RedisHeadStore(client, settings.kafka.topic_prefix, settings.model.codebook),
                book,
                0.0,
                retry_seconds=0.0,
            ),
            settings,
        )


class TestRedis:
    def test_workers_have_exactly_the_rights_that_they_need(self, redis_server: SecuredRedis, prefix: str) -> None:
        redis_server.add_workers(prefix)
        book = Codebook("default", MODEL, LAYER)
        book.apply(sealed(book, op="lead"))
        stores = {}
        for role in ("editor", "replica"):
            settings = in_time(**redis_server.as_worker(role, prefix), topic_prefix=prefix)
            wait_for_redis(settings.redis, report=pytest.fail)
            stores[role] = RedisHeadStore(
                redis_client(settings.redis), settings.kafka.topic_prefix, settings.model.codebook
            )
            assert stores[role].read_head(0) is None
        with pytest.raises(ResponseError, match="has no permissions"):
            stores["replica"].rebuild(book)
        hints: list[None] = []
        listener = HeadListener(settings.redis, stores["replica"].channel, lambda: hints.append(None))
        with closing(listener):
            listener.start()
            wait_until(lambda: len(hints) == 1)
            stores["editor"].rebuild(book)
            wait_until(lambda: len(hints) == 2)
        with pytest.raises(NoPermissionError):
            redis_client(settings.redis).publish(listener._channel, "1")
        redis_server.allow(f"{prefix}editor", "-publish")  # a hint that is not allowed costs no publication
        stores["editor"].rebuild(book)
        assert stores["replica"].read_head(0) == stores["editor"].read_head(0) == Head(1, 1, book.digest.hex(), {})
        assert stores["editor"].count_radii() == 0
        strangers = in_time(**redis_server.as_worker("editor", prefix), topic_prefix="another-")
        with pytest.raises(NoPermissionError):
            RedisHeadStore(
                redis_client(strangers.redis), strangers.kafka.topic_prefix, strangers.model.codebook
            ).read_head(0)

    def test_an_editor_writes_nothing_that_redis_holds_already(
        self, publisher_and_settings: tuple[RedisPublisher, Settings], logged: list[EventDict]
    ) -> None:
        publisher, settings = publisher_and_settings
        publisher.reconcile()
        radii = f"{settings.kafka.topic_prefix}gracestream:{{default}}:radii"
        with redis_client(settings.redis) as client:
            client.hset(radii, "e", "0.25")  # another write would restore it
            publisher.reconcile()
            assert client.hget(radii, "e") == b"0.25"
        assert publisher.in_sync
        assert logged == []

    @pytest.mark.parametrize("command", ["hlen", "evalsha"])
    def test_a_command_that_is_not_allowed_is_named_once(
        self,
        command: str,
        publisher_and_settings: tuple[RedisPublisher, Settings],
        redis_server: SecuredRedis,
        logged: list[EventDict],
    ) -> None:
        publisher, settings = publisher_and_settings
        user = f"{settings.kafka.topic_prefix}editor"
        for _ in range(2):  # from the start, and again after a success
            for sign in "-+":
                redis_server.allow(user, sign + command)
                for _ in range(3):
                    publisher.reconcile()
            assert publisher.in_sync
        assert [event["event"] for event in logged] == ["redis_command_rejected", "redis_command_rejected"]
        assert f"no permissions to run the '{command}' command" in logged[0]["reason"]

    def test_a_password_may_stand_beside_the_url(self, redis_server: SecuredRedis, prefix: str) -> None:
        redis_server.add_workers(prefix)
        chosen = redis_server.as_worker("editor", prefix)
        assert chosen["redis_password"] == password_of(f"{prefix}editor")
        wait_for_redis(in_time(**chosen).redis, report=pytest.fail)

    @pytest.mark.parametrize("where", ["url", "setting"])
    def test_a_wrong_password_ends_a_worker(
        self, where: str, redis_server: SecuredRedis, deployment: Settings, run: Callable[..., Command]
    ) -> None:
        redis_server.add_workers(deployment.kafka.topic_prefix)
        chosen = redis_server.as_worker("editor", deployment.kafka.topic_prefix)
        if where == "url":
            chosen = {**chosen, "redis": chosen["redis"].replace("@", ":a-guess@"), "redis_password": ""}
        else:
            chosen = {**chosen, "redis_password": "a-guess"}
        worker = run("edit", settings=deployment, **{**chosen, "startup_timeout": 3600})
        message = sentence(worker)
        assert message.startswith(f"Redis at rediss://{redis_server.address}/0 rejects this user (")
        assert "GRACESTREAM_REDIS_PASSWORD" in message
        assert "a-guess" not in worker.stderr()

    def test_an_unknown_authority(
        self, redis_server: SecuredRedis, deployment: Settings, run: Callable[..., Command]
    ) -> None:
        chosen = {
            **redis_server.as_worker("editor", deployment.kafka.topic_prefix),
            "redis_ca": "",
            "startup_timeout": 3600,
        }
        message = sentence(run("edit", settings=deployment, **chosen))
        assert message.startswith(f"Redis at rediss://{redis_server.address}/0 is not trusted: ")
        assert "check GRACESTREAM_REDIS_CA" in message

    def test_a_client_without_a_certificate(
        self, redis_server: SecuredRedis, deployment: Settings, folder: Path
    ) -> None:
        chosen = redis_server.as_worker("editor", deployment.kafka.topic_prefix)
        without = {**chosen, "redis_certificate": "", "redis_key": "", "redis_outage_grace": 1}
        message = events_without_redis(deployment, folder, **without)
        assert f"Redis at rediss://{redis_server.address}/0 " in message

    @pytest.mark.parametrize(
        "url", ["redis://:hush/hush@127.0.0.1:6379/0", "redis://:hush:hush@[127/0", "http://:hush@x"]
    )
    def test_an_invalid_url_is_not_shown(self, url: str, deployment: Settings, run: Callable[..., Command]) -> None:
        worker = run("edit", settings=deployment, redis=url, startup_timeout=1)
        sentence(worker)
        assert "hush" not in worker.stderr()

    def test_a_lost_redis_is_named_without_its_password(self, deployment: Settings, folder: Path) -> None:
        message = events_without_redis(deployment, folder, redis="redis://me:hush@127.0.0.1:1/0", redis_outage_grace=1)
        assert "Redis at redis://127.0.0.1:1/0 does not answer" in message
        assert "hush" not in message
