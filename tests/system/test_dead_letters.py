"""Dead-letter queues: crashes of workers, records that are too large, and the commands of operators."""

import base64
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gracestream.deploy.local.processes import find_free_port
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.kafka.dead_letters import dead_letter_for, list_dead_letters
from gracestream.pipeline.kafka.lenient_records import MAX_UNTRUNCATED_BYTES, TRUNCATED_BYTES
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import encode
from tests.support.forked_commands import Command, Forked, sentence, status_of
from tests.support.hostile import Hostile, Unreadable
from tests.support.running import Users, flag, headers_of, question, records, settings_for, wait_until
from tests.support.tiny_models import texts
from tests.system.test_poison import check_dead_letters, check_feedback, send, wait_until_done

PROMPT = texts(1, seed=7)[0]
BAD = [Hostile(b'{"v": 1, "number": %d}' % number, b"key", []) for number in range(600)]


def write_dead_letters(settings: Settings, source: str, *values: bytes | None, key: bytes | None = None) -> None:
    """Write dead letters of records at offsets 0, 1, 2 and so on."""
    sender = producer(settings.kafka)
    for offset, value in enumerate(values):
        letter = dead_letter_for(f"reason {offset}", key, value, settings.kafka.topic(source), 0, offset)
        sender.send(settings.kafka.topic(f"{source}.dlq"), letter.value, letter.key, letter.headers).get(30)
    sender.close(timeout=5)


class TestCrashes:
    @pytest.mark.slow
    def test_feedback_is_dead_lettered_once_although_the_editor_is_killed(
        self, deployment: Settings, folder: Path
    ) -> None:
        good = [flag(f"good-{number}", PROMPT, "museum") for number in range(3)]
        mixed = [*BAD, *(Hostile(encode(one), None, []) for one in good)]
        with Forked("editor", "edit", deployment, folder) as editor:
            given = send(deployment, "feedback", mixed, partitions=1)
            for share in (0.1, 0.4, 0.8):
                wait_until(lambda share=share: len(records(deployment, "feedback.dlq")) > share * len(BAD), 90)  # type: ignore[misc]
                editor.kill()
                editor.start()
            wait_until_done(deployment, "feedback", "editor")
            dead_letters, outcomes = check_feedback(deployment, given)
            assert len(dead_letters) == len(BAD)
            assert [outcome.feedback_id for outcome in outcomes.values()] == [one.feedback_id for one in good]

    @pytest.mark.slow
    def test_all_bad_requests_are_dead_lettered_although_the_replica_is_killed(
        self, deployment: Settings, folder: Path
    ) -> None:
        with Forked("replica", "infer", deployment, folder) as replica:
            replica.wait_ready(90)
            given = send(deployment, "requests", BAD, partitions=4)
            for share in (0.1, 0.6):
                wait_until(lambda share=share: len(records(deployment, "requests.dlq")) > share * len(BAD), 90)  # type: ignore[misc]
                replica.kill()
                replica.start()
            wait_until_done(deployment, "requests", "inference")
        found: Counter[Any] = check_dead_letters(deployment, "requests", given)
        assert found.keys() == given.keys()


def test_a_record_larger_than_its_queue_allows_is_truncated_and_the_stream_goes_on(
    deployment: Settings, users: Users, folder: Path
) -> None:
    huge = b"x" * (MAX_UNTRUNCATED_BYTES * 5)  # compressed in Kafka, and so within its limit
    sender = producer(deployment.kafka, compression_type="gzip")
    with (
        Forked("editor", "edit", deployment, folder) as editor,
        Forked("replica", "infer", deployment, folder) as replica,
    ):
        editor.wait_ready(90)
        replica.wait_ready(90)
        for source in ("requests", "feedback"):
            sender._max_request_size = sender.config["max_request_size"] = 2 * len(huge)
            sender.send(deployment.kafka.topic(source), huge, partition=0).get(60)
        sender.close(timeout=5)
        users.client.send([question("after", PROMPT)], partition=0)
        assert users.correct(flag("after", PROMPT, "museum"), timeout=120)["after"].status == "added"
        assert users.ask(question("later", PROMPT), timeout=120)["later"].replica == "replica"
        wait_until(lambda: records(deployment, "requests.dlq"), 120)
    for source in ("requests", "feedback"):
        (letter,) = records(deployment, f"{source}.dlq")
        headers = headers_of(letter)
        assert letter.value == huge[:TRUNCATED_BYTES]
        assert headers["value_bytes"] == str(len(huge))
        assert headers["value_sha256"] == hashlib.sha256(huge).hexdigest()
        assert headers["source_offset"] == "0"


