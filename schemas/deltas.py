"""Deltas: the records of the `deltas` topic, whose fold is the codebook (design, sections 3 and 5).

A delta is one MessagePack map. Its last pair is `digest`, 32 bytes, so the record's last 32 bytes are the digest and
everything before them is what the design calls the delta's canonical bytes:

    digest = SHA-256(previous digest || record[:-32])

The digest is taken over the bytes that travelled, never over a re-encoding, so a record of a newer schema (whose
unknown fields are ignored here) verifies all the same. The digest before the first delta is 32 zero bytes.
"""

import hashlib
from typing import Annotated, Literal, Self

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from schemas.messages import VERSION, InvalidMessage

DIGEST_BYTES = 32
GENESIS = bytes(DIGEST_BYTES)

Op = Literal["lead", "add", "expand", "split", "replace", "undo", "retune"]


class Tensor(Struct, frozen=True, kw_only=True):
    """Raw little-endian bytes in C order, with dtype (numpy's name) and shape. Only float32 is in use."""

    dtype: Literal["float32"]
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Self:
        """Raises ValueError unless every number is finite."""
        if not np.isfinite(array).all():
            raise ValueError("a tensor holds a number that is not finite")
        return cls(dtype="float32", shape=array.shape, data=np.ascontiguousarray(array, "<f4").tobytes())

    def array(self) -> np.ndarray:
        """Raises ValueError when bytes and shape disagree or a number is not finite."""
        if len(self.data) != 4 * int(np.prod(self.shape, dtype=np.int64)):
            raise ValueError(f"{len(self.data)} bytes do not fill a float32 tensor of shape {self.shape}")
        array = np.frombuffer(self.data, "<f4").reshape(self.shape)
        if not np.isfinite(array).all():
            raise ValueError("a tensor holds a number that is not finite")
        return array


class EntryChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry that a delta changed, with only what changed; a new entry has all of key, value, radius, label."""

    entry_id: str
    key: Tensor | UnsetType = UNSET
    value: Tensor | UnsetType = UNSET
    radius: float | UnsetType = UNSET
    label: tuple[int, ...] | UnsetType = UNSET
    removed: bool = False


class Cause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The feedback record behind a delta, and what else the decision saw.

    `entry_id` serves the feedback's query from now on. `query` stands where that entry's key is another one (an
    expand), so that a starting editor can remember the query of every edit. `traffic` is how far into each partition
    of `requests` the reservoir had read.
    """

    feedback_id: str
    offset: int
    entry_id: str | UnsetType = UNSET
    query: Tensor | UnsetType = UNSET
    traffic: dict[str, int] | UnsetType = UNSET


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a codebook's history. `seq` rises by one from 1, across terms.

    `environment` stands in `lead` deltas: the versions, device and policy under which the values of the term are made.
    """

    v: Annotated[int, Meta(ge=1)]
    codebook: str
    model: str
    layer: str
    term: Annotated[int, Meta(ge=1)]
    seq: Annotated[int, Meta(ge=1)]
    op: Op
    entries: tuple[EntryChange, ...] = ()
    cause: Cause | UnsetType = UNSET
    environment: dict[str, str] | UnsetType = UNSET
    digest: bytes


def chain(previous: bytes, record: bytes) -> bytes:
    """The digest that `record` must carry after a record of digest `previous`."""
    return hashlib.sha256(previous + record[:-DIGEST_BYTES]).digest()


def seal(delta: Delta, previous: bytes) -> tuple[bytes, Delta]:
    """The record's bytes, and the delta with its digest in place."""
    blank = msgspec.msgpack.encode(msgspec.structs.replace(delta, digest=GENESIS))
    digest = chain(previous, blank)
    return blank[:-DIGEST_BYTES] + digest, msgspec.structs.replace(delta, digest=digest)


def decode_delta(record: bytes | None) -> Delta:
    """Read one record; whether it continues the chain is the codebook's to check (`chain`).

    Raises:
        InvalidMessage: no MessagePack, a field missing or of a wrong type, an unknown version, a misplaced digest.
    """
    if record is None:
        raise InvalidMessage("the record has no value")
    try:
        delta = msgspec.msgpack.decode(record, type=Delta)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"not a delta: {error}") from error
    if delta.v > VERSION:
        raise InvalidMessage(f"schema version {delta.v} is newer than {VERSION}, the newest known here")
    if len(delta.digest) != DIGEST_BYTES or record[-DIGEST_BYTES:] != delta.digest:
        raise InvalidMessage("the record does not end with its digest")
    return delta
