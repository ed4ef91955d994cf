"""The records of all topics of a deployment, written without Kafka, for tests of what is made of them."""

from collections.abc import Sequence
from typing import Any

from gracestream.schemas.messages import Message, Outputs, Prediction, Request, encode
from tests.support.doubles.kafka import Stored
from tests.support.recorded_history import Recorded

Topic = tuple[str, Any]
START = 1_700_000_000_000


def short_history() -> Recorded:
    """Two corrections, and an undo of the first."""
    made = Recorded()
    made.correct("f1", (0, 0), 1)
    made.correct("f2", (9, 9), 2)
    made.undo("u1", "f1")
    return made


class Topics:
    """The records of all topics, as a deployment writes them."""

    def __init__(self) -> None:
        self.records: dict[str, list[Stored]] = {
            name: [] for name in ("requests", "predictions", "feedback", "edits", "deltas")
        }
        self._taken: dict[str, int] = {}

    def write(self, topic: str, value: bytes | Message | None, minutes: float = 0, **fields: Any) -> None:
        found = self.records[topic]
        raw = encode(value) if isinstance(value, Message) else value
        timestamp = START + int(60_000 * minutes)
        found.append(Stored(topic, len(found), None, raw, fields.pop("headers", []), "plain", 0, timestamp, **fields))

    def ask(self, request_id: str, inputs: str, answer: str, minutes: float = 0, **fields: Any) -> None:
        """A request and its prediction."""
        self.write("requests", Request(v=1, request_id=request_id, inputs=inputs), minutes)
        given: dict[str, Any] = {
            "codebook_seq": 1, "term": 1, "model": "m", "replica": "r1", "latency_ms": 3.0,
            "outputs": Outputs(text=answer),
        }  # fmt: skip
        self.write("predictions", Prediction(v=1, request_id=request_id, **(given | fields)), minutes)

    def add_history(self, history: Recorded) -> None:
        for offset, feedback in history.feedback.items():
            assert offset == len(self.records["feedback"])
            self.write("feedback", feedback, offset)
        for stored in history.edits:
            self.write("edits", stored.value, 1, headers=stored.headers)
        for delta in history.deltas:
            self.write("deltas", delta, 1)

    def all(self) -> list[Topic]:
        return [(topic, record) for topic, records in self.records.items() for record in records]

    def new(self) -> list[Topic]:
        """The records since the last call."""
        found = [(topic, record) for topic, record in self.all() if record.offset >= self._taken.get(topic, 0)]
        self._taken = {topic: len(records) for topic, records in self.records.items()}
        return found


def failed(request_id: str, **fields: Any) -> Prediction:
    """A prediction with an error."""
    given: dict[str, Any] = {"codebook_seq": 1, "term": 1, "model": "m", "replica": "r1", "latency_ms": 1.0}
    return Prediction(v=1, request_id=request_id, error="too long", **(given | fields))


def positions_after(records: Sequence[Topic]) -> dict[tuple[str, int], int]:
    return {(topic, record.partition): record.offset + 1 for topic, record in records}
