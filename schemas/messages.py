"""The JSON messages: requests, predictions, feedback, outcomes and snapshot manifests.

docs/explanation/messages-and-topics.md describes them for users.

1. Unknown fields are ignored, so a newer writer does not break an older reader.
2. `v` is the schema version. A record of a newer version is rejected, because it could be misunderstood.
3. Messages hold no timestamps. The time of a record is its Kafka timestamp.
"""

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Literal, Self, TypeGuard, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

SCHEMA_VERSION = 1

Version = Annotated[int, Meta(ge=1, le=2**63 - 1)]
MAX_ID_LENGTH = 256
Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]

CHAT_ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 256
"""Limit on the messages of one chat."""

MAX_REPHRASES = 16
"""Limit on the rephrases of one correction."""


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat. `role` is system, user or assistant. An unknown field is an error."""

    role: str
    content: str


Inputs = str | tuple[str | ChatMessage, ...]
"""A text, a pair of texts for a classifier of pairs, or the messages of a chat. No text is blank.

`check_inputs` enforces these rules, for two reasons. Its errors name the field and the remedy. And msgspec crashes the
process if a union holds both a constrained string and a fixed tuple.
"""

CHAT_MESSAGE_HINT = 'a message of a chat is {"role": "user", "content": "a text"}'

Status = Literal["added", "expanded", "split", "replaced", "unchanged", "undone", "excepted", "rejected"]


class InvalidMessage(ValueError):
    """A record is not a valid message of its type. The text names the fault in one line."""


class TruncatedBytes(bytes):
    """The start of a key or a value that was not read to its end, mostly because it is larger than any valid message.

    Attributes:
        size: Bytes of the whole key or value; 0 if unknown.
        sha256: SHA-256 of the whole key or value, in hex; empty if unknown.
        reason: Why reading stopped; empty if the size is the only reason.
    """

    def __new__(cls, start: bytes, size: int, sha256: str = "", reason: str = "") -> Self:
        """Build from the bytes that were kept; the other arguments are the attributes."""
        truncated = super().__new__(cls, start)
        truncated.size, truncated.sha256, truncated.reason = size, sha256, reason
        return truncated

    size: int
    sha256: str
    reason: str


def check_field_names(fields: object, *kinds: type[Struct]) -> None:
    """Check an object that a person wrote: it has only fields of these types. `decode` ignores other fields.

    A value that is not an object passes, because its conversion to a type reports it.

    Raises:
        InvalidMessage: a field is unknown. The text names it and the nearest known field, or all known fields.
    """
    if not isinstance(fields, Mapping):
        return
    known = list(dict.fromkeys(name for kind in kinds for name in kind.__struct_fields__))
    for name in fields:
        if name not in known:
            # A part of a name is a candidate, too, so `id` leads to `feedback_id`. The first field with a part counts.
            candidates = {part: field for field in reversed(known) for part in field.split("_")}
            candidates |= {field: field for field in known}
            nearest = get_close_matches(name.casefold(), candidates, n=1)
            remedy = f"did you mean `{candidates[nearest[0]]}`?" if nearest else f"the fields are {', '.join(known)}"
            raise InvalidMessage(f"unknown field `{to_one_line(name)}`; {remedy}")


def is_chat(inputs: Inputs) -> TypeGuard[tuple[ChatMessage, ...]]:
    """Whether the inputs are the messages of a chat."""
    return not isinstance(inputs, str) and isinstance(inputs[0], ChatMessage)


def check_inputs(inputs: Inputs | UnsetType, field: str = "inputs") -> None:
    """Check a field that holds inputs; UNSET is valid.

    Raises:
        ValueError: it is not a text, a pair of texts or a chat, or one of its texts is blank. The text names `field`.
    """
    if inputs is UNSET:
        return
    if isinstance(inputs, str):
        texts = [inputs]
    else:
        if not inputs:
            raise ValueError(f"`{field}` is an empty list; give a text, a pair of texts, or the messages of a chat")
        texts = [item for item in inputs if isinstance(item, str)]
        if not texts:
            _check_chat([item for item in inputs if isinstance(item, ChatMessage)], field)
            return
        if len(texts) < len(inputs):
            raise ValueError(f"`{field}` mixes texts with messages; give a pair of texts, or the messages of a chat")
        if len(texts) != 2:
            count = "1 text" if len(texts) == 1 else f"{len(texts)} texts"
            raise ValueError(f"`{field}` is a list of {count}; give a text, a pair, or the messages of a chat")
    if not all(text.strip() for text in texts):
        raise ValueError(f"`{field}` is empty")


def _check_chat(messages: list[ChatMessage], field: str) -> None:
    if len(messages) > MAX_MESSAGES:
        raise ValueError(
            f"`{field}` has {len(messages)} messages; the limit is {MAX_MESSAGES}: leave out the earliest turns"
        )
    for index, message in enumerate(messages):
        if message.role not in CHAT_ROLES:
            raise ValueError(
                f"`{field}[{index}].role` is {message.role!r}; use {', '.join(CHAT_ROLES[:-1])} or {CHAT_ROLES[-1]}"
            )
        if message.role == "system" and index > 0:
            raise ValueError(f"`{field}[{index}].role` is 'system'; only the first message can be the system's")
        if not message.content.strip():
            raise ValueError(f"`{field}[{index}].content` is empty; give it a text, or leave the message out")
    if messages[-1].role != "user":
        raise ValueError(
            f"`{field}[{len(messages) - 1}].role` is {messages[-1].role!r}; the last message must be the user's"
        )


def check_rephrases(rephrases: tuple[Inputs, ...], inputs: Inputs | UnsetType) -> None:
    """Check the rephrases of a correction.

    Raises:
        ValueError: there are too many, one is not valid as `inputs`, or one equals `inputs` or another rephrase.
    """
    if len(rephrases) > MAX_REPHRASES:
        raise ValueError(f"`rephrases` has {len(rephrases)} items; the limit is {MAX_REPHRASES}")
    for index, rephrase in enumerate(rephrases):
        check_inputs(rephrase, f"rephrases[{index}]")
        if rephrase == inputs:
            raise ValueError(f"`rephrases[{index}]` is the same as `inputs`; leave it out")
        if rephrase in rephrases[:index]:
            first = rephrases.index(rephrase)
            raise ValueError(f"`rephrases[{index}]` is the same as `rephrases[{first}]`; leave it out")


def to_display_text(inputs: Inputs) -> str:
    """The inputs in one line for display. Each message of a chat follows its role."""
    if isinstance(inputs, str):
        return inputs
    return " | ".join(item if isinstance(item, str) else f"{item.role}: {item.content}" for item in inputs)


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base class of the messages: the version of the schema."""

    v: Version


