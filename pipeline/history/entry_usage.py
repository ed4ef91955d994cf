"""The usage of an entry: the predictions that it answered, as far as `predictions` retains them."""

from msgspec import UNSET, Struct

from gracestream.pipeline.kafka import PREDICTIONS, read_topic
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.messages import InvalidMessage, Prediction, decode

MAX_RECENT_ANSWERS = 10
"""Answers that are returned one by one."""


class EntryAnswer(Struct, frozen=True):
    """One prediction that an entry answered. `timestamp` is Kafka's, in seconds."""

    request_id: str
    timestamp: float
    distance: float
    radius: float
    replica: str


class EntryUsage(Struct, frozen=True):
    """The number of predictions that an entry answered, and the newest of them, newest first."""

    count: int
    recent: list[EntryAnswer]


def read_entry_usage(settings: KafkaSettings, entry_id: str) -> EntryUsage:
    """The usage of an entry, from all of `predictions`. Repeated answers to one request count each."""
    count = 0
    recent: list[EntryAnswer] = []
    for record in read_topic(settings, PREDICTIONS):
        answer = _parse_entry_answer(record.value, record.timestamp, entry_id)
        if answer is not None:
            count += 1
            recent.append(answer)
            if len(recent) > 100 * MAX_RECENT_ANSWERS:
                recent = _newest(recent)
    return EntryUsage(count, _newest(recent))


def _newest(answers: list[EntryAnswer]) -> list[EntryAnswer]:
    """The newest answers, newest first."""
    return sorted(answers, key=lambda answer: -answer.timestamp)[:MAX_RECENT_ANSWERS]


def _parse_entry_answer(value: bytes | None, timestamp: int, entry_id: str) -> EntryAnswer | None:
    """The answer in a record of `predictions` if this entry gave it; else None."""
    if value is None or b'"edit"' not in value:  # most predictions are unedited: skip decoding them
        return None
    try:
        prediction = decode(value, Prediction)
    except InvalidMessage:
        return None  # another program's record
    edit = prediction.edit
    if edit is UNSET or edit.entry_id != entry_id:
        return None
    return EntryAnswer(prediction.request_id, timestamp / 1000, edit.distance, edit.radius, prediction.replica)
