"""The editor's place in the group of editors: who leads, who stands by, and how a busy leader keeps its place."""

import time
from collections.abc import Callable
from typing import Any, Literal

from kafka import ConsumerRebalanceListener, TopicPartition
from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from kafka.errors import KafkaError
from kafka.structs import MemberState

from gracestream.pipeline.kafka import FEEDBACK, consumer
from gracestream.pipeline.settings import Settings

MembershipState = Literal["joining", "standby", "chosen"]
"""Of an editor in the group: not decided yet, another one has the partition, or this one has."""


class PartitionLostError(KafkaError):  # type: ignore[misc]
    """The group has given this editor's partition away, or was about to."""


class GroupMember:
    """A member of the group of editors, which hands out `feedback` while it is the one that is chosen."""

    def __init__(self, settings: Settings, new_consumer: Callable[..., Any] = consumer) -> None:
        self._settings, self._new_consumer = settings, new_consumer
        self._feedback = TopicPartition(settings.topic(FEEDBACK), 0)
        self._next_feedback = 0
        """After the last record that was handed out."""
        self._last_poll_at = 0.0
        self._last_stable_at = 0.0
        self._member: Any = None
        self._rebalances = _RebalanceCounter()
        self._seen_rebalances = 0
        self._group_metadata: Any = None

    def join(self) -> None:
        """Enter the group of editors. The partition may come at once, so the history must be known by now."""
        timeout_ms = int(1000 * self._settings.session_timeout)
        self._member = self._new_consumer(
            self._settings,
            group_id=self._settings.topic("editor"),
            session_timeout_ms=timeout_ms,
            heartbeat_interval_ms=timeout_ms // 10,
            max_poll_interval_ms=int(1000 * self._settings.stuck_after),
            partition_assignment_strategy=[StickyPartitionAssignor],
            max_poll_records=1,  # each edit is followed by a poll, which is where a rebalance takes place
        )
        self._rebalances, self._seen_rebalances = _RebalanceCounter(), 0
        self._member.partitions_for_topic(self._feedback.topic)  # who does not know them yet gives them to nobody
        self._member.subscribe([self._feedback.topic], listener=self._rebalances)

    def membership(self, timeout: float) -> MembershipState:
        """This editor's place in the group, after waiting for news of it."""
        self._poll(timeout)
        if not self._rebalances.count or not self._is_stable():
            return "joining"  # or joining again: the generation is about to change
        self._adopt_generation()
        return "chosen" if self._feedback in self._member.assignment() else "standby"

    def poll(self, timeout: float) -> tuple[int, int, bytes | None, bytes | None] | None:
        """The next feedback record, as (offset, timestamp in ms, key, value), if one comes within `timeout`.

        Raises:
            PartitionLostError: another editor has the partition now.
        """
        polled = self._poll(timeout)
        if self._is_stable():
            self._last_stable_at = time.monotonic()
        elif time.monotonic() > self._last_stable_at + self._settings.session_timeout:
            # While a member joins no heartbeat is sent: by now the group has given it up.
            raise PartitionLostError("the group has not come to rest within a session")
        if self._handle_rebalance():
            return None
        for record in polled.get(self._feedback, []):
            self._next_feedback = record.offset + 1
            return record.offset, record.timestamp, record.key, record.value
        return None

    def keep_alive(self, min_interval: float) -> None:
        """Keep the assignment while one record is being decided, at most once in `min_interval` seconds.

        Raises:
            PartitionLostError: another editor has the partition now.
        """
        if time.monotonic() > self._last_poll_at + min_interval:
            polled = self._poll(0.0)
            if not self._handle_rebalance() and polled:
                self._member.seek(self._feedback, self._next_feedback)  # what came is for later

    def _handle_rebalance(self) -> bool:
        """Whether there was a rebalance since the place was taken; then the place is taken anew.

        Raises:
            PartitionLostError: there is none any more.
        """
        if self._rebalances.count == self._seen_rebalances:
            return False
        same_member = self._member.group_metadata().member_id == self._group_metadata.member_id
        if self._feedback not in self._member.assignment() or not same_member:
            raise PartitionLostError("the group went on without this editor")
        self._adopt_generation()
        self._member.seek(self._feedback, self._next_feedback)  # a rebalance goes back to the group's offset
        return True

    def _poll(self, timeout: float) -> Any:
        """Poll, and see a rebalance that has begun to its end, if that comes within half a session.

        kafka-python throws away a join that ends between two polls and joins again, which begins the next rebalance of
        all: editors that do something else meanwhile would never come to rest.
        """
        polled = self._member.poll(timeout_ms=int(1000 * timeout))
        deadline = time.monotonic() + self._settings.session_timeout / 2
        # What was polled is handed out first: polling on would leave it behind.
        while not polled and not self._is_stable() and time.monotonic() < deadline:
            polled = self._member.poll(timeout_ms=500)
        self._last_poll_at = time.monotonic()
        return polled

    def _is_stable(self) -> bool:
        """Whether no rebalance is under way, as far as this member knows."""
        return bool(self._member.group_metadata().state == MemberState.STABLE)

    def _adopt_generation(self) -> None:
        """Hold on to the generation of the last rebalance."""
        self._last_stable_at = time.monotonic()
        self._seen_rebalances, self._group_metadata = self._rebalances.count, self._member.group_metadata()
        if self._group_metadata.generation_id < 1:
            raise PartitionLostError("this editor fell out of the group")


class _RebalanceCounter(ConsumerRebalanceListener):  # type: ignore[misc]
    """Counts them, in the consumer's own thread."""

    def __init__(self) -> None:
        self.count = 0

    def on_partitions_assigned(self, assigned: object) -> None:
        """The consumer holds these now, perhaps none."""
        del assigned
        self.count += 1

    def on_partitions_revoked(self, revoked: object) -> None:
        """Each rebalance begins so; what it leads to is seen at its end."""
