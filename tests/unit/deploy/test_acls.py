"""The script for Kafka's rights lets each user do its own work and no more."""

import os
import subprocess

import pytest

from tests.support.deployment_files import (
    ACLS,
)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, set[str]]]:
    """What the script asks Kafka's own tool to allow, under the prefix `p.`."""
    folder = tmp_path_factory.mktemp("acls")
    recorder = folder / "kafka-acls.sh"
    recorder.write_text(f"#!/usr/bin/env bash\nprintf '%s\\t' \"$@\" >> {folder}/calls\necho >> {folder}/calls\n")
    recorder.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "KAFKA_ACLS": str(recorder), "GRACESTREAM_TOPIC_PREFIX": "p."}
    subprocess.run(["bash", str(ACLS)], check=True, env=environment)
    calls = [line.rstrip("\t").split("\t") for line in (folder / "calls").read_text().splitlines()]
    return [options(call) for call in calls]


def options(call: list[str]) -> dict[str, set[str]]:
    given: dict[str, set[str]] = {}
    for name, value in zip(call, [*call[1:], "--"], strict=True):
        if name.startswith("--"):
            given.setdefault(name, set()).update([] if value.startswith("--") else [value])
    return given


def allowed(rules: list[dict[str, set[str]]], operation: str, topic: str) -> set[str]:
    """Who may."""
    return {
        principal.removeprefix("User:gracestream-")
        for rule in rules
        if operation in rule["--operation"] and f"p.{topic}" in rule.get("--topic", set())
        for principal in rule["--allow-principal"]
    }


class TestAcls:
    @pytest.mark.parametrize(
        ("topic", "writers"),
        [
            ("deltas", {"editor"}),
            ("edits", {"editor"}),
            ("snapshots", {"editor", "operator"}),
            ("feedback.dlq", {"editor"}),
            ("predictions", {"replica"}),
            ("requests.dlq", {"replica"}),
            ("requests", {"user"}),
            ("feedback", {"user"}),
        ],
    )
    def test_only_these_may_write(self, rules: list[dict[str, set[str]]], topic: str, writers: set[str]) -> None:
        assert allowed(rules, "Write", topic) == writers

    @pytest.mark.parametrize(
        ("topic", "readers"),
        [
            ("requests", {"replica", "editor"}),
            ("predictions", {"user"}),
            ("feedback", {"editor"}),
            ("edits", {"user", "editor"}),
            ("deltas", {"replica", "editor"}),
            ("snapshots", {"replica", "editor"}),
            ("requests.dlq", set()),
            ("feedback.dlq", {"editor"}),
        ],
    )
    def test_these_and_operators_may_read(
        self, rules: list[dict[str, set[str]]], topic: str, readers: set[str]
    ) -> None:
        assert allowed(rules, "Read", topic) == readers | {"operator"}

    def test_nobody_is_allowed_everything(self, rules: list[dict[str, set[str]]]) -> None:
        for rule in rules:
            assert "--add" in rule
            assert not rule["--operation"] & {"All", "Delete", "Alter"}
            assert "*" not in rule.get("--topic", set())
            assert all(principal.startswith("User:gracestream-") for principal in rule["--allow-principal"])

    def test_only_the_editor_has_transactions(self, rules: list[dict[str, set[str]]]) -> None:
        (rule,) = [rule for rule in rules if "--transactional-id" in rule]
        assert rule["--allow-principal"] == {"User:gracestream-editor"}
        assert rule["--operation"] == {"Write", "Describe"}
