"""The editor's view of traffic: it reads `requests` beside its feedback and feeds the reservoir.

Before it decides on a correction it reads what was asked before, so that no edit takes over what the log already held.
However fast requests come, it keeps up with them: whether the reservoir wants a request is known from its place in the
log, and once the reservoir is full it wants one in thousands. Only those are decoded, tokenised and run.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog
from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError

from gracestream.pipeline.device import raise_if_device_lost
from gracestream.pipeline.editing import EditEngine
from gracestream.pipeline.kafka import REQUESTS, consumer
from gracestream.pipeline.model import InputError, Prompt
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import InvalidMessage, Request, decode

log = structlog.get_logger()

WARM_UP_RECORDS = 2000
"""Records of each partition that a starting editor reads again, to fill its reservoir."""

QUERY_BATCH_SIZE = 16
"""Requests whose queries are computed in one forward pass; feedback waits for one such pass at most."""

POLL_TIMEOUT_SECONDS = 0.05
"""How long it waits for records that are known to be there, before it looks at the clock."""

MAX_POLL_RECORDS = 1000
"""Records that are looked at in one go."""

PARTITION_CHECK_SECONDS = 30.0
"""How often it looks for partitions that were added to the topic."""

CATCH_UP_LIMIT_SECONDS = 2.0
"""How long a correction waits at most for the requests before it to be seen."""

TRAFFIC_RETRY_SECONDS = 30.0
"""Where Kafka does not say how far `requests` reaches, corrections go on without; this long until it is asked again."""

MAX_FETCH_BYTES = 2**20
"""Of one partition and fetch: requests are small, and an editor that falls behind must not fill its memory."""

MAX_BACKLOG_BYTES = 16 * 2**20
"""Of requests that wait to be looked at; those of the lowest rank are left out."""

ScoredRequest = tuple[float, bytes]
"""A request's rank in the reservoir, and its record."""