class TestDeadLetters:
    def test_the_last_dead_letters_are_found_behind_records_of_transactions(self, deployment: Settings) -> None:
        sender = producer(deployment.kafka, transactional_id=deployment.kafka.topic("test"))
        sender.init_transactions()
        for number in range(60):
            sender.begin_transaction()
            sender.send(deployment.kafka.topic("feedback.dlq"), b"%d" % number, partition=0)
            sender.commit_transaction() if number < 40 else sender.abort_transaction()
        sender.close(timeout=5)
        assert [letter.value for letter in list_dead_letters(deployment.kafka, "feedback", last=3)] == [
            b"37",
            b"38",
            b"39",
        ]
        assert len(list(list_dead_letters(deployment.kafka, "feedback"))) == 40

    def test_a_dead_letter_with_a_header_name_that_is_not_utf8_is_listed_and_resent(
        self, run: Callable[..., Command], deployment: Settings
    ) -> None:
        names: list[tuple[str, bytes]] = [(Unreadable("reason"), b"forged"), ("reason", b"true")]
        send(deployment, "feedback.dlq", [Hostile(b"1", None, names), Hostile(b"2", None, [])], partitions=1)
        printed = run("dlq", "list", "feedback", "--json", settings=deployment).stdout()
        listed = [json.loads(line) for line in printed.splitlines()]
        assert [(letter["value"], letter["reason"]) for letter in listed] == [("1", "true"), ("2", "")]
        run("dlq", "resend", "feedback", "--all", settings=deployment)
        assert [record.value for record in records(deployment, "feedback")] == [b"1", b"2"]


class TestList:
    def test_it_shows_source_reason_and_value_without_control_characters(
        self, run: Callable[..., Command], deployment: Settings
    ) -> None:
        write_dead_letters(deployment, "requests", "\x1b[2J\u202e".encode(), b"\xff\x00", b"[red]", None)
        command = run("dlq", "list", settings=deployment)
        assert status_of(command) == 0, command.stderr()
        printed = command.stdout()
        assert "reason 0" in printed
        cells = "".join(line.split("│")[-2].strip() for line in printed.splitlines() if "│" in line)  # wrapped
        assert cells == "\\x1b[2J\\u202e\\xff\\x00[red]"
        assert "0/2" in printed
        assert all(character.isprintable() or character == "\n" for character in printed)

    def test_json_has_the_whole_record(self, run: Callable[..., Command], deployment: Settings) -> None:
        long = json.dumps({"inputs": "ü" * 500}, ensure_ascii=False).encode()
        write_dead_letters(deployment, "feedback", long, b"\xff\x1b", key=b"\xfe")
        command = run("dlq", "list", "feedback", "--json", settings=deployment)
        assert not {one for one in command.stdout() if not one.isprintable()} - {"\n"}
        first, second = (json.loads(line) for line in command.stdout().splitlines())
        assert first["value"].encode() == long
        assert (first["queue"], first["offset"], first["source_offset"]) == ("feedback.dlq", 0, 0)
        assert (first["reason"], first["cut"], first["size"]) == ("reason 0", False, len(long))
        assert base64.b64decode(second["value_base64"]) == b"\xff\x1b"
        assert base64.b64decode(second["key_base64"]) == b"\xfe"

    def test_it_shows_the_newest_dead_letters(self, run: Callable[..., Command], deployment: Settings) -> None:
        write_dead_letters(deployment, "requests", *(b"%d" % number for number in range(30)))
        command = run("dlq", "list", "requests", "--limit", "2", "--json", settings=deployment)
        assert [json.loads(line)["value"] for line in command.stdout().splitlines()] == ["28", "29"]

    def test_an_empty_queue_is_no_error(self, run: Callable[..., Command], deployment: Settings) -> None:
        command = run("dlq", "list", settings=deployment)
        assert (status_of(command), command.stdout()) == (0, "")
        assert command.stderr() == "no dead letters of requests or feedback\n"
        assert run("dlq", "list", "--json", settings=deployment).stdout() == ""


