"""The codebook: keys, values, radii and labels, as the fold over `deltas` (design, sections 3 to 5).

Shape suffixes, here and in the whole engine: N entries of the codebook, B rows of a batch, T tokens, D the width of a
key (the wrapped module's input), V the width of a value (its output), E remembered edits, R traffic queries, K
candidates, C classes or vocabulary.

What `CodebookOption.apply` guarantees:

1. All or nothing: a record is checked as a whole before the first number changes.
2. Equal records in equal order give equal codebooks, bit for bit.
3. A record of a lower term than one already seen is dropped; any other break (a gap in `seq`, a digest that does not
   continue the chain, another model or layer, a tensor of a wrong shape) raises, and the codebook stays as it was.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET, Struct

from gracestream.pipeline.codebook.prompt_exceptions import PromptExceptions
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.wording import rules_digest
from gracestream.schemas.deltas import GENESIS_DIGEST, Delta, EntryChange, ExceptionChange, chain_digest, decode_delta
from gracestream.schemas.messages import MAX_ID_LENGTH, InvalidMessage

Label = tuple[int, ...]
"""Token ids of a target, or a class index. Labels are equal when every number is."""

MAX_DIGEST_ATTEMPTS = 3
"""To compute the digest of a state before the next delta changes it."""

MAX_LABEL_LENGTH = 2**16
"""More tokens than any target has."""


IDENTITY_SETTINGS = {
    "codebook": "GRACESTREAM_CODEBOOK",
    "model": "GRACESTREAM_MODEL (or _QUERY, _ENCODER, _REPLACE)",
    "layer": "GRACESTREAM_LAYER",
}
"""What decides whether a codebook's deltas are its own."""

QUERY_SETTINGS = {"last", "first", "mean", "encoder"}
"""Values of `GRACESTREAM_QUERY` that a `lead` delta tells."""


def read_query_setting(delta: Delta) -> str | None:
    """The value of `GRACESTREAM_QUERY` under which a term began, as its `lead` delta tells it; None where it does not.

    An encoder's fingerprint follows its name there.
    """
    told = "" if delta.environment is UNSET else delta.environment.get("query", "")
    query = told.partition(" ")[0]
    return query if query in QUERY_SETTINGS else None


def original_setting_hint(delta: Delta) -> str:
    """The words "as it was" of an error, with the value of `GRACESTREAM_QUERY` where the delta tells it."""
    query = read_query_setting(delta)
    return "as it was" if query is None else f"as it was (GRACESTREAM_QUERY={query} in that history)"


CheckedDelta = tuple[Delta, list[tuple[np.ndarray | None, np.ndarray | None]]]
"""A delta that can be applied, and the key and the value of each of its changes."""