class TrafficReader:
    """Reads `requests` from shortly before the end, without a group: it takes nothing from the replicas."""

    def __init__(self, settings: Settings, engine: EditEngine, new_consumer: Callable[..., Any] = consumer) -> None:
        self._settings, self._engine = settings, engine
        self._topic = settings.topic(REQUESTS)
        self._consumer = new_consumer(
            settings,
            max_partition_fetch_bytes=MAX_FETCH_BYTES,
            fetch_max_bytes=8 * MAX_FETCH_BYTES,
            metadata_max_age_ms=int(1000 * PARTITION_CHECK_SECONDS),
        )
        self._offset_consumer = new_consumer(settings)
        """It fetches nothing: Kafka answers one request of a connection after the other, and a fetch waits long."""
        self._assigned: set[TopicPartition] = set()
        self._partitions_checked_at = time.monotonic()
        self._retry_at = self._last_progress_at = 0.0
        self._backlog: list[ScoredRequest] = []
        self._query_cache: OrderedDict[Prompt, np.ndarray] = OrderedDict()
        """Queries of the last prompts: where few different ones are asked, none is run again and again."""

    def warm_up(self) -> None:
        """At start: read the tail, and compute the queries of only those requests that the reservoir will hold."""
        self._assign_new_partitions()
        best: list[ScoredRequest] = []
        ends = self._offset_consumer.end_offsets(sorted(self._assigned))
        self._last_progress_at = time.monotonic()
        while self._has_unread(ends):
            if time.monotonic() > self._last_progress_at + TRAFFIC_RETRY_SECONDS:
                log.warning("traffic_unseen", reason=f"of {self._topic} nothing came in {TRAFFIC_RETRY_SECONDS:g} s")
                break
            best = self._highest_scored(best + self._poll_scored(0.5))
        for start in range(0, len(best), QUERY_BATCH_SIZE):
            self._add_requests(best[start : start + QUERY_BATCH_SIZE])

    def poll(self, timeout: float) -> None:
        """Look at the next requests, and take up to 16 into the reservoir; waits for the first at most `timeout`.

        While the reservoir fills, more are wanted than are taken at once; they are taken before others are looked at.
        """
        if time.monotonic() - self._partitions_checked_at > PARTITION_CHECK_SECONDS:
            self._assign_new_partitions()
        if not self._backlog:
            self._backlog = self._highest_scored(self._poll_scored(timeout))
        self._add_requests(self._backlog[:QUERY_BATCH_SIZE])
        del self._backlog[:QUERY_BATCH_SIZE]

    def catch_up_to_now(self, limit_seconds: float = CATCH_UP_LIMIT_SECONDS) -> None:
        """Read up to what is in the log now, for at most `limit_seconds`: called before a correction is decided on.

        What was asked before the correction is then kept clear of, however fast one followed the other.
        """
        started = time.monotonic()
        if started < self._retry_at or self._settings.traffic == 0:
            return
        try:
            ends = self._offset_consumer.end_offsets(sorted(self._assigned), timeout_ms=1000 * limit_seconds)
            while self._backlog or self._has_unread(ends):
                if time.monotonic() - started > limit_seconds:
                    log.info("traffic_unseen", reason=f"more came than could be read in {limit_seconds:g} s")
                    return
                self.poll(POLL_TIMEOUT_SECONDS)
        except KafkaTimeoutError as error:
            log.warning("traffic_unseen", reason=str(error), retry_seconds=TRAFFIC_RETRY_SECONDS)
            self._retry_at = time.monotonic() + TRAFFIC_RETRY_SECONDS

    def close(self) -> None:
        """Leave."""
        self._consumer.close()
        self._offset_consumer.close()

    def _has_unread(self, ends: dict[TopicPartition, int]) -> bool:
        """Whether something of that is not read yet; a position that is being looked up again is before all."""
        asked = 1000 * POLL_TIMEOUT_SECONDS
        return any((self._consumer.position(part, timeout_ms=asked) or 0) < end for part, end in ends.items())

    def _assign_new_partitions(self) -> None:
        """Read those that are not read yet, from shortly before their end."""
        self._partitions_checked_at = time.monotonic()
        numbers = self._consumer.partitions_for_topic(self._topic) or set()
        added = {TopicPartition(self._topic, number) for number in numbers} - self._assigned
        if not added:
            return
        starts, ends = (
            self._offset_consumer.beginning_offsets(sorted(added)),
            self._offset_consumer.end_offsets(sorted(added)),
        )
        self._assigned |= added
        self._consumer.assign(sorted(self._assigned))  # those that were read before keep their position
        for partition in added:
            self._consumer.seek(partition, max(starts[partition], ends[partition] - WARM_UP_RECORDS))

    def _highest_scored(self, scored: list[ScoredRequest]) -> list[ScoredRequest]:
        best, held = heapq.nlargest(self._settings.traffic, scored), 0
        for place, (_, value) in enumerate(best):
            held += len(value)
            if held > MAX_BACKLOG_BYTES:
                return best[:place]
        return best

    def _poll_scored(self, timeout: float) -> list[ScoredRequest]:
        """Those of the next requests that the reservoir wants."""
        wanted = []
        for records in self._consumer.poll(timeout_ms=int(1000 * timeout), max_records=MAX_POLL_RECORDS).values():
            self._last_progress_at = time.monotonic()
            for record in records:
                rank = self._engine.reservoir.offer(record.partition, record.offset, record.timestamp / 1000)
                if rank is not None and len(record.value or b"") <= self._settings.max_record_bytes:
                    wanted.append((rank, record.value or b""))
        return wanted

    def _add_requests(self, scored: list[ScoredRequest]) -> None:
        """Compute queries and hold them; what is no request is left out, for the replicas reject it."""
        prompts: dict[Prompt, float] = {}
        for rank, value in scored:
            try:
                request = decode(value, Request, self._settings.max_record_bytes)
                prompt = self._engine.model.task.tokenize(request.inputs)
            except (InvalidMessage, InputError):
                continue
            if (query_D := self._query_cache.get(prompt)) is not None:
                self._engine.add_traffic(rank, query_D, self._engine.model.task.wording(prompt))
            else:
                prompts[prompt] = max(rank, prompts.get(prompt, rank))
        self._add_prompts(list(prompts.items()))

    def _add_prompts(self, scored_prompts: list[tuple[Prompt, float]]) -> None:
        """A prompt on which the model fails is left out, its neighbours are not."""
        if not scored_prompts:
            return
        queries_BD: Any = None
        try:
            queries_BD = self._engine.model.queries([prompt for prompt, _ in scored_prompts]).cpu().numpy()
        except Exception as error:  # noqa: BLE001  (a request that breaks the model must not stop the editor)
            raise_if_device_lost(error)
            failure = repr(error)
        if queries_BD is not None:
            for (prompt, rank), query_D in zip(scored_prompts, queries_BD, strict=True):
                self._engine.add_traffic(rank, query_D, self._engine.model.task.wording(prompt))
                self._query_cache[prompt] = query_D
            while len(self._query_cache) > self._settings.traffic:
                self._query_cache.popitem(last=False)
        elif len(scored_prompts) == 1:
            log.warning("request_left_out", tokens=len(scored_prompts[0][0]), error=failure)
        else:
            for one in scored_prompts:
                self._add_prompts([one])
