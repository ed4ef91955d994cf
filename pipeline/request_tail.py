"""The editor's view of traffic: it reads `requests` beside its feedback and feeds the reservoir."""

import heapq
from collections.abc import Sequence

import structlog
from kafka import TopicPartition

from pipeline.clients import consumer
from pipeline.editing import EditEngine
from pipeline.settings import Settings
from pipeline.tasks import InputError
from pipeline.topics import REQUESTS
from schemas.messages import InvalidMessage, Request, decode

log = structlog.get_logger()

TAIL = 2000
"""Records of each partition that a starting editor reads again, to fill its reservoir."""

AT_ONCE = 16
"""Requests whose queries are computed in one forward pass; feedback waits for one such pass at most."""

Ranked = tuple[float, list[int]]
"""A request's rank in the reservoir, and its tokens."""


class RequestTail:
    """Reads `requests` from shortly before the end, without a group: it takes nothing from the replicas."""

    def __init__(self, settings: Settings, engine: EditEngine) -> None:
        self._settings, self._engine = settings, engine
        self._consumer = consumer(settings)
        topic = settings.topic(REQUESTS)
        numbers = sorted(self._consumer.partitions_for_topic(topic) or ())
        self._partitions = [TopicPartition(topic, number) for number in numbers]
        self._consumer.assign(self._partitions)
        starts = self._consumer.beginning_offsets(self._partitions)
        self._ends = self._consumer.end_offsets(self._partitions)
        for partition, end in self._ends.items():
            self._consumer.seek(partition, max(starts[partition], end - TAIL))

    def catch_up(self) -> None:
        """At start: read the tail, and compute the queries of only those requests that the reservoir will hold."""
        best: list[Ranked] = []
        while any(self._consumer.position(partition) < end for partition, end in self._ends.items()):
            best = heapq.nlargest(self._settings.traffic, best + self._read(0.5, max_records=500))
        for start in range(0, len(best), AT_ONCE):
            self._hold(best[start : start + AT_ONCE])

    def read(self, seconds: float) -> None:
        """Take up to 16 requests into the reservoir; waits for the first at most `seconds`."""
        self._hold(self._read(seconds, max_records=AT_ONCE))

    def close(self) -> None:
        """Leave."""
        self._consumer.close()

    def _read(self, seconds: float, max_records: int) -> list[Ranked]:
        """The next requests that the reservoir wants."""
        wanted = []
        for records in self._consumer.poll(timeout_ms=int(1000 * seconds), max_records=max_records).values():
            for record in records:
                rank = self._engine.traffic.wants(record.partition, record.offset, record.timestamp / 1000)
                if rank is None:
                    continue
                try:
                    request = decode(record.value, Request, self._settings.max_record_bytes)
                    wanted.append((rank, self._engine.model.task.tokenize(request.inputs)))
                except (InvalidMessage, InputError):
                    continue  # the replicas reject it
        return wanted

    def _hold(self, ranked: Sequence[Ranked]) -> None:
        """Compute queries and hold them; a prompt on which the model fails is left out, its neighbours are not."""
        if not ranked:
            return
        try:
            queries_BD = self._engine.model.queries([prompt for _, prompt in ranked]).cpu().numpy()
        except Exception as error:  # noqa: BLE001  (a request that breaks the model must not stop the editor)
            if len(ranked) == 1:
                log.warning("request_left_out", tokens=len(ranked[0][1]), error=repr(error))
                return
            for one in ranked:
                self._hold([one])
            return
        for (rank, _), query_D in zip(ranked, queries_BD, strict=True):
            self._engine.observe(rank, query_D)
