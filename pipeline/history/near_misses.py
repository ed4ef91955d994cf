"""Near misses: the requests that an entry might have answered and the unedited model did, from the topics."""

from collections.abc import Collection

from msgspec import UNSET, Struct
from msgspec.structs import replace

from gracestream.pipeline.kafka import PREDICTIONS, REQUESTS, read_topic
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import Inputs, InvalidMessage, Prediction, Request, decode, peek_id

BUFFER_FACTOR = 10
"""Predictions that are held while reading, for each one that is wanted."""


class NearMissRequest(Struct, frozen=True):
    """One near miss.

    Attributes:
        request_id: Of the request.
        timestamp: Kafka's of the prediction, in seconds.
        entry_id: The entry that might have answered.
        reason: Why it did not: `answer`, its value did not give its target; `wording`, the words ask for something
            else, as `detail` says.
        target: What the entry answers where it applies; empty where the replica that answered did not say.
        distance: From its key to the query (Euclidean, layer's units).
        radius: Of the entry.
        answer: The unedited answer that was published: text or label.
        replica: Which published it.
        inputs: The request's; None where `requests` does not have it any more.
    """

    request_id: str
    timestamp: float
    entry_id: str
    reason: str
    distance: float
    radius: float
    answer: str
    replica: str
    inputs: Inputs | None = None
    detail: str = ""
    target: str = ""


def find_near_misses(settings: Settings, limit: int, entry_id: str | None = None) -> list[NearMissRequest]:
    """The newest near misses, at most so many, newest first; one request counts once. Of one entry if it is named.

    Reads all of `predictions`, and of `requests` if there is any near miss.

    Raises:
        TopicError: a topic is missing.
        KafkaTimeoutError: Kafka stopped answering.
    """
    found: dict[str, NearMissRequest] = {}
    for record in read_topic(settings, PREDICTIONS):
        missed = _parse_near_miss(record.value, record.timestamp)
        if missed is None or entry_id not in (None, missed.entry_id):
            continue
        known = found.get(missed.request_id)
        if known is None or known.timestamp <= missed.timestamp:
            found[missed.request_id] = missed
        if len(found) > BUFFER_FACTOR * limit:
            found = _newest(found, limit)
    found = _newest(found, limit)
    inputs = _read_inputs(settings, found) if found else {}
    return [replace(missed, inputs=inputs.get(request_id)) for request_id, missed in found.items()]


class MatchedRequest(Struct, frozen=True):
    """A request that an entry answered, or might have; `inputs` is None where `requests` has them no more."""

    entry_id: str
    inputs: Inputs | None


def find_matched_requests(settings: Settings, request_ids: Collection[str]) -> dict[str, MatchedRequest]:
    """Of these requests those that an entry answered, or might have, by request id; by the newest prediction of each.

    Raises:
        TopicError: a topic is missing.
        KafkaTimeoutError: Kafka stopped answering.
    """
    entries: dict[str, str] = {}
    for record in read_topic(settings, PREDICTIONS):
        request_id = peek_id(record.value, "request_id")
        if request_id is None or request_id not in request_ids:
            continue
        try:
            prediction = decode(record.value, Prediction)
        except InvalidMessage:
            continue  # another program's record
        named = prediction.near_miss if prediction.edit is UNSET else prediction.edit
        entries.pop(request_id, None)
        if named is not UNSET:
            entries[request_id] = named.entry_id
    inputs = _read_inputs(settings, entries) if entries else {}
    return {request_id: MatchedRequest(entry_id, inputs.get(request_id)) for request_id, entry_id in entries.items()}


def _newest(near_misses_by_id: dict[str, NearMissRequest], limit: int) -> dict[str, NearMissRequest]:
    newest = sorted(near_misses_by_id.values(), key=lambda missed: (-missed.timestamp, missed.request_id))[:limit]
    return {missed.request_id: missed for missed in newest}


def _parse_near_miss(value: bytes | None, timestamp: int) -> NearMissRequest | None:
    if value is None or b'"near_miss"' not in value:
        return None
    try:
        prediction = decode(value, Prediction)
    except InvalidMessage:
        return None  # another program's record
    near_miss, outputs = prediction.near_miss, prediction.outputs
    if near_miss is UNSET or outputs is UNSET:
        return None
    return NearMissRequest(
        request_id=prediction.request_id,
        timestamp=timestamp / 1000,
        entry_id=near_miss.entry_id,
        reason=near_miss.reason,
        distance=near_miss.distance,
        radius=near_miss.radius,
        answer=outputs.text if outputs.text is not UNSET else str(outputs.label),
        replica=prediction.replica,
        detail="" if near_miss.detail is UNSET else near_miss.detail,
        target="" if near_miss.target is UNSET else near_miss.target,
    )


def _read_inputs(settings: Settings, request_ids: Collection[str]) -> dict[str, Inputs]:
    """By request id; of a request that was sent more than once the last."""
    found: dict[str, Inputs] = {}
    for record in read_topic(settings, REQUESTS):
        if peek_id(record.value, "request_id") in request_ids:
            try:
                request = decode(record.value, Request)
            except InvalidMessage:
                continue
            found[request.request_id] = request.inputs
    return found