class AppliedDelta(Struct, frozen=True):
    """What one delta did: the slots that now hold something new, if only an entry that had another slot before."""

    delta: Delta
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, copied out."""

    entry_id: str
    key_D: np.ndarray
    value_V: np.ndarray
    radius: float
    label: Label
    wording: str = ""


class Codebook:
    """Entries in slots 0 to N-1. A removed entry's slot is taken by the last one, so no slot is ever empty."""

    def __init__(self, name: str, model: str, layer: str) -> None:
        self.name, self.model, self.layer = name, model, layer
        self.seq, self.term, self.digest = 0, 0, GENESIS_DIGEST
        self.entry_ids: list[str] = []
        self.labels: list[Label] = []
        self.wordings: list[str] = []
        self.exceptions = PromptExceptions()
        self._slots: dict[str, int] = {}
        self._version = 0  # odd while a delta is being applied
        self._last_check: tuple[bytes, int, CheckedDelta | None] | None = None
        """The record that `check` has seen last, the version that it was checked against, and the result."""
        self._digest_cache: tuple[int, str] | None = None  # the state digest, and the version that it is of
        self._keys = np.empty((0, 0), np.float32)
        self._values = np.empty((0, 0), np.float32)
        self._radii = np.empty(0, np.float32)

    def __len__(self) -> int:
        return len(self.entry_ids)

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._slots

    @property
    def keys_ND(self) -> np.ndarray:
        """A view; float32, C order."""
        return self._keys[: len(self)]

    @property
    def values_NV(self) -> np.ndarray:
        """A view; float32."""
        return self._values[: len(self)]

    @property
    def radii_N(self) -> np.ndarray:
        """A view; float32."""
        return self._radii[: len(self)]

    def slot(self, entry_id: str) -> int:
        """Raises KeyError for an entry that is not there."""
        return self._slots[entry_id]

    def entry(self, slot: int) -> Entry:
        """A copy of the entry in a slot."""
        return Entry(
            entry_id=self.entry_ids[slot],
            key_D=self._keys[slot].copy(),
            value_V=self._values[slot].copy(),
            radius=float(self._radii[slot]),
            label=self.labels[slot],
            wording=self.wordings[slot],
        )

    def apply(self, record: bytes) -> AppliedDelta | None:
        """Fold one record of `deltas` in; None when it is of a lower term and dropped.

        Raises:
            HistoryError: the record cannot be applied; the codebook is as before.
        """
        checked = self._check_record(record)
        if checked is None:
            return None
        delta, arrays = checked
        self._last_check = None
        self._version += 1
        applied = self._apply_changes(delta, arrays)
        self.seq, self.term, self.digest = delta.seq, delta.term, delta.digest
        self._version += 1
        return applied

    def check(self, record: bytes) -> Delta | None:
        """The delta that `apply` would take, or None; raises where `apply` would, and changes nothing."""
        checked = self._check_record(record)
        self._last_check = record, self._version, checked
        return None if checked is None else checked[0]

    def _check_record(self, record: bytes) -> CheckedDelta | None:
        ahead = self._last_check
        if ahead is not None and ahead[0] is record and ahead[1] == self._version:
            return ahead[2]
        try:
            delta = decode_delta(record)
        except InvalidMessage as error:
            raise HistoryError(str(error)) from error
        if delta.term < self.term:
            return None
        self._check_position(delta, record)
        arrays = [self._check_entry(change) for change in delta.entries]
        if len(arrays) > 1:
            for side in zip(*arrays, strict=True):
                if len({array.shape for array in side if array is not None}) > 1:
                    raise HistoryError(f"delta {delta.seq} has keys, or values, of different widths")
        self._check_exceptions(delta, [key for key, _ in arrays if key is not None])
        return delta, arrays

    def restore(
        self,
        *,
        seq: int,
        term: int,
        digest: bytes,
        entry_ids: list[str],
        labels: list[Label],
        wordings: list[str],
        keys_ND: np.ndarray,
        values_NV: np.ndarray,
        radii_N: np.ndarray,
        exceptions: Iterable[ExceptionChange] = (),
    ) -> None:
        """Take over a state as it was saved, in place of the fold that led to it; the arrays are kept, not copied."""
        self._version += 1
        self.seq, self.term, self.digest = seq, term, digest
        self.entry_ids, self.labels, self.wordings = list(entry_ids), list(labels), list(wordings)
        self._slots = {entry_id: slot for slot, entry_id in enumerate(entry_ids)}
        self._keys, self._values, self._radii = keys_ND, values_NV, radii_N
        self.exceptions = PromptExceptions(exceptions)
        self._version += 1

    def replace_with(self, other: "Codebook") -> None:
        """Become what `other` is, which is left alone from then on: its arrays are kept, not copied."""
        self.restore(
            seq=other.seq,
            term=other.term,
            digest=other.digest,
            entry_ids=other.entry_ids,
            labels=other.labels,
            wordings=other.wordings,
            keys_ND=other.keys_ND,
            values_NV=other.values_NV,
            radii_N=other.radii_N,
            exceptions=other.exceptions,
        )

    def copy(self) -> "Codebook":
        """A codebook of its own that is equal in every bit; not while a delta is being applied."""
        twin = Codebook(self.name, self.model, self.layer)
        twin.replace_with(self)
        twin._keys, twin._values, twin._radii = twin._keys.copy(), twin._values.copy(), twin._radii.copy()
        return twin

    def describe(self) -> dict[str, object]:
        """Which codebook this is and how far it has come: what `/state` and `gracestream replay` tell.

        Safe in any thread: what was read while a delta was being applied is read again. The state's digest is None
        where deltas come faster than it can be computed.
        """
        for _ in range(MAX_DIGEST_ATTEMPTS):
            version, told = self._version, self._digest_cache
            try:
                state_digest = told[1] if told is not None and told[0] == version else self.state_digest()
                facts = self._describe(state_digest)
            except (RuntimeError, IndexError, KeyError):
                continue
            if version == self._version and version % 2 == 0:
                self._digest_cache = version, state_digest
                return facts
        while True:
            version = self._version
            facts = self._describe(None)
            if version == self._version and version % 2 == 0:
                return facts

    def _describe(self, state_digest: str | None) -> dict[str, object]:
        return {
            "codebook": self.name,
            "model": self.model,
            "layer": self.layer,
            "term": self.term,
            "seq": self.seq,
            "digest": self.digest.hex(),
            "entries": len(self),
            "exceptions": len(self.exceptions),
            "state_digest": state_digest,
        }

    def state_digest(self) -> str:
        """SHA-256 (hex) over entries and exceptions, in order of their ids: equal when two codebooks answer alike."""
        digest = hashlib.sha256()
        for entry_id in sorted(self._slots):
            slot = self._slots[entry_id]
            label = self.labels[slot]
            name = entry_id.encode()
            digest.update(struct.pack("<q", len(name)) + name + struct.pack(f"<q{len(label)}q", len(label), *label))
            for array in (self._keys[slot], self._values[slot], self._radii[slot]):
                digest.update(np.ascontiguousarray(array, "<f4").data)
            if wording := self.wordings[slot].encode():
                # No length of an entry id reads like this, so what follows cannot be the next entry.
                digest.update(b"wording " + struct.pack("<q", len(wording)) + wording)
        digest.update(self.exceptions.digest_bytes())
        if any(self.wordings) or any(one.wording for one in self.exceptions):
            digest.update(rules_digest().encode())
        return digest.hexdigest()

    def _check_position(self, delta: Delta, record: bytes) -> None:
        ours, its = (self.name, self.model, self.layer), (delta.codebook, delta.model, delta.layer)
        if its != ours:
            field, held, named = next(
                found for found in zip(("codebook", "model", "layer"), ours, its, strict=True) if found[1] != found[2]
            )
            raise HistoryError(
                f"delta {delta.seq} is of {field} {named!r}; this one is {held!r}:"
                f" set {IDENTITY_SETTINGS[field]} {original_setting_hint(delta)}, or another GRACESTREAM_PREFIX"
            )
        if delta.seq != self.seq + 1:
            raise HistoryError(f"delta {delta.seq} of term {delta.term} follows {self.seq} of term {self.term}: a gap")
        if (delta.op == "lead") != (delta.term > self.term):
            raise HistoryError(f"delta {delta.seq} ({delta.op}) is of term {delta.term} after term {self.term}")
        if chain_digest(self.digest, record) != delta.digest:
            raise HistoryError(f"delta {delta.seq} does not continue the chain of digests")
        if len(delta.entries) > 1 and len({change.entry_id for change in delta.entries}) < len(delta.entries):
            raise HistoryError(f"delta {delta.seq} names an entry twice")

    def _check_entry(self, change: EntryChange) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Key and value as arrays, once the change fits what the codebook holds."""
        if not 0 < len(change.entry_id) <= MAX_ID_LENGTH:
            raise HistoryError(f"an entry's id has {len(change.entry_id)} characters, not 1 to {MAX_ID_LENGTH}")
        known = change.entry_id in self._slots
        if change.removed:
            if not known:
                raise HistoryError(f"entry {change.entry_id!r} cannot be removed: it is not there")
            return None, None
        fields = (change.key, change.value, change.radius, change.label)
        if not known and UNSET in fields:
            raise HistoryError(f"the new entry {change.entry_id!r} lacks its key, value, radius or label")
        if fields.count(UNSET) == len(fields) and change.wording is UNSET:
            raise HistoryError(f"entry {change.entry_id!r} is named, but nothing of it changes")
        if change.label is not UNSET and len(change.label) > MAX_LABEL_LENGTH:
            raise HistoryError(
                f"entry {change.entry_id!r} has a label of {len(change.label)} numbers, over {MAX_LABEL_LENGTH}"
            )
        if change.radius is not UNSET and not (0 <= change.radius < np.inf and math.copysign(1, change.radius) > 0):
            raise HistoryError(f"entry {change.entry_id!r} has the radius {change.radius}")
        return self._decode_arrays(change)

    def _check_exceptions(self, delta: Delta, keys: Sequence[np.ndarray]) -> None:
        """Raises HistoryError where an exception does not fit what the codebook holds with the delta's entries."""
        names = [change.feedback_id for change in delta.exceptions]
        if len(set(names)) < len(names):
            raise HistoryError(f"delta {delta.seq} names an exception twice")
        added = {change.entry_id for change in delta.entries if not change.removed}
        gone = {change.entry_id for change in delta.entries if change.removed} - added
        width = keys[0].shape if keys else self._keys.shape[1:]
        for change in delta.exceptions:
            name = change.feedback_id
            if not all(0 < len(one) <= MAX_ID_LENGTH for one in (name, *change.entry_ids)):
                raise HistoryError(f"an exception has an id that has not 1 to {MAX_ID_LENGTH} characters")
            if not change.removed:
                self._check_exception(change, lambda entry_id: entry_id in added or entry_id in self, gone, width)
            elif name not in self.exceptions:
                raise HistoryError(f"exception {name!r} cannot be removed: it is not there")

    @staticmethod
    def _check_exception(
        change: ExceptionChange,
        entry_exists: Callable[[str], bool],
        removed_ids: Collection[str],
        key_shape: tuple[int, ...],
    ) -> None:
        name = change.feedback_id
        if change.query is UNSET or not change.entry_ids:
            raise HistoryError(f"exception {name!r} lacks its query or its entries")
        if len(set(change.entry_ids)) < len(change.entry_ids):
            raise HistoryError(f"exception {name!r} names an entry twice")
        if unknown := [one for one in change.entry_ids if one in removed_ids or not entry_exists(one)]:
            raise HistoryError(f"exception {name!r} is of entry {unknown[0]!r}, which is not there")
        try:
            query = change.query.array()
        except ValueError as error:
            raise HistoryError(f"exception {name!r}: {error}") from error
        if query.shape != key_shape:
            raise HistoryError(f"exception {name!r} has a query of shape {query.shape}, not {key_shape}")

    def _decode_arrays(self, change: EntryChange) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Key and value, each where it changes, once their shapes fit."""
        try:
            key = None if change.key is UNSET else change.key.array()
            value = None if change.value is UNSET else change.value.array()
        except ValueError as error:
            raise HistoryError(f"entry {change.entry_id!r}: {error}") from error
        for what, array, held in (("key", key, self._keys), ("value", value, self._values)):
            if array is not None and not _is_valid_row(array, held):
                raise HistoryError(
                    f"entry {change.entry_id!r} has a {what} of shape {array.shape}, not {held.shape[1:]}"
                )
        return key, value

    def _apply_changes(self, delta: Delta, arrays: list[tuple[np.ndarray | None, np.ndarray | None]]) -> AppliedDelta:
        touched: set[int] = set()
        for change, (key, value) in zip(delta.entries, arrays, strict=True):
            if change.removed:
                touched.discard(len(self) - 1)
                touched.add(self._remove(change.entry_id))
                continue
            slot = self._slots.get(change.entry_id)
            if slot is None:
                assert key is not None
                assert value is not None
                slot = self._append(change.entry_id, len(key), len(value))
            if key is not None:
                self._keys[slot] = key
            if value is not None:
                self._values[slot] = value
            if change.radius is not UNSET:
                self._radii[slot] = change.radius
            if change.label is not UNSET:
                self.labels[slot] = change.label
            if change.wording is not UNSET:
                self.wordings[slot] = change.wording
            touched.add(slot)
        for exception in delta.exceptions:
            self.exceptions.apply(exception)
        return AppliedDelta(delta, tuple(sorted(slot for slot in touched if slot < len(self))))  # others are no more

    def _append(self, entry_id: str, key_width: int, value_width: int) -> int:
        slot = len(self.entry_ids)
        if slot == len(self._radii):
            room = max(64, 2 * slot)
            self._keys = _enlarge_array(self._keys, (room, key_width))
            self._values = _enlarge_array(self._values, (room, value_width))
            self._radii = _enlarge_array(self._radii, (room,))
        self.entry_ids.append(entry_id)
        self.labels.append(())
        self.wordings.append("")
        self._slots[entry_id] = slot
        return slot

    def _remove(self, entry_id: str) -> int:
        slot, last = self._slots.pop(entry_id), len(self) - 1
        if slot != last:
            for array in (self._keys, self._values, self._radii):
                array[slot] = array[last]
            self.entry_ids[slot], self.labels[slot] = self.entry_ids[last], self.labels[last]
            self.wordings[slot] = self.wordings[last]
            self._slots[self.entry_ids[slot]] = slot
        self.entry_ids.pop()
        self.labels.pop()
        self.wordings.pop()
        return slot


def _is_valid_row(array: np.ndarray, rows: np.ndarray) -> bool:
    """Whether an array may be a row of those held; any row may, where none are."""
    return array.ndim == 1 and array.size > 0 and rows.shape[1] in (0, array.size)


def _enlarge_array(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    grown = np.zeros(shape, np.float32)
    if len(array):
        grown[: len(array)] = array
    return grown
