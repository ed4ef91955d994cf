"""Reads `requests` for the editor and feeds the traffic sample with unflagged queries.

1. Before the editor decides on a correction, the reader catches up with the requests sent before it. So a new radius
   keeps clear of them.
2. It keeps up with any request rate. The traffic sample selects a request by its position in the topic alone, before
   it is decoded. A full sample selects one request in thousands; only those are decoded, tokenised and run.

Not promised: that every correction sees all earlier requests. Catching up stops after `CATCH_UP_LIMIT_SECONDS`, and is
skipped for a while after Kafka failed to answer.
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
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.messages import InvalidMessage, Request, decode

log = structlog.get_logger()

WARM_UP_RECORDS = 2000
"""Records per partition that a starting editor reads again to fill its traffic sample."""

QUERY_BATCH_SIZE = 16
"""Requests per forward pass. Feedback waits for one such pass at most."""

POLL_TIMEOUT_SECONDS = 0.05
"""Seconds to wait for records that are known to exist, before the time limit is checked again."""

MAX_POLL_RECORDS = 1000
"""Records per poll; each is offered to the traffic sample."""

PARTITION_CHECK_SECONDS = 30.0
"""Seconds between two checks for partitions that were added to the topic."""

CATCH_UP_LIMIT_SECONDS = 2.0
"""Seconds that a correction waits at most for earlier requests to be read."""

TRAFFIC_RETRY_SECONDS = 30.0
"""Seconds without catching up, after Kafka did not tell the end of `requests`; also the timeout of the warm-up."""

MAX_FETCH_BYTES = 2**20
"""Bytes per partition and fetch. Requests are small, and an editor that lags must not fill its memory."""

MAX_BACKLOG_BYTES = 16 * 2**20
"""Bytes of selected requests that wait to be run; beyond it, those with the lowest scores are dropped."""

ScoredRequest = tuple[float, bytes]
"""A request's score in the traffic sample, and its record."""


