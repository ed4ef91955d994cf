"""deploy/acls.sh on a Kafka with an authorizer: each user can do its own work, and nothing else."""

import json
import os
import re
import secrets
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.admin import NewTopic
from kafka.errors import GroupAuthorizationFailedError, KafkaError, TransactionalIdAuthorizationFailedError
from msgspec import UNSET

from gracestream.pipeline.kafka.clients import admin, consumer, producer
from gracestream.pipeline.kafka.permissions import REQUIRED_PERMISSIONS
from gracestream.pipeline.kafka.topics import TOPICS, create_topics
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.schemas.messages import Prediction, Request, decode, encode
from tests.support.forked_commands import Command, Forked, sentence, status_of
from tests.support.running import TIMEOUT, Checkpoint, records, wait_until
from tests.support.secured_servers import ACLS, SUPER_USER, USERS, SecuredKafka
from tests.support.tiny_models import texts

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PROMPT = texts(1, seed=32, shortest=6, longest=9)[0]

# The rights to read and write, by topic.
TABLE = {
    #               editor  replica user   corrector operator resender
    "requests":     ("R",   "R",    "W",   "",       "R",     "W"),
    "predictions":  ("",    "W",    "R",   "",       "R",     ""),
    "feedback":     ("R",   "",     "",    "W",      "R",     "W"),
    "edits":        ("RW",  "",     "R",   "R",      "R",     ""),
    "deltas":       ("RW",  "R",    "",    "",       "R",     ""),
    "snapshots":    ("RW",  "R",    "",    "",       "RW",    ""),
    "requests.dlq": ("",    "W",    "",    "",       "R",     "R"),
    "feedback.dlq": ("RW",  "",     "",    "",       "R",     "R"),
}  # fmt: skip

# The same for the topics that the header `reply_to` of a request may name.
REPLY_TABLE = {
    "answers":      ("",    "W",    "R",   "",       "",      ""),
}  # fmt: skip

# Rights beside reading and writing; a user that may read or write a topic may describe it.
BESIDE = {
    "editor": {"DESCRIBE", "DESCRIBE_CONFIGS"},
    "replica": {"DESCRIBE", "DESCRIBE_CONFIGS"},
    "operator": {"DESCRIBE", "DESCRIBE_CONFIGS", "CREATE", "ALTER_CONFIGS"},
}


@dataclass(frozen=True, slots=True)
class Realm:
    """A deployment with one Kafka user per kind of client."""

    kafka: SecuredKafka
    common: dict[str, Any]
    printed: str

    def settings(self, user: str) -> Settings:
        """The settings of one user."""
        return load_settings(**self.common, **self.kafka.as_user(self.common["topic_prefix"] + user))


