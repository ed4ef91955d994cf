"""An editor's membership in the group of editors: election, standby, heartbeats, and reading `feedback`.

Editors share one consumer group, and `feedback` has one partition. The member with this partition is elected: it alone
may lead.

Guarantees (docs/explanation/consistency.md):

1. A busy leader keeps the partition. kafka-python sends heartbeats from a thread of its own, and the group waits
   `stall_timeout` seconds for the next poll. `keep_alive` polls, and so restarts that time.
2. A leader that does not poll for `stall_timeout` seconds, or is silent for `session_timeout` seconds, loses the
   partition to a standby. `/live` reports a stall after `stall_timeout` seconds, too.
3. A standby that joins or leaves does not move the partition: the assignment is sticky.
4. A former leader learns of its loss from the next `poll` or `keep_alive`, which raise KafkaError.

Not promised: that no two editors believe to be elected at the same moment. A stalled leader believes so until its next
call. The broker rejects its commits, since each names a generation of the group (`pipeline.editor.log`).
"""

import time
from collections.abc import Callable
from typing import Any, Literal

from kafka import ConsumerRebalanceListener, TopicPartition
from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from kafka.errors import KafkaError
from kafka.structs import MemberState

from gracestream.pipeline.editor.feedback import FeedbackRecord
from gracestream.pipeline.kafka import FEEDBACK, consumer
from gracestream.pipeline.settings import KafkaSettings

MembershipState = Literal["joining", "standby", "elected"]
"""`joining`: a rebalance is under way. `standby`: another member is elected. `elected`: this member has the partition.

An elected member leads once it has committed its `lead` delta.
"""


class PartitionLostError(KafkaError):  # type: ignore[misc]
    """The group has assigned the partition to another editor, or is about to."""


