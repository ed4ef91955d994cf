"""A member of a group that joins again between two polls."""

import pytest

from gracestream.pipeline.editor.log import EditorLog
from gracestream.pipeline.kafka.topics import FEEDBACK
from tests.support.editor_clusters import Cluster
from tests.support.running import wait_until


def join_and_look_away(log: EditorLog) -> None:
    """Have the member join again as it does when the topic's partitions have changed, and end that unseen."""
    coordinator = log._member._coordinator
    coordinator._assignment_snapshot = {log._feedback.topic: set()}  # none were known when they were given out
    log._member.poll(timeout_ms=1)
    wait_until(lambda: coordinator._join_task is None or coordinator._join_task.is_done)


@pytest.mark.parametrize("cluster", [pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
def test_a_leader_that_joins_again_between_two_polls_leads_on(cluster: Cluster) -> None:
    log = cluster.leader()
    join_and_look_away(log)
    cluster.send(FEEDBACK, b"f0")
    polled = wait_until(lambda: log.poll(0.05))
    assert polled is not None
    assert polled[3] == b"f0"
    assert log.membership(0.05) == "elected"
