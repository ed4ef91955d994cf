"""Deltas: the records of the `deltas` topic, whose fold is the codebook (design, sections 3 and 5).

A delta is one MessagePack map. Its last pair is `digest`, 32 bytes, so the record's last 32 bytes are the digest and
everything before them is what the design calls the delta's canonical bytes:

    digest = SHA-256(previous digest || record[:-32])

The digest is taken over the bytes that travelled, never over a re-encoding, so a record of a newer schema (whose
unknown fields are ignored here) verifies all the same. The digest before the first delta is 32 zero bytes.
"""

import hashlib
import math
from typing import Annotated, Literal, Self, get_args

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from gracestream.schemas.messages import InvalidMessage, Message, TruncatedBytes, Version, check_version, to_one_line

MAX_DELTA_BYTES = 64 * 2**20
"""A delta with its guard entries may be large; the topic, the producer and every reader allow this much."""

DIGEST_BYTES = 32
GENESIS_DIGEST = bytes(DIGEST_BYTES)

PositiveInt = Annotated[int, Meta(ge=1, le=2**53 - 1)]
"""What Redis' scripts and readers of JSON, whose numbers are float64, still count exactly."""

Radius = Annotated[float, Meta(ge=0, le=float(np.finfo(np.float32).max))]
"""A radius, or a distance, is finite in float32; not a number is refused too, since it is not at least 0."""

MAX_WORDING = 600
"""Characters of a wording at most."""

Wording = Annotated[str, Meta(max_length=MAX_WORDING)]
"""What a prompt asks for, in one line (`pipeline.wording`); empty where nothing is to be compared."""

TokenId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An int64, as tensors of labels hold it."""

Op = Literal["lead", "add", "expand", "split", "replace", "undo", "except", "retune"]


class Tensor(Struct, frozen=True, kw_only=True):
    """Raw little-endian bytes in C order, with dtype (numpy's name) and shape. Only float32 is in use."""

    dtype: Literal["float32"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=8)]
    data: bytes

    @classmethod
    def from_array(cls, array: np.ndarray) -> Self:
        """Raises ValueError unless every number is finite in float32."""
        with np.errstate(over="ignore"):
            narrow = np.asarray(array, "<f4")
        if not np.isfinite(narrow).all():
            raise ValueError("a tensor holds a number that is not finite in float32")
        return cls(dtype="float32", shape=narrow.shape, data=narrow.tobytes())

    def array(self) -> np.ndarray:
        """Raises ValueError when bytes and shape disagree or a number is not finite."""
        if len(self.data) != 4 * math.prod(self.shape):
            raise ValueError(f"{len(self.data)} bytes do not fill a float32 tensor of shape {self.shape}")
        array = np.frombuffer(self.data, "<f4")
        if 0 in np.isfinite(array).tobytes():  # in two fifths of the time of all()
            raise ValueError("a tensor holds a number that is not finite")
        return array if len(self.shape) == 1 else array.reshape(self.shape)


class EntryChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry that a delta changed, with only what changed; a new entry has all of key, value, radius, label.

    `wording` is that of the prompt at the entry's key. A prompt within the radius whose wording disagrees with it is
    not served by the entry. A new entry without one serves every prompt within its radius.
    """

    entry_id: str
    key: Tensor | UnsetType = UNSET
    value: Tensor | UnsetType = UNSET
    radius: Radius | UnsetType = UNSET
    label: tuple[TokenId, ...] | UnsetType = UNSET
    wording: Wording | UnsetType = UNSET
    removed: bool = False


class Seen(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a decision saw beside its own input, so that it can be made again without the requests of that time.

    `radius` is the initial radius (epsilon_init, absolute), `clearance` the distance to the nearest unflagged request
    from the query (under the feedback's id) and from each key that was asked about (under its entry's id), `nearest`
    the entry that was nearest to the query, at `distance`; it is not there when the codebook was empty. A clearance of
    none means that there was no such request. `start` is the entry whose value the training of a new one started from,
    where it started from one.
    """

    radius: Radius
    clearance: dict[str, Radius | None] = {}
    nearest: str | UnsetType = UNSET
    start: str | UnsetType = UNSET
    distance: Radius | UnsetType = UNSET


Role = Literal["propose", "undo_own", "undo_any"]
"""What the list of authors lets someone do: make corrections, take back feedback of one's own, or anyone's."""


AUTHOR_ROLES: tuple[Role, ...] = get_args(Role)

DEFAULT_ROLES: tuple[Role, ...] = ("propose", "undo_own")
"""Of an author whose entry in the list names none."""


class Standing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the sender of feedback was allowed, by the list of authors at the time when the editor took the record.

    `signed` says that the record bears the verified signature of its author. Without it the author is only a claim.
    """

    roles: tuple[Role, ...]
    signed: bool = False


UNSIGNED_STANDING = Standing(roles=DEFAULT_ROLES)
"""Of feedback without a signature, where there is a list of authors and signatures are not required."""


class RephraseKey(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a decision made of one rephrase of its correction.

    `entry_id` serves the rephrase from now on; without it the bare model does. `query`, with the rephrase's `wording`,
    stands where that entry's key is another one. `nearest` was the nearest entry before, at `distance`. A rephrase that
    is `left_out` is no part of the edit; its `query` stands where that came of what lay around it.
    """

    entry_id: str | UnsetType = UNSET
    query: Tensor | UnsetType = UNSET
    wording: Wording = ""
    nearest: str | UnsetType = UNSET
    distance: Radius | UnsetType = UNSET
    left_out: bool = False