class TrafficReader:
    """Reads `requests` from `WARM_UP_RECORDS` before its end. It joins no group, so replicas lose nothing."""

    def __init__(
        self, settings: KafkaSettings, engine: EditEngine, new_consumer: Callable[..., Any] = consumer
    ) -> None:
        self._settings, self._engine = settings, engine
        self._topic = settings.topic(REQUESTS)
        self._consumer = new_consumer(
            settings,
            max_partition_fetch_bytes=MAX_FETCH_BYTES,
            fetch_max_bytes=8 * MAX_FETCH_BYTES,
            metadata_max_age_ms=int(1000 * PARTITION_CHECK_SECONDS),
        )
        self._offset_consumer = new_consumer(settings)
        """Reads end offsets only. Kafka answers the requests of a connection in order, so they would wait behind a
        fetch."""
        self._assigned: set[TopicPartition] = set()
        self._partitions_checked_at = time.monotonic()
        self._retry_at = self._last_progress_at = 0.0
        self._backlog: list[ScoredRequest] = []
        self._query_cache: OrderedDict[Prompt, np.ndarray] = OrderedDict()
        """Queries of recent prompts, so that a few repeated prompts are not run over and over."""

    def warm_up(self) -> None:
        """At start: read the tail of `requests`, and run only the requests that stay in the traffic sample."""
        self._assign_new_partitions()
        best: list[ScoredRequest] = []
        ends = self._offset_consumer.end_offsets(sorted(self._assigned))
        self._last_progress_at = time.monotonic()
        while self._has_unread(ends):
            if time.monotonic() > self._last_progress_at + TRAFFIC_RETRY_SECONDS:
                log.warning(
                    "traffic_catch_up_incomplete",
                    reason=f"no record of {self._topic} came in {TRAFFIC_RETRY_SECONDS:g} s",
                    consequence="the editor starts with less traffic, so new radii may reach earlier requests",
                )
                break
            best = self._highest_scored(best + self._poll_scored(0.5))
        for start in range(0, len(best), QUERY_BATCH_SIZE):
            self._add_requests(best[start : start + QUERY_BATCH_SIZE])

    def poll(self, timeout: float) -> None:
        """Read requests, and run up to `QUERY_BATCH_SIZE` selected ones; waits up to `timeout` seconds for records.

        While the traffic sample fills, a poll selects more requests than one batch. They are run before further records
        are read.
        """
        if time.monotonic() - self._partitions_checked_at > PARTITION_CHECK_SECONDS:
            self._assign_new_partitions()
        if not self._backlog:
            self._backlog = self._highest_scored(self._poll_scored(timeout))
        self._add_requests(self._backlog[:QUERY_BATCH_SIZE])
        del self._backlog[:QUERY_BATCH_SIZE]

    def catch_up_to_now(self, limit_seconds: float = CATCH_UP_LIMIT_SECONDS) -> None:
        """Read up to the present end of `requests`, for at most `limit_seconds`. Call it before each correction.

        New radii then keep clear of every request sent before the correction, however short the time between them.
        """
        started = time.monotonic()
        if started < self._retry_at or self._engine.config.traffic_sample_size == 0:
            return
        try:
            ends = self._offset_consumer.end_offsets(sorted(self._assigned), timeout_ms=1000 * limit_seconds)
            while self._backlog or self._has_unread(ends):
                if time.monotonic() - started > limit_seconds:
                    log.info(
                        "traffic_catch_up_incomplete",
                        reason=f"more requests came than can be read in {limit_seconds:g} s",
                    )
                    return
                self.poll(POLL_TIMEOUT_SECONDS)
        except KafkaTimeoutError as error:
            log.warning(
                "traffic_catch_up_incomplete",
                reason=str(error),
                retry_seconds=TRAFFIC_RETRY_SECONDS,
                consequence="new radii may reach requests that were not read",
            )
            self._retry_at = time.monotonic() + TRAFFIC_RETRY_SECONDS

    def close(self) -> None:
        """Close both consumers."""
        self._consumer.close()
        self._offset_consumer.close()

    def _has_unread(self, ends: dict[TopicPartition, int]) -> bool:
        """True if a partition is not read up to its offset in `ends`.

        A position that kafka-python is still looking up counts as 0.
        """
        timeout_ms = 1000 * POLL_TIMEOUT_SECONDS
        return any((self._consumer.position(part, timeout_ms=timeout_ms) or 0) < end for part, end in ends.items())

    def _assign_new_partitions(self) -> None:
        """Start reading partitions that are not assigned yet, from `WARM_UP_RECORDS` before their end."""
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
        self._consumer.assign(sorted(self._assigned))  # earlier partitions keep their position
        for partition in added:
            self._consumer.seek(partition, max(starts[partition], ends[partition] - WARM_UP_RECORDS))

    def _highest_scored(self, scored: list[ScoredRequest]) -> list[ScoredRequest]:
        """The best requests, best first: as many as the traffic sample holds, within `MAX_BACKLOG_BYTES`."""
        best, size_bytes = heapq.nlargest(self._engine.config.traffic_sample_size, scored), 0
        for index, (_, value) in enumerate(best):
            size_bytes += len(value)
            if size_bytes > MAX_BACKLOG_BYTES:
                return best[:index]
        return best

    def _poll_scored(self, timeout: float) -> list[ScoredRequest]:
        """The requests among the next records that the traffic sample selects, with their scores."""
        selected = []
        for records in self._consumer.poll(timeout_ms=int(1000 * timeout), max_records=MAX_POLL_RECORDS).values():
            self._last_progress_at = time.monotonic()
            for record in records:
                score = self._engine.traffic_sample.offer(record.partition, record.offset, record.timestamp / 1000)
                if score is not None and len(record.value or b"") <= self._settings.max_record_bytes:
                    selected.append((score, record.value or b""))
        return selected

    def _add_requests(self, scored: list[ScoredRequest]) -> None:
        """Add the queries of these requests to the traffic sample; invalid requests are skipped."""
        prompts: dict[Prompt, float] = {}
        for score, value in scored:
            try:
                request = decode(value, Request, self._settings.max_record_bytes)
                prompt = self._engine.model.task.tokenize(request.inputs)
            except (InvalidMessage, InputError):
                continue
            if (query_D := self._query_cache.get(prompt)) is not None:
                self._engine.add_traffic(score, query_D, self._engine.model.task.wording(prompt))
            else:
                prompts[prompt] = max(score, prompts.get(prompt, score))
        self._add_prompts(list(prompts.items()))

    def _add_prompts(self, scored_prompts: list[tuple[Prompt, float]]) -> None:
        """Run prompts in one batch. If the model fails, run each alone, and skip those on which it fails again."""
        if not scored_prompts:
            return
        queries_BD: Any = None
        try:
            queries_BD = self._engine.model.queries([prompt for prompt, _ in scored_prompts]).cpu().numpy()
        except Exception as error:  # noqa: BLE001  (a request that breaks the model must not stop the editor)
            raise_if_device_lost(error)
            failure = repr(error)
        if queries_BD is not None:
            for (prompt, score), query_D in zip(scored_prompts, queries_BD, strict=True):
                self._engine.add_traffic(score, query_D, self._engine.model.task.wording(prompt))
                self._query_cache[prompt] = query_D
            while len(self._query_cache) > self._engine.config.traffic_sample_size:
                self._query_cache.popitem(last=False)
        elif len(scored_prompts) == 1:
            log.warning(
                "traffic_request_skipped",
                tokens=len(scored_prompts[0][0]),
                reason=failure,
                consequence="new radii do not keep clear of this request",
            )
        else:
            for scored_prompt in scored_prompts:
                self._add_prompts([scored_prompt])
