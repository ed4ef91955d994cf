"""The codebook of a process that answers requests: it follows the published head, also while no requests come.

1. The codebook changes in one thread (`thread`). Lookups run there too, so they never see half a change.
2. `move_to_head` runs in that thread before requests are looked up. So they are answered from the published codebook.
3. Without requests, the codebook follows the head: at once after a hint, and otherwise several times a second.
4. After a fault, `fault` is set, readiness ends, and coroutines that need the codebook never return. So the work at
   hand stays uncommitted.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Literal

import structlog
import torch

from gracestream.pipeline.codebook import Codebook, KeyIndex
from gracestream.pipeline.device import DeviceLostError
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import describe_failure
from gracestream.pipeline.observability import Health
from gracestream.pipeline.replica.codebook_replica import CodebookReplica
from gracestream.pipeline.replica.delta_follower import DeltaFollower
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores import Head, HeadListener, RedisHeadStore, redis_client

log = structlog.get_logger()

IDLE_POLL_SECONDS = 0.2
"""Seconds until the next read of the head while no request waits for a delta. A hint ends the wait."""

FAST_POLL_SECONDS = 0.02
"""Seconds until the next read of the head while requests wait for a delta. A hint ends the wait."""


class LiveCodebook:
    """A codebook replica with the threads that keep it at the head.

    Attributes:
        replica: The codebook, its index, and what is known of Redis.
        thread: The thread in which the codebook changes.
        fault: Why the codebook cannot be used any more; None if it can.
    """

    def __init__(self, fingerprint: str, layer: str, device: torch.device, settings: Settings, health: Health) -> None:
        """An empty codebook.

        Args:
            fingerprint: Of the model.
            layer: Path of the edited layer.
            device: Where keys are searched.
            settings: Of the worker.
            health: Reports the codebook's state, readiness and stalls.
        """
        self._settings, self._health = settings, health
        codebook = Codebook(settings.model.codebook, fingerprint, layer)
        self._follower = DeltaFollower(settings.kafka)
        store = RedisHeadStore(redis_client(settings.redis), settings.kafka.topic_prefix, codebook.name)
        self.replica = CodebookReplica(codebook, KeyIndex(codebook, device), store, self._follower, settings)
        self._channel = store.channel
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        # Two: a probe of the idle loop that hangs must not delay the head of a step.
        self._head_thread = ThreadPoolExecutor(2, thread_name_prefix="head")
        self._num_waiting = 0
        self.fault: HistoryError | DeviceLostError | None = None
        health.state = self.replica.state

    @property
    def codebook(self) -> Codebook:
        """The codebook."""
        return self.replica.codebook

    async def start(self) -> bool:
        """Load a snapshot if there is one, and catch up with the head; False if the log makes no progress.

        Raises:
            HistoryError: the history cannot be followed.
        """
        await asyncio.to_thread(self.replica.start)
        if await asyncio.to_thread(self.replica.catch_up, self._settings.kafka.startup_timeout):
            return True
        log.error(
            "startup_catch_up_timeout",
            seq=self.codebook.seq,
            read=self._follower.latest_seq,
            consequence="the replica exits with status 1 and has answered nothing",
            remedy="check that Kafka answers, and start the replica again",
        )
        return False

    @asynccontextmanager
    async def following(self) -> AsyncIterator["asyncio.Task[None]"]:
        """Follow the head inside this context. The task ends by a defect only."""
        hint = asyncio.Event()
        listener = HeadListener(
            self._settings.redis,
            self._channel,
            partial(asyncio.get_running_loop().call_soon_threadsafe, hint.set),
        )
        listener.start()
        task = asyncio.create_task(self._follow_head(hint))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.to_thread(listener.close)

    def move_to_head(self) -> None:
        """Read the head and move the codebook to it. Call it in `thread`.

        Raises:
            HistoryError: the history cannot be followed.
        """
        replica = self.replica
        pending_head = None if replica.redis_unavailable else self._head_thread.submit(replica.read_head)
        replica.sync_to_head(replica.wait_for_head(pending_head))

    async def sync_to_head(self, *, probe: bool = False) -> None:
        """The same from an event loop. While Redis is unavailable, it is asked only if `probe` is set."""
        loop = asyncio.get_running_loop()
        head: Head | Literal["lost"] | None = "lost"
        if probe or not self.replica.redis_unavailable:
            head = await loop.run_in_executor(self._head_thread, self.replica.read_head)

        def sync() -> None:
            with self._health.busy("model"):
                self.replica.sync_to_head(head)

        try:
            await loop.run_in_executor(self.thread, sync)
        except (HistoryError, DeviceLostError) as fault:
            await self.park_forever(fault)

    async def wait_for_delta(self, seq: int, started_at: float) -> bool:
        """Wait until a delta is published; False if waiting longer is useless.

        Args:
            seq: The delta.
            started_at: When the first wait began, in the loop's time.
        """
        loop = asyncio.get_running_loop()
        self._num_waiting += 1
        try:
            while may_arrive := self.replica.should_wait_for(seq, loop.time() - started_at):
                if self.codebook.seq >= seq:
                    break
                await asyncio.sleep(FAST_POLL_SECONDS)
        finally:
            self._num_waiting -= 1
        return may_arrive

    async def park_forever(self, fault: HistoryError | DeviceLostError) -> None:
        """Record the fault, and never return.

        The interrupted work stays uncommitted. Another replica does it, or this one after a restart.
        """
        self.record_fault(fault)
        await asyncio.Event().wait()

    def record_fault(self, fault: HistoryError | DeviceLostError) -> None:
        """Keep the first fault, report it, and end readiness."""
        if self.fault is not None:
            return
        self.fault = fault
        self._health.set_not_ready(str(fault))
        if isinstance(fault, HistoryError):
            log.error(
                "history_error",
                reason=str(fault),
                seq=self.codebook.seq,
                consequence="the replica answers no more, and stays alive for inspection; others answer its requests",
            )
        else:
            log.error(
                "device_lost",
                reason=str(fault),
                seq=self.codebook.seq,
                consequence="the replica exits with status 1; others answer its requests",
            )

    def report_follower(self, task: "asyncio.Task[None]") -> None:
        """Log why the task of `following` ended."""
        error = task.exception()
        log.error(
            "head_follower_failed",
            reason="unknown" if error is None else describe_failure(error),
            seq=self.codebook.seq,
            consequence="the replica exits with status 1; others answer its requests",
        )

    def set_ready(self) -> None:
        """Report `ready`."""
        self._health.set_ready()
        log.info("worker_ready", seq=self.codebook.seq, entries=len(self.codebook))

    def update_readiness(self) -> None:
        """Report `not ready` while a published delta cannot be read from the log."""
        health, replica = self._health, self.replica
        is_behind = replica.unread_head_seq and not replica.degraded
        if is_behind and health.ready:
            reason = (
                f"delta {replica.unread_head_seq} is published, but the log can be read only up to delta"
                f" {self.codebook.seq}"
            )
            health.set_not_ready(reason)
            log.error(
                "replica_behind_head",
                reason=reason,
                consequence="the replica is not ready, and answers from an older codebook",
            )
        elif not is_behind and not health.ready:
            self.set_ready()

    def close(self, *, wait: bool) -> None:
        """Stop following the log and end the threads; `wait` for the work in them."""
        self._follower.close()
        for thread in (self.thread, self._head_thread):
            thread.shutdown(wait=wait)

    async def _follow_head(self, hint: asyncio.Event) -> None:
        """Keep the codebook at the head while no requests join. `hint` is set when the head may have changed."""
        while True:
            hint.clear()  # before the read: a hint that comes meanwhile may be about a newer head
            await self.sync_to_head(probe=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(FAST_POLL_SECONDS if self._num_waiting else IDLE_POLL_SECONDS):
                    await hint.wait()