class Parameters(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Options of text generation. Decoding is greedy, so an answer can be reproduced. An unknown field is an error.

    The setting `max_new_tokens` of a deployment may lower the limit of `max_new_tokens`.
    """

    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | UnsetType = UNSET
    min_new_tokens: Annotated[int, Meta(ge=0, le=4096)] | UnsetType = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | UnsetType = UNSET
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=64)] | UnsetType = UNSET


class Request(Message, frozen=True, kw_only=True):
    """A request to the model, on the topic `requests`, with any record key.

    With `min_seq`, the replica answers with a codebook that has applied at least this delta.
    """

    request_id: Id
    inputs: Inputs
    parameters: Parameters = Parameters()
    min_seq: Annotated[int, Meta(ge=0)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_inputs(self.inputs)


class Outputs(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer: `text` from a generator; `label` and the `probabilities` of all labels from a classifier."""

    text: str | UnsetType = UNSET
    label: str | UnsetType = UNSET
    probabilities: dict[str, float] | UnsetType = UNSET


class AppliedEdit(Struct, frozen=True, kw_only=True):
    """The entry that answered. `distance` is the Euclidean distance of its key from the query.

    `radius` is the radius of the entry. If the distance is not less than the radius, the prompt has the same words as
    the corrected prompt.
    """

    entry_id: str
    distance: float
    radius: float


NearMissReason = Literal["answer", "distance", "wording"]


class NearMiss(Struct, frozen=True, kw_only=True):
    """An entry that might have applied; the unedited model answered instead.

    `distance` and `radius` are as in an applied edit. `target` is the answer of the entry.
    With the reason `answer`, the entry matched, but its value did not produce the target on this prompt.
    With the reason `wording`, the query is within the radius, but the wordings disagree, as `detail` describes.
    With the reason `distance`, the query is a little outside the radius, but the prompt has the same names.
    """

    entry_id: str
    distance: float
    radius: float
    reason: NearMissReason
    detail: str | UnsetType = UNSET
    target: str | UnsetType = UNSET


class Prediction(Message, frozen=True, kw_only=True):
    """The answer to one request, on the topic `predictions`, keyed by `request_id`; delivered at least once.

    `codebook_seq` and `term` name the newest delta of the codebook that served the request. A prediction has either
    `outputs` or `error`.
    """

    request_id: str
    outputs: Outputs | UnsetType = UNSET
    score: float | UnsetType = UNSET
    edit: AppliedEdit | UnsetType = UNSET
    near_miss: NearMiss | UnsetType = UNSET
    codebook_seq: int
    term: int
    model: str
    replica: str
    latency_ms: float
    error: str | UnsetType = UNSET


class Feedback(Message, frozen=True, kw_only=True):
    """A correction, an exception or an undo, on the topic `feedback`.

    A correction has `inputs` and `target`. Its `rephrases` ask for the same in other words; each becomes a key of the
    same edit. An exception has `inputs` and `except_from`, the id of a correction or of an entry: this edit no longer
    answers these inputs. `undo` is the id of the feedback to undo. `undo_author` undoes all earlier feedback of an
    author. Exceptions and undos can be undone too.
    """

    feedback_id: Id
    inputs: Inputs | UnsetType = UNSET
    target: str | UnsetType = UNSET
    rephrases: tuple[Inputs, ...] = ()
    except_from: Id | UnsetType = UNSET
    undo: Id | UnsetType = UNSET
    undo_author: Id | UnsetType = UNSET
    request_id: str | UnsetType = UNSET
    author: Id | UnsetType = UNSET
    note: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET  # keep last: `pipeline.auth.signing` cuts it off the end of the record

    def __post_init__(self) -> None:
        check_inputs(self.inputs)
        kind_fields = (self.target, self.except_from, self.undo, self.undo_author)
        if sum(field is not UNSET for field in kind_fields) > 1 or (self.is_undo and self.inputs is not UNSET):
            raise ValueError(
                "feedback is one of a correction (inputs, target), an exception (inputs, except_from) and an undo, not"
                " several"
            )
        if not self.is_undo and (self.inputs is UNSET or not (self.is_correction or self.is_exception)):
            raise ValueError(
                "feedback needs `inputs` and `target`, or `inputs` and `except_from`, or `undo`, or `undo_author`"
            )
        if self.target is not UNSET and not self.target.strip():
            raise ValueError("`target` is empty")
        if self.rephrases and not self.is_correction:
            raise ValueError(
                f"`rephrases` belong to a correction, and this is an {'undo' if self.is_undo else 'exception'}"
            )
        check_rephrases(self.rephrases, self.inputs)

    @property
    def is_correction(self) -> bool:
        """Whether the feedback is a correction."""
        return self.target is not UNSET

    @property
    def is_exception(self) -> bool:
        """Whether the feedback is an exception from an edit."""
        return self.except_from is not UNSET

    @property
    def is_undo(self) -> bool:
        """Whether the feedback undoes earlier feedback."""
        return self.undo is not UNSET or self.undo_author is not UNSET


class LeftOut(Struct, frozen=True, kw_only=True):
    """A rephrase that did not become a key of its edit, with the reason. `rephrase` is its number, counted from 1."""

    rephrase: Annotated[int, Meta(ge=1)]
    reason: str


class Outcome(Message, frozen=True, kw_only=True):
    """The result of one feedback record, on the topic `edits`; exactly one per record.

    `seq` is the delta that carried out the decision, `loss` the training loss after the last of `steps`, and `seconds`
    the time of the editor. `left_out` lists the rephrases that are not part of the edit.
    """

    feedback_id: str
    status: Status
    entry_id: str | UnsetType = UNSET
    seq: int | UnsetType = UNSET
    steps: int | UnsetType = UNSET
    loss: float | UnsetType = UNSET
    seconds: float | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    left_out: tuple[LeftOut, ...] = ()


class SnapshotManifest(Message, frozen=True, kw_only=True):
    """Location of a snapshot: the codebook after delta `seq`, as a safetensors file at `uri`.

    The file has `bytes` bytes and the hex digest `sha256`. `offset` is the offset of delta `seq` on the topic `deltas`.
    The record there must have `digest`; a replica reads the log from the record after it.
    """

    codebook: str
    seq: int
    term: int
    digest: str
    uri: str
    sha256: str
    entries: int
    bytes: int
    offset: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    layer: str | UnsetType = UNSET


M = TypeVar("M", bound=Message)

JSON_MESSAGES: tuple[type[Message], ...] = (Request, Prediction, Feedback, Outcome, SnapshotManifest)


def check_version(v: int) -> None:
    """Check the schema version of a record.

    Raises:
        InvalidMessage: the version is newer than `SCHEMA_VERSION`.
    """
    if v > SCHEMA_VERSION:
        raise InvalidMessage(f"schema version {v} is newer than {SCHEMA_VERSION}, the newest known here")


def escape_unprintable(text: str) -> str:
    """The text with unprintable characters escaped, such as control characters and lone surrogates."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def to_one_line(error: BaseException | str) -> str:
    """The text of an error as one printable line of at most 300 characters."""
    text = escape_unprintable(" ".join(str(error).split()))
    # msgspec quotes names and values of the record at any length. The end of its text names the place in the record.
    return text if len(text) <= 300 else f"{text[:200]}…{text[-80:]}"


def encode(message: Message) -> bytes:
    """The message as UTF-8 JSON, without the fields whose number is not finite, such as a diverged `loss`.

    JSON has no NaN and no infinity. msgspec would write `null`, and readers would reject it as a number.
    """
    fields = ((name, getattr(message, name)) for name in message.__struct_fields__)
    non_finite = {name: UNSET for name, value in fields if isinstance(value, float) and not math.isfinite(value)}
    return msgspec.json.encode(msgspec.structs.replace(message, **non_finite) if non_finite else message)


def decode(raw: bytes | None, kind: type[M], max_bytes: int | None = None) -> M:
    """Decode the value of one record.

    Raises:
        InvalidMessage: the record has no value, has more than `max_bytes` bytes, or is not JSON in UTF-8. Or it has a
            newer version, lacks a field, or has a field of a wrong type.
    """
    if raw is None:
        raise InvalidMessage("the record has no value")
    size = raw.size if isinstance(raw, TruncatedBytes) else len(raw)
    if isinstance(raw, TruncatedBytes) and (raw.reason or max_bytes is None):
        raise InvalidMessage(raw.reason or f"the record has {size} bytes, of which {len(raw)} were read")
    if max_bytes is not None and size > max_bytes:
        raise InvalidMessage(f"the record has {size} bytes; the limit is {max_bytes} (GRACESTREAM_MAX_RECORD_BYTES)")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"not UTF-8: {error}") from error
    try:
        # The version comes first: a newer schema may differ in any field, and its name is the more helpful error.
        check_version(msgspec.json.decode(text, type=Message).v)
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        reason = to_one_line(error)
        if "`$.inputs[" in reason or "`$.rephrases[" in reason:  # msgspec names the field, not the remedy
            reason = f"{reason}; {CHAT_MESSAGE_HINT}"
        raise InvalidMessage(f"not a valid {kind.__name__.lower()}: {reason}") from error


class _RecordIds(Struct):
    """The ids of a record, of any type."""

    request_id: object = None
    feedback_id: object = None


def peek_id(raw: bytes | None, field: Literal["request_id", "feedback_id"]) -> str | None:
    """The id in a record that need not be a valid message; None if it cannot be read.

    An invalid request can so be answered. The function builds no objects from the other fields: they could need far
    more memory than the record, which may be too large for `decode`.
    """
    try:
        text = (raw or b"").decode()  # checks UTF-8 in the whole record; msgspec does not check fields that it skips
        record_id = getattr(msgspec.json.decode(text, type=_RecordIds), field)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return record_id if isinstance(record_id, str) and 0 < len(record_id) <= MAX_ID_LENGTH else None
