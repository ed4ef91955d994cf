"""Near misses: requests that an entry might have answered, but the unedited model did; read from the topics."""

from collections.abc import Collection

from msgspec import UNSET, Struct
from msgspec.structs import replace

from gracestream.pipeline.kafka import PREDICTIONS, REQUESTS, read_topic
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.messages import Inputs, InvalidMessage, Prediction, Request, decode, peek_id

BUFFER_FACTOR = 10
"""Predictions that are held while reading, per near miss that is asked for."""


class NearMissRequest(Struct, frozen=True):
    """One near miss.

    Attributes:
        request_id: Of the request.
        timestamp: Kafka's timestamp of the prediction, in seconds.
        entry_id: The entry that might have answered.
        reason: Why it did not. `distance`: the query lies a little outside the radius. `wording`: the prompt asks for
            something else, as `detail` says. `answer`: its value did not predict its target.
        distance: From the entry's key to the query (Euclidean, in the layer's units).
        radius: Of the entry.
        answer: The unedited answer that the replica sent: text or label.
        replica: The name of the replica that answered.
        inputs: Of the request; None if `requests` has deleted it.
        detail: The disagreement of the wordings; empty for other reasons.
        target: The entry's answer where it applies; empty if the replica did not report it.
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


def find_near_misses(settings: KafkaSettings, limit: int, entry_id: str | None = None) -> list[NearMissRequest]:
    """The newest near misses, newest first and at most `limit`, of one entry if it is named. Each request counts once.

    Reads all of `predictions`, and all of `requests` if there is a near miss.

    Raises:
        TopicError: a topic is missing.
        KafkaTimeoutError: Kafka stopped answering.
    """
    newest_by_id: dict[str, NearMissRequest] = {}
    for record in read_topic(settings, PREDICTIONS):
        near_miss = _parse_near_miss(record.value, record.timestamp)
        if near_miss is None or entry_id not in (None, near_miss.entry_id):
            continue
        earlier = newest_by_id.get(near_miss.request_id)
        if earlier is None or earlier.timestamp <= near_miss.timestamp:
            newest_by_id[near_miss.request_id] = near_miss
        if len(newest_by_id) > BUFFER_FACTOR * limit:
            newest_by_id = _newest(newest_by_id, limit)
    newest_by_id = _newest(newest_by_id, limit)
    inputs = _read_inputs(settings, newest_by_id) if newest_by_id else {}
    return [replace(near_miss, inputs=inputs.get(request_id)) for request_id, near_miss in newest_by_id.items()]


class MatchedRequest(Struct, frozen=True):
    """A request that an entry answered or might have answered; `inputs` is None if `requests` has deleted it."""

    entry_id: str
    inputs: Inputs | None


def find_matched_requests(settings: KafkaSettings, request_ids: Collection[str]) -> dict[str, MatchedRequest]:
    """Those of the requests that an entry answered or might have answered, by request id.

    The newest prediction of each request counts.

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
        match = prediction.near_miss if prediction.edit is UNSET else prediction.edit
        entries.pop(request_id, None)
        if match is not UNSET:
            entries[request_id] = match.entry_id
    inputs = _read_inputs(settings, entries) if entries else {}
    return {request_id: MatchedRequest(entry_id, inputs.get(request_id)) for request_id, entry_id in entries.items()}


def _newest(near_misses_by_id: dict[str, NearMissRequest], limit: int) -> dict[str, NearMissRequest]:
    """The newest near misses, newest first, at most `limit`."""
    newest = sorted(near_misses_by_id.values(), key=lambda near_miss: (-near_miss.timestamp, near_miss.request_id))[
        :limit
    ]
    return {near_miss.request_id: near_miss for near_miss in newest}


def _parse_near_miss(value: bytes | None, timestamp: int) -> NearMissRequest | None:
    """The near miss in a record of `predictions`; None if it has none."""
    if value is None or b'"near_miss"' not in value:  # most predictions have none: skip decoding them
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


def _read_inputs(settings: KafkaSettings, request_ids: Collection[str]) -> dict[str, Inputs]:
    """Inputs by request id; of a request that was sent more than once, those of the last."""
    inputs: dict[str, Inputs] = {}
    for record in read_topic(settings, REQUESTS):
        if peek_id(record.value, "request_id") in request_ids:
            try:
                request = decode(record.value, Request)
            except InvalidMessage:
                continue
            inputs[request.request_id] = request.inputs
    return inputs