class GroupMember:
    """A consumer of `feedback` in the group of editors.

    Args:
        settings: The cluster, the prefix of names, `session_timeout` and `stall_timeout`.
        new_consumer: Creates a consumer, with the signature of `pipeline.kafka.consumer`.
    """

    def __init__(self, settings: KafkaSettings, new_consumer: Callable[..., Any] = consumer) -> None:
        self._settings, self._new_consumer = settings, new_consumer
        self._feedback = TopicPartition(settings.topic(FEEDBACK), 0)
        self._next_feedback = 0
        """The offset after the last record that `poll` returned."""
        self._last_poll_at = 0.0
        """Monotonic time of the last poll; the group waits `stall_timeout` seconds from there."""
        self._last_stable_at = 0.0
        """Monotonic time at which the group last accepted this member's generation."""
        self._member: Any = None
        self._rebalances = _RebalanceCounter()
        self._seen_rebalances = 0
        """The rebalances that `_adopt_generation` has taken into account."""
        self._group_metadata: Any = None
        """Member id and generation as of the last completed rebalance. Each commit names them."""

    def join(self) -> None:
        """Join the group of editors.

        The group may assign the partition at once, so the caller must know the history before.
        """
        timeout_ms = int(1000 * self._settings.session_timeout)
        self._member = self._new_consumer(
            self._settings,
            group_id=self._settings.topic("editor"),
            session_timeout_ms=timeout_ms,
            heartbeat_interval_ms=timeout_ms // 10,
            max_poll_interval_ms=int(1000 * self._settings.stall_timeout),
            partition_assignment_strategy=[StickyPartitionAssignor],
            max_poll_records=1,  # so that a poll, and any pending rebalance, follows each edit
        )
        self._rebalances, self._seen_rebalances = _RebalanceCounter(), 0
        # One member computes the assignment for all, from its own metadata. Without the topic's partitions it would
        # assign them to nobody, so fetch the metadata before joining.
        self._member.partitions_for_topic(self._feedback.topic)
        self._member.subscribe([self._feedback.topic], listener=self._rebalances)

    def membership(self, timeout: float) -> MembershipState:
        """This editor's state in the group, after a poll of at most `timeout` seconds."""
        self._poll(timeout)
        if not self._rebalances.count or not self._is_stable():
            return "joining"  # also while it rejoins: the generation is about to change
        self._adopt_generation()
        return "elected" if self._feedback in self._member.assignment() else "standby"

    def poll(self, timeout: float) -> FeedbackRecord | None:
        """The next feedback record; None if none comes in `timeout` seconds.

        Raises:
            PartitionLostError: another editor has the partition now.
        """
        polled = self._poll(timeout)
        if self._is_stable():
            self._last_stable_at = time.monotonic()
        elif time.monotonic() > self._last_stable_at + self._settings.session_timeout:
            # A member sends no heartbeat while it rejoins, so the group has removed it by now.
            raise PartitionLostError("the rebalance of the group has taken longer than the session timeout")
        if self._handle_rebalance():
            return None
        for record in polled.get(self._feedback, []):
            self._next_feedback = record.offset + 1
            return FeedbackRecord(record.offset, record.timestamp, record.key, record.value)
        return None

    def keep_alive(self, min_interval: float) -> None:
        """Keep the partition while one record is being decided; polls at most once in `min_interval` seconds.

        Raises:
            PartitionLostError: another editor has the partition now.
        """
        if time.monotonic() > self._last_poll_at + min_interval:
            polled = self._poll(0.0)
            if not self._handle_rebalance() and polled:
                self._member.seek(self._feedback, self._next_feedback)  # the polled record is for a later `poll`

    def _handle_rebalance(self) -> bool:
        """True if a rebalance has taken place since the last call; the new generation is then adopted.

        Raises:
            PartitionLostError: this editor has no longer the partition, or has rejoined as a new member.
        """
        if self._rebalances.count == self._seen_rebalances:
            return False
        same_member = self._member.group_metadata().member_id == self._group_metadata.member_id
        if self._feedback not in self._member.assignment() or not same_member:
            raise PartitionLostError("this editor has lost its assignment in a rebalance of the group")
        self._adopt_generation()
        self._member.seek(self._feedback, self._next_feedback)  # a rebalance resets the position to the group's offset
        return True

    def _poll(self, timeout: float) -> Any:
        """Poll once, then wait up to half of `session_timeout` for a rebalance that has begun to end.

        kafka-python discards a join that completes between two polls, and joins again, which starts another rebalance
        of the whole group. Editors that do other work between their polls would rebalance for ever.
        """
        polled = self._member.poll(timeout_ms=int(1000 * timeout))
        deadline = time.monotonic() + self._settings.session_timeout / 2
        # Polled records are returned first: another poll would skip them.
        while not polled and not self._is_stable() and time.monotonic() < deadline:
            polled = self._member.poll(timeout_ms=500)
        self._last_poll_at = time.monotonic()
        return polled

    def _is_stable(self) -> bool:
        """True if this member knows of no rebalance under way."""
        return bool(self._member.group_metadata().state == MemberState.STABLE)

    def _adopt_generation(self) -> None:
        """Remember the member id and generation of the last rebalance.

        Raises:
            PartitionLostError: this editor is not a member of the group.
        """
        self._last_stable_at = time.monotonic()
        self._seen_rebalances, self._group_metadata = self._rebalances.count, self._member.group_metadata()
        if self._group_metadata.generation_id < 1:
            raise PartitionLostError("this editor is no longer a member of the group")


class _RebalanceCounter(ConsumerRebalanceListener):  # type: ignore[misc]
    """Counts completed rebalances; kafka-python calls it from `poll`."""

    def __init__(self) -> None:
        self.count = 0

    def on_partitions_assigned(self, assigned: object) -> None:
        """Count one; `assigned` may be empty."""
        del assigned
        self.count += 1

    def on_partitions_revoked(self, revoked: object) -> None:
        """Count nothing: the rebalance has only begun."""