class TestResend:
    def test_it_sends_the_record_unchanged_with_the_place_of_its_dead_letter(
        self, run: Callable[..., Command], deployment: Settings
    ) -> None:
        write_dead_letters(deployment, "requests", b"one", b"\xff two", None, key=b"\x00key")
        command = run("dlq", "resend", "requests", "--offset", "1", "--offset", "2", settings=deployment)
        assert command.stdout() == f"sent 2 to {deployment.kafka.topic('requests')}\n", command.stderr()
        sent = {headers_of(record)["replayed_from"]: record for record in records(deployment, "requests")}
        assert sent.keys() == {"requests.dlq/1", "requests.dlq/2"}
        assert sent["requests.dlq/1"].value == b"\xff two"
        assert sent["requests.dlq/2"].value is None
        assert {record.key for record in sent.values()} == {b"\x00key"}
        assert len(records(deployment, "requests.dlq")) == 3, "the dead letters stay"

    def test_it_sends_equal_dead_letters_once(self, run: Callable[..., Command], deployment: Settings) -> None:
        write_dead_letters(deployment, "feedback", b"one", b"two", b"one", b"one")
        command = run("dlq", "resend", "feedback", "--all", settings=deployment)
        expected = f"sent 2 to {deployment.kafka.topic('feedback')}; left out 2, each equal to a letter that was sent\n"
        assert command.stdout() == expected, command.stderr()
        assert [record.value for record in records(deployment, "feedback")] == [b"one", b"two"]

    def test_a_dry_run_sends_nothing(self, run: Callable[..., Command], deployment: Settings) -> None:
        write_dead_letters(deployment, "requests", b"one")
        command = run("dlq", "resend", "--all", "--dry-run", settings=deployment)
        names = [deployment.kafka.topic(source) for source in ("requests", "feedback")]
        assert command.stdout() == f"would send 1 to {names[0]}\nwould send 0 to {names[1]}\n"
        assert records(deployment, "requests") == []

    def test_a_truncated_dead_letter_is_never_sent(self, run: Callable[..., Command], deployment: Settings) -> None:
        write_dead_letters(deployment, "requests", b"one", b"x" * (MAX_UNTRUNCATED_BYTES + 1))
        message = sentence(run("dlq", "resend", "requests", "--offset", "0", "--offset", "1", settings=deployment))
        assert f"offset 1 of requests.dlq had {MAX_UNTRUNCATED_BYTES + 1} bytes and was truncated" in message
        assert records(deployment, "requests") == [], "all or nothing"
        command = run("dlq", "resend", "requests", "--all", settings=deployment)
        assert (
            command.stdout() == f"sent 1 to {deployment.kafka.topic('requests')}; 1 is truncated and cannot be sent\n"
        )

    def test_a_record_too_large_for_its_topic_is_named_and_the_others_are_sent(
        self, run: Callable[..., Command], deployment: Settings
    ) -> None:
        large = random.Random(0).randbytes(MAX_UNTRUNCATED_BYTES)  # with its overhead, more than Kafka takes
        write_dead_letters(deployment, "requests", b"one", large, b"x" * len(large))
        command = run("dlq", "resend", "requests", "--all", settings=deployment)
        expected = f"sent 2 to {deployment.kafka.topic('requests')}; larger than the topic allows: those at offset 1\n"
        assert (status_of(command), command.stdout()) == (1, expected)
        assert sorted(len(record.value) for record in records(deployment, "requests")) == [3, len(large)]

    def test_a_resent_request_is_answered_once_the_cause_is_removed(
        self, run: Callable[..., Command], deployment: Settings, users: Users, folder: Path
    ) -> None:
        asked = question("long", " ".join([PROMPT] * 3))
        small = {"max_input_tokens": len(PROMPT.split()) * 3 - 1}
        with Forked("strict", "infer", deployment, folder, **small) as replica:
            replica.wait_ready(90)
            assert "the limit is" in str(users.ask(asked)["long"].error)
        (letter,) = list_dead_letters(deployment.kafka, "requests")
        assert "the limit is" in letter.reason
        with Forked("lenient", "infer", deployment, folder) as replica, users.client.predictions() as replies:
            replica.wait_ready(90)
            left_out = run("dlq", "resend", "requests", "--all", settings=deployment)
            assert left_out.stdout() == (
                f"sent 0 to {deployment.kafka.topic('requests')}; left out 1 whose sender got an error reply"
                " (--answered sends them too)\n"
            )
            assert len(records(deployment, "requests")) == 1
            assert status_of(run("dlq", "resend", "requests", "--all", "--answered", settings=deployment)) == 0
            assert replies.wait(["long"], 30)["long"].outputs

    def test_a_dead_letter_named_by_its_offset_is_sent_although_it_was_answered(
        self, run: Callable[..., Command], deployment: Settings
    ) -> None:
        with_id = b'{"v": 1, "request_id": "known", "inputs": 3}'
        write_dead_letters(deployment, "requests", with_id, b"without an id")
        write_dead_letters(deployment, "feedback", b'{"v": 1, "feedback_id": "known", "request_id": "known"}')
        assert run("dlq", "resend", "--all", settings=deployment).stdout() == (
            f"sent 1 to {deployment.kafka.topic('requests')}; left out 1 whose sender got an error reply"
            f" (--answered sends them too)\nsent 1 to {deployment.kafka.topic('feedback')}\n"
        )
        run("dlq", "resend", "requests", "--offset", "0", settings=deployment)
        assert {record.value for record in records(deployment, "requests")} == {b"without an id", with_id}

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["requests"], "name the dead letters: --offset, which may be repeated, or --all"),
            (["requests", "--all", "--offset", "1"], "name the dead letters"),
            (["--offset", "1"], "name the source of the offset"),
            (["feedback", "--offset", "7"], "there is no dead letter at offset 7 of"),
            (["feedback", "--offset", "7", "--answered"], "--answered needs --all"),
        ],
    )
    def test_each_error_is_one_sentence(
        self, run: Callable[..., Command], deployment: Settings, arguments: list[str], complaint: str
    ) -> None:
        assert complaint in sentence(run("dlq", "resend", *arguments, settings=deployment))

    @pytest.mark.parametrize("command", [["list"], ["resend", "--all"]])
    def test_the_error_without_topics_names_the_command_that_creates_them(
        self, run: Callable[..., Command], kafka: str, redis_url: str, prefix: str, command: list[str]
    ) -> None:
        settings = settings_for(kafka, redis_url, prefix, startup_timeout=5)
        assert "gracestream topics" in sentence(run("dlq", *command, settings=settings))

    @pytest.mark.parametrize("command", [["list"], ["resend", "--all"]])
    def test_kafka_out_of_reach(self, run: Callable[..., Command], command: list[str]) -> None:
        address = f"127.0.0.1:{find_free_port()}"
        assert f"Kafka at {address} does not answer" in sentence(run("dlq", *command, kafka=address, startup_timeout=2))