def rephrase_name(feedback_id: str, number: int) -> str:
    """The name of the key of a correction's rephrase, and of an entry with that key; `number` counts from 1."""
    return f"{feedback_id}#{number}"


class Cause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The feedback record behind a delta, and what else the decision saw.

    `entry_id` serves the feedback's query from now on; without it the bare model does, which was right already.
    `query`, with the prompt's `wording`, stands where that entry's key is another one, so that a starting editor can
    remember every edit. `supersedes` names earlier edits of the same input that said something else; they are no longer
    kept. Exceptions that are no more are named there, too. `traffic` is how far into each partition of `requests` the
    reservoir had read. `undoes` names the feedback that an undo takes back. `together` are the offsets of the feedback
    whose values were trained in one batch with this one's, in its order, this one's own among them; without it the
    value was trained alone. `standing` says what the sender was allowed; without it there was no list of authors, and
    everything was allowed. `rephrases` has an item for each rephrase of the correction, in its order; entries and edits
    bear the names of `rephrase_name`. An exception has no `entry_id`: its prompt bounds new radii.
    """

    feedback_id: str
    offset: int
    author: str | UnsetType = UNSET
    entry_id: str | UnsetType = UNSET
    query: Tensor | UnsetType = UNSET
    wording: Wording = ""
    supersedes: tuple[str, ...] = ()
    seen: Seen | UnsetType = UNSET
    traffic: dict[str, int] | UnsetType = UNSET
    undoes: tuple[str, ...] = ()
    together: tuple[int, ...] = ()
    standing: Standing | UnsetType = UNSET
    rephrases: tuple[RephraseKey, ...] = ()

    def rephrases_by_name(self) -> dict[str, RephraseKey]:
        """What was made of each rephrase, by the name of its key."""
        return {rephrase_name(self.feedback_id, number): one for number, one in enumerate(self.rephrases, 1)}


class EditChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an undo changed what serves another edit: an entry, or the bare model where `entry_id` is not there.

    `query` and `wording` stand where the edit was not in force before; `removed` says that it no longer is.
    """

    feedback_id: str
    entry_id: str | UnsetType = UNSET
    query: Tensor | UnsetType = UNSET
    wording: Wording = ""
    removed: bool = False


class ExceptionChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exception: a prompt that some entries do not serve, though it lies within their radius.

    `feedback_id` is that of the feedback that asked for it, and `except_from` the id that this feedback named. The
    entries `entry_ids` do not serve a prompt whose query lies less than `radius` from `query`, and whose wording is
    `wording` but for capitals. Without a wording the query decides alone. A new exception has entries, a query and a
    radius; `removed` says that it is no more.
    """

    feedback_id: str
    except_from: str = ""
    entry_ids: tuple[str, ...] = ()
    query: Tensor | UnsetType = UNSET
    radius: Radius = 0.0
    wording: Wording = ""
    removed: bool = False


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a codebook's history. `seq` rises by one from 1, across terms.

    `environment` stands in `lead` deltas: the versions, device and policy under which the values of the term are made.
    `edits` and `decided` stand in `undo` deltas: the edits that something else serves now, and what the decisions saw
    that were made anew, by feedback id. `exceptions` are those that the delta adds, changes or removes.
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
    decided: dict[str, Seen] = {}
    exceptions: tuple[ExceptionChange, ...] = ()
    cause: Cause | UnsetType = UNSET
    environment: dict[str, str] | UnsetType = UNSET
    digest: bytes


def chain_digest(previous_digest: bytes, record: bytes) -> bytes:
    """The digest that `record` must carry after a record of digest `previous_digest`."""
    return hashlib.sha256(previous_digest + record[:-DIGEST_BYTES]).digest()


def seal_delta(delta: Delta, previous_digest: bytes) -> tuple[bytes, Delta]:
    """The record's bytes, and the delta with its digest in place."""
    blank = msgspec.msgpack.encode(msgspec.structs.replace(delta, digest=GENESIS_DIGEST))
    digest = chain_digest(previous_digest, blank)
    return blank[:-DIGEST_BYTES] + digest, msgspec.structs.replace(delta, digest=digest)


class DecodedDelta(bytes):
    """A record of `deltas` that keeps its delta, so that no later reader decodes it again."""

    delta: Delta

    @classmethod
    def from_record(cls, record: bytes | None) -> "DecodedDelta":
        """Read one record.

        Raises:
            InvalidMessage: as `decode_delta`.
        """
        delta = decode_delta(record)
        assert record is not None
        made = cls(record)
        made.delta = delta
        return made


def decode_delta(record: bytes | None) -> Delta:
    """Read one record; whether it continues the chain is the codebook's to check (`chain_digest`).

    Raises:
        InvalidMessage: no MessagePack, a field missing or of a wrong type, an unknown version, a misplaced digest.
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
            check_version(msgspec.msgpack.decode(record, type=Message).v)  # a newer schema may know other ops
            raise
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"not a valid delta: {to_one_line(error)}") from error
    check_version(delta.v)
    if len(delta.digest) != DIGEST_BYTES or record[-DIGEST_BYTES:] != delta.digest:
        raise InvalidMessage("the record does not end with its digest")
    return delta
