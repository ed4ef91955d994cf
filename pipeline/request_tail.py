"""The editor's view of traffic: it reads `requests` beside its feedback and feeds the reservoir."""

from kafka import TopicPartition

from pipeline.clients import consumer
from pipeline.editing import EditEngine
from pipeline.settings import Settings
from pipeline.tasks import InputError
from pipeline.topics import REQUESTS
from schemas.messages import InvalidMessage, Request, decode

TAIL = 2000
"""Records of each partition that a starting editor reads again, to fill its reservoir."""

AT_ONCE = 16
"""Requests whose queries are computed in one forward pass; feedback waits for one such pass at most."""


class RequestTail:
    """Reads `requests` from shortly before the end, without a group: it takes nothing from the replicas."""

    def __init__(self, settings: Settings, engine: EditEngine) -> None:
        self._settings, self._engine = settings, engine
        self._consumer = consumer(settings, max_poll_records=AT_ONCE)
        topic = settings.topic(REQUESTS)
        partitions = [
            TopicPartition(topic, number) for number in sorted(self._consumer.partitions_for_topic(topic) or ())
        ]
        self._consumer.assign(partitions)
        starts = self._consumer.beginning_offsets(partitions)
        for partition, end in self._consumer.end_offsets(partitions).items():
            self._consumer.seek(partition, max(starts[partition], end - TAIL))

    def read(self, seconds: float) -> int:
        """Take up to 16 requests into the reservoir; how many were read."""
        engine, read = self._engine, 0
        ranks: list[float] = []
        prompts: list[list[int]] = []
        for records in self._consumer.poll(timeout_ms=int(1000 * seconds), max_records=AT_ONCE).values():
            for record in records:
                read += 1
                rank = engine.traffic.wants(record.partition, record.offset, record.timestamp / 1000)
                if rank is None:
                    continue
                try:
                    request = decode(record.value, Request, self._settings.max_record_bytes)
                    prompts.append(engine.model.task.tokenize(request.inputs))
                    ranks.append(rank)
                except (InvalidMessage, InputError):
                    continue  # the replicas reject it
        if prompts:
            for rank, query_D in zip(ranks, engine.model.queries(prompts).cpu().numpy(), strict=True):
                engine.observe(rank, query_D)
        return read

    def close(self) -> None:
        """Leave."""
        self._consumer.close()
