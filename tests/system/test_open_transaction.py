"""Another producer's open transaction on `feedback`: the feedback behind it is counted and reported."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.kafka.topics import FEEDBACK, create_topics
from gracestream.pipeline.settings import Settings
from tests.support.forked_commands import Forked
from tests.support.running import Users, flag, metric, wait_until


def test_feedback_behind_it_counts_as_lag_and_is_reported(deployment: Settings, users: Users, folder: Path) -> None:
    with Forked("editor", "edit", deployment, folder) as editor:
        editor.wait_ready(90)
        stranger = producer(deployment.kafka, transactional_id=f"{deployment.kafka.topic_prefix}stranger")
        stranger.init_transactions()
        stranger.begin_transaction()
        stranger.send(deployment.kafka.topic(FEEDBACK), b"left open", partition=0).get(30)
        users.client.send([flag("waits", "a b c", "museum")])
        wait_until(lambda: metric(editor.port, "gracestream_feedback_blocked") == 2, 40, "the report")
        assert metric(editor.port, "gracestream_feedback_lag") == 2
        assert editor.state()["feedback_blocked"] == 2
        (event,) = [event for event in editor.events() if event["event"] == "feedback_blocked"]
        assert "kafka-transactions.sh abort" in event["remedy"]
        stranger.abort_transaction()
        stranger.close(timeout=5)
        wait_until(lambda: metric(editor.port, "gracestream_codebook_entries") == 1, 40, "the correction")
        wait_until(lambda: editor.state()["feedback_blocked"] == 0, 20)


@pytest.mark.slow
def test_an_editor_that_no_longer_leads_reports_none(
    deploy: Callable[..., Settings], prefix: str, own_kafka: LocalKafka, folder: Path
) -> None:
    settings = deploy("llama", prefix).replace(kafka=own_kafka.bootstrap)
    create_topics(settings.kafka, partitions=1, replication=1)
    with Forked("editor", "edit", settings, folder) as editor:
        editor.wait_ready(90)
        stranger = producer(settings.kafka, transactional_id=f"{prefix}stranger")
        stranger.init_transactions()
        stranger.begin_transaction()
        stranger.send(settings.kafka.topic(FEEDBACK), b"left open", partition=0).get(30)
        wait_until(lambda: metric(editor.port, "gracestream_feedback_blocked") == 1, 40, "the report")
        own_kafka.kill()
        stranger.close(timeout=0)
        wait_until(lambda: editor.state()["leadership"] == "starting", what="the loss of the lead")
        wait_until(lambda: metric(editor.port, "gracestream_feedback_blocked") == 0, 20, "the reset")
        assert editor.state()["feedback_blocked"] == 0
