"""The JSON messages that people and programs write and read (design, section 3).

Unknown fields are ignored, so that a newer writer never breaks an older reader; `v` is the schema version, and a
record of a version that this code does not know is refused rather than half understood. Record timestamps are
Kafka's and stand in no message.
"""

import math
from typing import Annotated, Literal, Self, TypeGuard, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

SCHEMA_VERSION = 1

Version = Annotated[int, Meta(ge=1, le=2**63 - 1)]
MAX_ID_LENGTH = 256
Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]

CHAT_ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 256
"""Messages of one chat, at most."""

MAX_REPHRASES = 16
"""Other words for one correction, at most."""


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat; `role` is system, user or assistant. An unknown name is an error."""

    role: str
    content: str


Inputs = str | tuple[str | ChatMessage, ...]
"""A text, a pair of texts for a classifier of pairs, or the messages of a chat; no text is blank.

`check_inputs` checks what the type leaves open. Its errors name the field and the remedy, and msgspec crashes the
process where a union holds both a constrained string and a fixed tuple.
"""

CHAT_MESSAGE_HINT = 'a message of a chat is {"role": "user", "content": "a text"}'

Status = Literal["added", "expanded", "split", "replaced", "unchanged", "undone", "excepted", "rejected"]


class InvalidMessage(ValueError):
    """A record that is no message of its type; the text says what is wrong, in one line."""


class TruncatedBytes(bytes):
    """The start of a key or a value whose rest was not kept, since it is larger than any message may be.

    Attributes:
        size: Bytes of the whole; 0 where that is unknown.
        sha256: Of the whole, in hexadecimal digits; empty where that is unknown.
        reason: Why it was not read to its end; empty where its size alone is the reason.
    """

    def __new__(cls, start: bytes, size: int, sha256: str = "", reason: str = "") -> Self:
        """Of these bytes."""
        made = super().__new__(cls, start)
        made.size, made.sha256, made.reason = size, sha256, reason
        return made

    size: int
    sha256: str
    reason: str


def is_chat(inputs: Inputs) -> TypeGuard[tuple[ChatMessage, ...]]:
    """Whether inputs are messages of a chat."""
    return not isinstance(inputs, str) and isinstance(inputs[0], ChatMessage)


def check_inputs(inputs: Inputs | UnsetType, field: str = "inputs") -> None:
    """Raises ValueError where `field` is no text, no pair and no chat, or where one of its texts is blank."""
    if inputs is UNSET:
        return
    if isinstance(inputs, str):
        texts = [inputs]
    else:
        if not inputs:
            raise ValueError(f"`{field}` is an empty list; give a text, a pair of texts, or the messages of a chat")
        texts = [one for one in inputs if isinstance(one, str)]
        if not texts:
            _check_chat([one for one in inputs if isinstance(one, ChatMessage)], field)
            return
        if len(texts) < len(inputs):
            raise ValueError(f"`{field}` mixes texts with messages; give a pair of texts, or the messages of a chat")
        if len(texts) != 2:
            counted = "1 text" if len(texts) == 1 else f"{len(texts)} texts"
            raise ValueError(f"`{field}` is a list of {counted}; give a text, a pair, or the messages of a chat")
    if not all(text.strip() for text in texts):
        raise ValueError(f"`{field}` is empty")


def _check_chat(messages: list[ChatMessage], field: str) -> None:
    if len(messages) > MAX_MESSAGES:
        raise ValueError(
            f"`{field}` has {len(messages)} messages; the limit is {MAX_MESSAGES}: leave out the earliest turns"
        )
    for place, message in enumerate(messages):
        if message.role not in CHAT_ROLES:
            raise ValueError(
                f"`{field}[{place}].role` is {message.role!r}; use {', '.join(CHAT_ROLES[:-1])} or {CHAT_ROLES[-1]}"
            )
        if message.role == "system" and place > 0:
            raise ValueError(f"`{field}[{place}].role` is 'system'; only the first message can be the system's")
        if not message.content.strip():
            raise ValueError(f"`{field}[{place}].content` is empty; give it a text, or leave the message out")
    if messages[-1].role != "user":
        raise ValueError(
            f"`{field}[{len(messages) - 1}].role` is {messages[-1].role!r}; the last message must be the user's"
        )


def check_rephrases(rephrases: tuple[Inputs, ...], inputs: Inputs | UnsetType) -> None:
    """Raises ValueError where there are too many, one is no `inputs`, or one says the same as another."""
    if len(rephrases) > MAX_REPHRASES:
        raise ValueError(f"`rephrases` has {len(rephrases)} items; the limit is {MAX_REPHRASES}")
    for place, rephrase in enumerate(rephrases):
        check_inputs(rephrase, f"rephrases[{place}]")
        if rephrase == inputs:
            raise ValueError(f"`rephrases[{place}]` is the same as `inputs`; leave it out")
        if rephrase in rephrases[:place]:
            first = rephrases.index(rephrase)
            raise ValueError(f"`rephrases[{place}]` is the same as `rephrases[{first}]`; leave it out")


def to_display_text(inputs: Inputs) -> str:
    """Inputs as a person reads them: of a chat each message after its role."""
    if isinstance(inputs, str):
        return inputs
    return " | ".join(one if isinstance(one, str) else f"{one.role}: {one.content}" for one in inputs)


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every message has: the version of its schema."""

    v: Version


