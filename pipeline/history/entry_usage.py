"""Who hits an entry: the predictions that it gave, as far as `predictions` still has them."""

from msgspec import UNSET, Struct

from gracestream.pipeline.kafka import PREDICTIONS, read_topic
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import InvalidMessage, Prediction, decode

MAX_RECENT_ANSWERS = 10


class EntryAnswer(Struct, frozen=True):
    """One answer that an entry gave; `timestamp` is Kafka's, in seconds."""

    request_id: str
    timestamp: float
    distance: float
    radius: float
    replica: str


class EntryUsage(Struct, frozen=True):
    """How many answers an entry gave, and the newest of them, newest first."""

    count: int
    recent: list[EntryAnswer]


def read_entry_usage(settings: Settings, entry_id: str) -> EntryUsage:
    """Read all of `predictions`; one request counts as often as it was answered."""
    count = 0
    recent: list[EntryAnswer] = []
    for record in read_topic(settings, PREDICTIONS):
        hit = _parse_entry_answer(record.value, record.timestamp, entry_id)
        if hit is not None:
            count += 1
            recent.append(hit)
            if len(recent) > 100 * MAX_RECENT_ANSWERS:
                recent = _newest(recent)
    return EntryUsage(count, _newest(recent))


def _newest(answers: list[EntryAnswer]) -> list[EntryAnswer]:
    return sorted(answers, key=lambda hit: -hit.timestamp)[:MAX_RECENT_ANSWERS]


def _parse_entry_answer(value: bytes | None, timestamp: int, entry_id: str) -> EntryAnswer | None:
    if value is None or b'"edit"' not in value:
        return None
    try:
        prediction = decode(value, Prediction)
    except InvalidMessage:
        return None  # not of this pipeline's making
    edit = prediction.edit
    if edit is UNSET or edit.entry_id != entry_id:
        return None
    return EntryAnswer(prediction.request_id, timestamp / 1000, edit.distance, edit.radius, prediction.replica)
