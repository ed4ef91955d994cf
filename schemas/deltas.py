"""Deltas: the records of the topic `deltas`. Applying all of them in order gives the codebook.

The contract is in docs/explanation/consistency.md. A delta is one MessagePack map. Its last pair is `digest`, 32 bytes,
so the last 32 bytes of a record are its digest:

    digest = SHA-256(previous digest || record[:-32])

1. The digest covers the bytes on the wire, never a re-encoding. A record of a newer schema, with fields unknown here,
   can be verified too.
2. The digest before the first delta is 32 zero bytes.
3. Two histories with the same last digest are the same, byte for byte.
"""

import hashlib
import math
from typing import Annotated, Literal, Self, get_args

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, field

from gracestream.schemas.messages import InvalidMessage, Message, TruncatedBytes, Version, check_version, to_one_line

MAX_DELTA_BYTES = 64 * 2**20
"""Limit on the bytes of a delta. The topic, the producer and every reader allow this size.

A delta may be large because it can hold many entries of the retention guard.
"""

DIGEST_BYTES = 32
GENESIS_DIGEST = bytes(DIGEST_BYTES)

PositiveInt = Annotated[int, Meta(ge=1, le=2**53 - 1)]
"""A positive integer that float64 represents exactly.

Numbers in Redis scripts and in many JSON readers are float64.
"""

Radius = Annotated[float, Meta(ge=0, le=float(np.finfo(np.float32).max))]
"""A radius or a distance, finite in float32. The lower bound also excludes NaN, because NaN >= 0 is false."""

MAX_WORDING = 600
"""Limit on the characters of a wording."""

Wording = Annotated[str, Meta(max_length=MAX_WORDING)]
"""The wording of a prompt, in one line (`pipeline.wording`); empty if there is nothing to compare."""

TokenId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A token id, in the range of int64, the type of label tensors."""

Op = Literal["lead", "add", "expand", "split", "replace", "undo", "except"]


class Tensor(Struct, frozen=True, kw_only=True):
    """An array as little-endian bytes in C order, with its shape and numpy dtype name. Only float32 occurs."""

    dtype: Literal["float32"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=8)]
    data: bytes

    @classmethod
    def from_array(cls, array: np.ndarray) -> Self:
        """Encode an array as float32.

        Raises:
            ValueError: a number is not finite in float32.
        """
        with np.errstate(over="ignore"):
            narrow = np.asarray(array, "<f4")
        if not np.isfinite(narrow).all():
            raise ValueError("a tensor holds a number that is not finite in float32")
        return cls(dtype="float32", shape=narrow.shape, data=narrow.tobytes())

    def array(self) -> np.ndarray:
        """The array, in its shape.

        Raises:
            ValueError: the number of bytes does not fit the shape, or a number is not finite.
        """
        if len(self.data) != 4 * math.prod(self.shape):
            raise ValueError(f"{len(self.data)} bytes do not fill a float32 tensor of shape {self.shape}")
        array = np.frombuffer(self.data, "<f4")
        if 0 in np.isfinite(array).tobytes():  # 2.5 times as fast as `all()`
            raise ValueError("a tensor holds a number that is not finite")
        return array if len(self.shape) == 1 else array.reshape(self.shape)


class EntryChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The changed fields of one entry. A new entry has a key, a value, a radius and a label.

    `wording` is the wording of the prompt at the key. The entry does not serve a prompt within its radius if the
    wordings disagree. A new entry without a wording serves every prompt within its radius.
    """

    entry_id: str
    key: Tensor | UnsetType = UNSET
    value: Tensor | UnsetType = UNSET
    radius: Radius | UnsetType = UNSET
    label: tuple[TokenId, ...] | UnsetType = UNSET
    wording: Wording | UnsetType = UNSET
    removed: bool = False