class Parameters(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to generate. Decoding is greedy, so that an answer can be reproduced; an unknown name is an error.

    A deployment limits `max_new_tokens` further, by its setting `new_tokens_limit`.
    """

    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | UnsetType = UNSET
    min_new_tokens: Annotated[int, Meta(ge=0, le=4096)] | UnsetType = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | UnsetType = UNSET
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=64)] | UnsetType = UNSET


class Request(Message, frozen=True, kw_only=True):
    """A question to the model, on `requests`, under any key.

    `min_seq` asks for an answer of a codebook that has seen at least that delta.
    """

    request_id: Id
    inputs: Inputs
    parameters: Parameters = Parameters()
    min_seq: Annotated[int, Meta(ge=0)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_inputs(self.inputs)


class Outputs(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`text` of a generator; `label` and the `probabilities` of all labels of a classifier."""

    text: str | UnsetType = UNSET
    label: str | UnsetType = UNSET
    probabilities: dict[str, float] | UnsetType = UNSET


class AppliedEdit(Struct, frozen=True, kw_only=True):
    """Which entry answered: its key lies `distance` from the query, within its `radius` (Euclidean, layer's units).

    Where the distance is no less than the radius, the prompt has the same words as the corrected one.
    """

    entry_id: str
    distance: float
    radius: float


NearMissReason = Literal["answer", "distance", "wording"]


class NearMiss(Struct, frozen=True, kw_only=True):
    """An entry that might have answered and did not: the unedited model answered instead.

    `distance` and `radius` are as in an applied edit. The reason `answer`: within the radius, but the entry's value did
    not give the entry's target on this prompt. The reason `wording`: within the radius, but the words ask for something
    else, as `detail` says. The reason `distance`: a little outside the radius, but the prompt names the same. `target`
    is what the entry answers where it applies.
    """

    entry_id: str
    distance: float
    radius: float
    reason: NearMissReason
    detail: str | UnsetType = UNSET
    target: str | UnsetType = UNSET


class Prediction(Message, frozen=True, kw_only=True):
    """The answer to one request, on `predictions`, keyed by `request_id`; delivered at least once.

    `codebook_seq` and `term` name the codebook that served it. Either `outputs` or `error` is there.
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
    """A correction, an exception from one, or an undo of earlier feedback, on `feedback`.

    A correction has `inputs` and `target`; `rephrases` are other words for its inputs, and each becomes a key of the
    same edit. An exception has `inputs` and `except_from`, the id of a correction or of an entry: the edit does not
    answer these inputs any more. `undo` names the feedback to take back by its id, `undo_author` takes back all that an
    author sent until then. An exception and an undo can be taken back too.
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
    signature: str | UnsetType = UNSET  # the last, as `pipeline.auth.signing` has it

    def __post_init__(self) -> None:
        check_inputs(self.inputs)
        asks = (self.target, self.except_from, self.undo, self.undo_author)
        if sum(one is not UNSET for one in asks) > 1 or (self.is_undo and self.inputs is not UNSET):
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
        """Whether it is a correction."""
        return self.target is not UNSET

    @property
    def is_exception(self) -> bool:
        """Whether it is an exception from an edit."""
        return self.except_from is not UNSET

    @property
    def is_undo(self) -> bool:
        """Whether it takes something back."""
        return self.undo is not UNSET or self.undo_author is not UNSET


class LeftOut(Struct, frozen=True, kw_only=True):
    """A rephrase that is no key of its edit, and why; `rephrase` is its number, from 1."""

    rephrase: Annotated[int, Meta(ge=1)]
    reason: str


class Outcome(Message, frozen=True, kw_only=True):
    """What became of one feedback record, on `edits`; exactly one per record.

    `seq` is the delta that made it, `loss` the training loss at the last of `steps`, `seconds` the editor's time.
    `left_out` names the rephrases that the edit does not serve.
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
    """Where a codebook as of `seq` lies: a safetensors file at `uri` of `bytes` bytes and hex digest `sha256`.

    `offset` is that of the delta `seq` in `deltas`: there the log must hold `digest`, and after it the tail begins.
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
    """Raises InvalidMessage for a version newer than any known here."""
    if v > SCHEMA_VERSION:
        raise InvalidMessage(f"schema version {v} is newer than {SCHEMA_VERSION}, the newest known here")


def escape_unprintable(text: str) -> str:
    """With escapes for what a terminal or a log should not be sent, such as control characters and half surrogates."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def to_one_line(error: Exception | str) -> str:
    """What an error says, in one short printable line: msgspec quotes names and values of the record, however long."""
    text = escape_unprintable(" ".join(str(error).split()))
    return text if len(text) <= 300 else f"{text[:200]}…{text[-80:]}"  # the end says where in the record


def encode(message: Message) -> bytes:
    """The message as UTF-8 JSON, which has no NaN and no infinity: a number that is not finite is left out.

    A `loss` that diverged is the case in point; msgspec would write `null`, which no reader takes for a number.
    """
    fields = ((name, getattr(message, name)) for name in message.__struct_fields__)
    odd = {name: UNSET for name, value in fields if isinstance(value, float) and not math.isfinite(value)}
    return msgspec.json.encode(msgspec.structs.replace(message, **odd) if odd else message)


def decode(raw: bytes | None, kind: type[M], max_bytes: int | None = None) -> M:
    """Read one record's value.

    Raises:
        InvalidMessage: over `max_bytes`, no JSON, not UTF-8, a field missing or of a wrong type, an unknown version.
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
        check_version(msgspec.json.decode(text, type=Message).v)  # first: in a newer schema anything may be different
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        reason = to_one_line(error)
        if "`$.inputs[" in reason or "`$.rephrases[" in reason:  # msgspec names the field alone
            reason = f"{reason}; {CHAT_MESSAGE_HINT}"
        raise InvalidMessage(f"not a valid {kind.__name__.lower()}: {reason}") from error


class _RecordIds(Struct):
    """Of a record."""

    request_id: object = None
    feedback_id: object = None


def peek_id(raw: bytes | None, field: Literal["request_id", "feedback_id"]) -> str | None:
    """The id of a record that is otherwise no valid message, if it can be read; so that its sender gets an answer.

    No more of it is made than its text: a record that is too large for `decode` may be larger by far as objects.
    """
    try:
        text = (raw or b"").decode()  # all of it, since msgspec does not look into what it passes over
        found = getattr(msgspec.json.decode(text, type=_RecordIds), field)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, str) and 0 < len(found) <= MAX_ID_LENGTH else None