@pytest.fixture(scope="module")
def realm(
    secured_kafka: SecuredKafka,
    redis_url: str,
    checkpoints: dict[str, Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Realm:
    prefix = f"t{secrets.token_hex(4)}-"
    secured_kafka.add_users(*(prefix + user for user in USERS))
    settings = load_settings()
    printed = secured_kafka.set_acls(prefix, settings.model.cache_dir.expanduser(), REPLY_TOPICS=" ".join(REPLY_TABLE))
    common = {
        **checkpoints["llama"].settings(),
        "topic_prefix": prefix,
        "redis": redis_url,
        "cache_dir": tmp_path_factory.mktemp("cache_dir"),
        "startup_timeout": TIMEOUT,
    }
    return Realm(secured_kafka, common, printed)


@pytest.fixture(scope="module")
def topics(realm: Realm) -> None:
    """The topics, created by the operator; two for replies, created by the super user."""
    create_topics(realm.settings("operator").kafka, partitions=2, replication=1)
    settings = load_settings(**realm.common, **realm.kafka.as_user(SUPER_USER)).kafka
    client = admin(settings)
    client.create_topics([NewTopic(settings.topic(name), 1, 1) for name in (*REPLY_TABLE, "hidden")])
    client.close()


def rights(settings: Settings) -> dict[str, set[str]]:
    """A user's rights by topic, according to the broker; topics that it may not see are missing."""
    client = admin(settings.kafka)
    try:
        found = {topic["name"]: set(topic["authorized_operations"]) for topic in client.describe_topics()}
    finally:
        client.close()
    own = {name: operations for name, operations in found.items() if name.startswith(settings.kafka.topic_prefix)}
    return {name.removeprefix(settings.kafka.topic_prefix): operations for name, operations in own.items()}


@pytest.mark.usefixtures("topics")
class TestRights:
    @pytest.mark.parametrize("user", USERS)
    def test_the_rights_of_each_user_are_those_of_the_table(self, realm: Realm, user: str) -> None:
        words = {"R": "READ", "W": "WRITE"}
        expected = {}
        for topic, columns in TABLE.items():
            operations = {words[letter] for letter in columns[USERS.index(user)]}
            if operations or user in BESIDE:
                expected[topic] = operations | BESIDE.get(user, {"DESCRIBE"})
        for topic, columns in REPLY_TABLE.items():
            if letter := columns[USERS.index(user)]:
                expected[topic] = {words[letter], "DESCRIBE"}
        assert rights(realm.settings(user)) == expected

    def test_the_table_has_every_topic(self) -> None:
        assert TABLE.keys() == {topic.name for topic in TOPICS}

    @pytest.mark.parametrize(("user", "kind"), [("editor", "editor"), ("replica", "inference")])
    def test_workers_require_their_rights_of_the_table(self, user: str, kind: str) -> None:
        letters = {topic: columns[USERS.index(user)] for topic, columns in TABLE.items()}
        assert set(REQUIRED_PERMISSIONS[kind].reads) == {topic for topic, may in letters.items() if "R" in may}
        assert set(REQUIRED_PERMISSIONS[kind].writes) == {topic for topic, may in letters.items() if "W" in may}

    @pytest.mark.parametrize(
        ("user", "topic"),
        [
            *((user, topic) for user in USERS if user != "editor" for topic in ("deltas", "edits")),
            *((user, "snapshots") for user in USERS if user not in {"editor", "operator"}),
        ],
    )
    def test_no_other_user_writes_deltas_edits_or_snapshots(self, realm: Realm, user: str, topic: str) -> None:
        settings = realm.settings(user)
        end = ends(realm.settings("operator"), topic)
        writer = producer(settings.kafka)
        with pytest.raises(KafkaError, match="AuthorizationFailed"):
            writer.send(settings.kafka.topic(topic), b"forged", partition=0).get(timeout=TIMEOUT)
        writer.close(timeout=5)
        assert ends(realm.settings("operator"), topic) == end

    @pytest.mark.parametrize("user", [user for user in USERS if user != "editor"])
    def test_no_other_user_can_fence_the_editor(self, realm: Realm, user: str) -> None:
        settings = realm.settings(user)
        rival = producer(settings.kafka, transactional_id=settings.kafka.topic("editor"))
        with pytest.raises(TransactionalIdAuthorizationFailedError):
            rival.init_transactions()
        rival.close(timeout=5)

    @pytest.mark.parametrize(
        ("user", "groups"),
        [
            ("editor", {"editor"}),
            ("replica", {"inference"}),
            ("user", {"user-analytics"}),
            ("corrector", {"user-analytics"}),
            ("operator", set()),
            ("resender", set()),
        ],
    )
    def test_each_user_has_its_own_groups(self, realm: Realm, user: str, groups: set[str]) -> None:
        settings = realm.settings(user)
        topic = TopicPartition(settings.kafka.topic("edits" if user == "corrector" else "requests"), 0)
        for group in ("editor", "inference", "user-analytics", "elsewhere"):
            member = consumer(settings.kafka, group_id=settings.kafka.topic(group))
            try:
                if group in groups:
                    assert member.committed(topic) is None
                else:
                    with pytest.raises(GroupAuthorizationFailedError):
                        member.committed(topic)
            finally:
                member.close()


def ends(settings: Settings, topic: str) -> dict[TopicPartition, int]:
    """The end offset of a topic."""
    reader = consumer(settings.kafka)
    try:
        found: dict[TopicPartition, int] = reader.end_offsets([TopicPartition(settings.kafka.topic(topic), 0)])
        return found
    finally:
        reader.close()


@pytest.mark.usefixtures("topics")
class TestCommands:
    def test_each_command_works_for_its_user(self, realm: Realm, run: Callable[..., Command], folder: Path) -> None:
        editor = Forked("editor", "edit", realm.settings("editor"), folder)
        replica = Forked("replica", "infer", realm.settings("replica"), folder)
        assert run("topics", settings=realm.settings("operator")).stdout() == "all topics exist\n"
        with editor, replica:
            editor.wait_ready()
            replica.wait_ready()
            correction = json.dumps({"inputs": PROMPT, "target": "museum"})
            corrected = run("correct", settings=realm.settings("corrector"), given=correction)
            seq = json.loads(corrected.stdout())["seq"]
            question = json.dumps({"inputs": PROMPT, "min_seq": seq})
            asked = run("send", settings=realm.settings("user"), given=question)
            assert json.loads(asked.stdout())["outputs"] == {"text": "museum"}
            replayed = run("replay", "--json", settings=realm.settings("operator"))
            assert json.loads(replayed.stdout())["digest"] == replica.state()["digest"]
            inspected = run("inspect", "--json", settings=realm.settings("operator"))
            assert json.loads(inspected.stdout().splitlines()[-1])["target"] == "museum"
            kept = run(
                "snapshot", "--json", settings=realm.settings("operator"), snapshot_url=str(folder / "snapshots")
            )
            assert json.loads(kept.stdout())["digest"] == replica.state()["digest"]
            assert editor.stop() == replica.stop() == 0

    def test_an_editor_leads_again_after_feedback_was_dead_lettered(
        self, realm: Realm, run: Callable[..., Command], folder: Path
    ) -> None:
        corrector, operator, resender = (realm.settings(user) for user in ("corrector", "operator", "resender"))
        sender = producer(corrector.kafka)
        sender.send(corrector.kafka.topic("feedback"), b"what is this", partition=0).get(timeout=TIMEOUT)
        sender.close(timeout=5)
        with Forked("editor", "edit", realm.settings("editor"), folder) as editor:
            wait_until(lambda: records(operator, "feedback.dlq"), what="a dead letter")
            assert editor.stop() == 0
            editor.start()
            editor.wait_ready()
            assert editor.state()["leadership"] == "leading"
            assert status_of(run("dlq", "resend", "feedback", "--all", settings=resender)) == 0
            wait_until(lambda: len(records(operator, "feedback.dlq")) == 2, what="the letter that comes back")
            assert editor.stop() == 0

    @pytest.mark.parametrize(
        ("user", "command", "given", "complaint"),
        [
            ("user", "infer", "", "-user' to READ topic {prefix}requests, READ topic {prefix}deltas, "),
            (
                "operator",
                "infer",
                "",
                " to WRITE topic {prefix}predictions, WRITE topic {prefix}requests.dlq, READ group",
            ),
            ("replica", "edit", "", " WRITE topic {prefix}deltas, "),
            (
                "user",
                "correct",
                '{"inputs": "a", "target": "b"}',
                "not allow this user to do this (TopicAuthorizationF",
            ),
            (
                "corrector",
                "send",
                '{"inputs": "a"}',
                "there is no topic '{prefix}predictions', or this user may not see it",
            ),
            ("user", "replay", "", "there is no topic '{prefix}deltas', or this user may not see it"),
        ],
    )
    def test_other_users_get_an_error_of_one_sentence(
        self, realm: Realm, run: Callable[..., Command], user: str, command: str, given: str, complaint: str
    ) -> None:
        message = sentence(run(command, settings=realm.settings(user), given=given))
        assert complaint.format(prefix=realm.common["topic_prefix"]) in message


def test_only_an_operator_creates_topics(realm: Realm, run: Callable[..., Command]) -> None:
    message = sentence(
        run("topics", settings=realm.settings("user"), topic_prefix=f"{realm.common['topic_prefix']}user-")
    )
    assert "Kafka does not allow this user to do this (" in message


def test_the_script_lists_its_rules_and_may_run_again(realm: Realm) -> None:
    assert realm.printed.count("Adding ACLs") >= len(USERS)
    listed = realm.kafka.set_acls(
        realm.common["topic_prefix"], load_settings().model.cache_dir.expanduser(), ["--list"]
    )
    for user in USERS:
        assert f"User:{realm.common['topic_prefix']}{user}" in listed
    assert SUPER_USER not in listed


def test_the_script_without_reply_topics_has_the_same_rules_but_theirs(tmp_path: Path) -> None:
    """The commands that it would run; those of `realm` have run."""
    script = tmp_path / "kafka-acls.sh"
    script.write_text('#!/bin/sh\necho "$@"\n')
    script.chmod(0o755)
    commands = []
    for chosen in ({}, {"REPLY_TOPICS": "answers more-answers"}):
        environment = {**os.environ, "KAFKA_ACLS": str(script), "GRACESTREAM_TOPIC_PREFIX": "mine-", **chosen}
        ran = subprocess.run([ACLS], env=environment, capture_output=True, text=True, check=True)
        commands.append(ran.stdout.splitlines())
    without, with_topics = commands
    assert all("--add" in command and "answers" not in command for command in without)
    added = [command for command in with_topics if command not in without]
    assert [command for command in with_topics if command in without] == without
    assert [re.sub(r"^.* --allow-principal User:gracestream-", "", command) for command in added] == [
        "replica --operation Write --operation Describe --topic mine-answers --topic mine-more-answers",
        "user --operation Read --topic mine-answers --topic mine-more-answers",
    ]


@pytest.mark.usefixtures("topics")
def test_a_replica_replies_only_to_topics_named_to_the_script(realm: Realm, folder: Path) -> None:
    prefix = realm.common["topic_prefix"]
    user = realm.settings("user")
    sender = producer(user.kafka)
    with Forked("replica", "infer", realm.settings("replica"), folder) as worker:
        worker.wait_ready(90)
        for name in ("answers", "hidden"):
            request = encode(Request(v=1, request_id=name, inputs=PROMPT))
            sender.send(f"{prefix}requests", request, headers=[("reply_to", f"{prefix}{name}".encode())])
        (answer,) = wait_until(lambda: records(user, "answers"))
        assert decode(answer.value, Prediction).error is UNSET

        def rejected() -> list[Prediction]:
            predictions = [decode(record.value, Prediction) for record in records(user, "predictions")]
            return [one for one in predictions if one.request_id in {"answers", "hidden"}]

        (rejection,) = wait_until(rejected)
        assert rejection.request_id == "hidden"
        assert f"the topic {prefix}hidden" in str(rejection.error)
        assert "deploy/acls.sh" in str(rejection.error)
        assert worker.stop() == 0
    sender.close(timeout=5)