class DecisionContext(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The decision context: the inputs of a decision beside the feedback record.

    With it the decision can be repeated without the unflagged traffic of that time. `radius` is the initial radius
    (epsilon_init), absolute. `clearance` maps a name to the distance from its key to the nearest unflagged request;
    null means that there was none. The name is the feedback id for the correction's own query, otherwise an entry id.
    `nearest` is the entry nearest to the query, at `distance`; both are absent if the codebook was empty. `start` is
    the entry whose value was the starting point of the training, if any.
    """

    radius: Radius
    clearance: dict[str, Radius | None] = {}
    nearest: str | UnsetType = UNSET
    start: str | UnsetType = UNSET
    distance: Radius | UnsetType = UNSET


Role = Literal["propose", "undo_own", "undo_any"]
"""A role in the list of authors: send corrections, undo own feedback, or undo any feedback."""


AUTHOR_ROLES: tuple[Role, ...] = get_args(Role)

DEFAULT_ROLES: tuple[Role, ...] = ("propose", "undo_own")
"""The roles of an author whose entry in the list has no `roles`."""


class Standing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The roles of the sender of feedback, by the list of authors at the time when the editor accepted the record.

    `signed` means that the record has a verified signature of its author. Otherwise the author is only a claim.
    """

    roles: tuple[Role, ...]
    signed: bool = False


UNSIGNED_STANDING = Standing(roles=DEFAULT_ROLES)
"""The standing of unsigned feedback if there is a list of authors and signatures are not required."""


class RephraseKey(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The decision on one rephrase of a correction.

    `entry_id` is the entry that answers the rephrase from now on; absent if the unedited model answers it. `query` and
    `wording` are present if the query differs from the key of that entry. `nearest` is the entry that was nearest
    before the decision, at `distance`. A rephrase that is `left_out` is not part of the edit. Its `query` is present if
    it was left out because of nearby entries or traffic.
    """

    entry_id: str | UnsetType = UNSET
    query: Tensor | UnsetType = UNSET
    wording: Wording = ""
    nearest: str | UnsetType = UNSET
    distance: Radius | UnsetType = UNSET
    left_out: bool = False


def rephrase_name(feedback_id: str, number: int) -> str:
    """The id of a rephrase's key, and of the entry with this key. `number` counts the rephrases from 1."""
    return f"{feedback_id}#{number}"


class Cause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The feedback record that a delta carries out, and the other inputs of the decision.

    `entry_id` is the entry that answers this query from now on. It is absent if the unedited model already answers
    correctly. In an exception it is absent, too: the prompt gets no entry, but new radii keep clear of it.
    `query` and `wording` are present if the query differs from the key of that entry, so that a restarting editor can
    rebuild its edit memory.
    `supersedes` names the earlier edits that this one replaces, such as edits of the same input with another target,
    and exceptions that ended. `undoes` names the feedback that an undo takes back.
    `seen` is the decision context. `traffic` is the offset in each partition of `requests` up to which the editor had
    read unflagged traffic. `together` lists the offsets of the feedback whose values were trained in one batch,
    including this record, in the order of the batch. It is absent if the value was trained alone.
    `standing` holds the roles of the sender; absent if there was no list of authors, so that everything was allowed.
    `rephrases` has one item per rephrase, in the order of the correction. The ids of their entries and edits are those
    of `rephrase_name`.
    """

    feedback_id: str
    offset: int
    author: str | UnsetType = UNSET
    entry_id: str | UnsetType = UNSET
    query: Tensor | UnsetType = UNSET
    wording: Wording = ""
    supersedes: tuple[str, ...] = ()
    context: DecisionContext | UnsetType = field(name="seen", default=UNSET)
    traffic: dict[str, int] | UnsetType = UNSET
    undoes: tuple[str, ...] = ()
    together: tuple[int, ...] = ()
    standing: Standing | UnsetType = UNSET
    rephrases: tuple[RephraseKey, ...] = ()

    def rephrases_by_name(self) -> dict[str, RephraseKey]:
        """The decision on each rephrase, by the id of its key."""
        return {rephrase_name(self.feedback_id, number): key for number, key in enumerate(self.rephrases, 1)}


class EditChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An undo changed how another edit is served: by the entry `entry_id`, or by the unedited model if absent.

    `query` and `wording` are present if the edit was not in force before the undo. `removed` means that it is no longer
    in force.
    """

    feedback_id: str
    entry_id: str | UnsetType = UNSET
    query: Tensor | UnsetType = UNSET
    wording: Wording = ""
    removed: bool = False


class ExceptionChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exception: a prompt that some entries do not serve although it is within their radius.

    `feedback_id` is the feedback that requested it; `except_from` is the id that this feedback named. The entries
    `entry_ids` do not serve a prompt if its query is closer than `radius` to `query` and its wording equals `wording`,
    ignoring case. Without a wording, only the distance counts. A new exception has entries, a query and a radius.
    `removed` means that the exception ended.
    """

    feedback_id: str
    except_from: str = ""
    entry_ids: tuple[str, ...] = ()
    query: Tensor | UnsetType = UNSET
    radius: Radius = 0.0
    wording: Wording = ""
    removed: bool = False


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of the history of a codebook. `seq` counts the deltas from 1, across terms.

    A `lead` delta has `environment`: the versions, the device and the policy that produce the values of the term.
    An `undo` delta has `edits` and `decided`: the edits that are served differently now, and the decision contexts of
    repeated decisions, by feedback id. `exceptions` are the exceptions that the delta adds, changes or removes.
    """

    v: Version
    codebook: str
    model: str
    layer: str
    term: PositiveInt
    seq: PositiveInt
    op: Op
    entries: tuple[EntryChange, ...] = ()
    edits: tuple[EditChange, ...] = ()
    decided: dict[str, DecisionContext] = {}
    exceptions: tuple[ExceptionChange, ...] = ()
    cause: Cause | UnsetType = UNSET
    environment: dict[str, str] | UnsetType = UNSET
    digest: bytes


def chain_digest(previous_digest: bytes, record: bytes) -> bytes:
    """The digest that `record` must have if the record before it has `previous_digest`."""
    return hashlib.sha256(previous_digest + record[:-DIGEST_BYTES]).digest()


def seal_delta(delta: Delta, previous_digest: bytes) -> tuple[bytes, Delta]:
    """The bytes of the record, and the delta with its digest."""
    # `digest` is the last field, so its bytes are the last of the record, and replacing them is the same as encoding
    # again with the digest.
    blank = msgspec.msgpack.encode(msgspec.structs.replace(delta, digest=GENESIS_DIGEST))
    digest = chain_digest(previous_digest, blank)
    return blank[:-DIGEST_BYTES] + digest, msgspec.structs.replace(delta, digest=digest)


class DecodedDelta(bytes):
    """A record of `deltas` with its decoded delta, so that later readers need not decode it again."""

    delta: Delta

    @classmethod
    def from_record(cls, record: bytes | None) -> "DecodedDelta":
        """Decode one record.

        Raises:
            InvalidMessage: under the conditions of `decode_delta`.
        """
        delta = decode_delta(record)
        assert record is not None
        decoded = cls(record)
        decoded.delta = delta
        return decoded


def decode_delta(record: bytes | None) -> Delta:
    """Decode one record. It does not verify the chain of digests; the codebook does (`chain_digest`).

    Raises:
        InvalidMessage: the record has no value, was truncated or is not MessagePack. Or it lacks a field, has a field
            of a wrong type or a newer version, or does not end with its digest.
    """
    if record is None:
        raise InvalidMessage("the record has no value")
    if isinstance(record, DecodedDelta):
        return record.delta
    if isinstance(record, TruncatedBytes):
        raise InvalidMessage(record.reason or f"the record has {record.size} bytes; the limit is {MAX_DELTA_BYTES}")
    try:
        try:
            delta = msgspec.msgpack.decode(record, type=Delta)
        except msgspec.ValidationError:
            check_version(msgspec.msgpack.decode(record, type=Message).v)  # a newer schema may add ops
            raise
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"not a valid delta: {to_one_line(error)}") from error
    check_version(delta.v)
    if len(delta.digest) != DIGEST_BYTES or record[-DIGEST_BYTES:] != delta.digest:
        raise InvalidMessage("the record does not end with its digest")
    return delta
