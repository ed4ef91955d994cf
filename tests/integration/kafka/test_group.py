"""A member of a group that rejoins between two polls."""

import pytest

from gracestream.pipeline.editor.log import EditorLog
from gracestream.pipeline.kafka.topics import FEEDBACK
from tests.support.editor_clusters import Cluster
from tests.support.running import wait_until


def rejoin_without_notice(log: EditorLog) -> None:
    """Let the member rejoin, as after a change of the topic's partitions, and complete that between two polls."""
    coordinator = log._member._coordinator
    coordinator._assignment_snapshot = {log._feedback.topic: set()}  # none were known at the assignment
    log._member.poll(timeout_ms=1)
    wait_until(lambda: coordinator._join_task is None or coordinator._join_task.is_done)


@pytest.mark.parametrize("cluster", [pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
def test_a_leader_that_rejoins_between_two_polls_keeps_the_leadership(cluster: Cluster) -> None:
    log = cluster.leader()
    rejoin_without_notice(log)
    cluster.send(FEEDBACK, b"f0")
    polled = wait_until(lambda: log.poll(0.05))
    assert polled is not None
    assert polled[3] == b"f0"
    assert log.membership(0.05) == "elected"
