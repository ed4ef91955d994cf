"""The codebook: keys, values, radii and labels, computed by applying the records of `deltas` in order.

docs/explanation/method.md describes the method, docs/explanation/consistency.md the log of deltas. Tensor names end in
their shape (docs/explanation/tensor-names.md).

Guarantees of `Codebook.apply`:

1. All or nothing: the whole record is checked before the first number changes.
2. Equal records in equal order give equal codebooks, bit for bit.
3. A record of a lower term than the codebook's is dropped: a fenced editor wrote it.
4. Any other fault raises `HistoryError` and leaves the codebook unchanged: a gap in `seq`, a digest that does not
   continue the chain, another model or layer, a tensor of a wrong shape.

Not promised: safety for several threads. Only `describe` may run while another thread applies a delta.
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
"""The target of an entry: its token ids, or one class index. Two labels are equal if all their numbers are."""

MAX_DIGEST_ATTEMPTS = 3
"""Attempts of `describe` to compute a state digest before the next delta changes the codebook."""

MAX_LABEL_LENGTH = 2**16
"""Largest number of tokens or classes in a label. No real target is this long; it limits memory for a bad record."""


IDENTITY_SETTINGS = {
    "codebook": "GRACESTREAM_CODEBOOK",
    "model": "GRACESTREAM_MODEL (or GRACESTREAM_QUERY_SOURCE, GRACESTREAM_ENCODER, GRACESTREAM_INJECT_TOKENS)",
    "layer": "GRACESTREAM_LAYER",
}
"""Identity fields of a delta, each with the settings that determine it. A delta of another identity is not applied."""

QUERY_SETTINGS = {"last", "first", "mean", "encoder"}
"""Values of `GRACESTREAM_QUERY_SOURCE` that a `lead` delta may record."""


def read_query_setting(delta: Delta) -> str | None:
    """The value of `GRACESTREAM_QUERY_SOURCE` that a `lead` delta records for its term; None if it records none.

    The recorded text may continue with a space and the encoder's fingerprint.
    """
    provenance = "" if delta.environment is UNSET else delta.environment.get("query", "")
    query = provenance.partition(" ")[0]
    return query if query in QUERY_SETTINGS else None


def original_setting_hint(delta: Delta) -> str:
    """The part "as it was" of an error message, with `GRACESTREAM_QUERY_SOURCE` if the delta records it."""
    query = read_query_setting(delta)
    return "as it was" if query is None else f"as it was (GRACESTREAM_QUERY_SOURCE={query} in that history)"


CheckedDelta = tuple[Delta, list[tuple[np.ndarray | None, np.ndarray | None]]]
"""A valid delta, with the decoded key and value of each of its entry changes (None where unchanged)."""


class AppliedDelta(Struct, frozen=True):
    """The effect of one delta.

    Attributes:
        delta: The delta.
        slots: The changed slots in ascending order, including slots to which an entry has moved.
    """

    delta: Delta
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A copy of one entry."""

    entry_id: str
    key_D: np.ndarray
    value_V: np.ndarray
    radius: float
    label: Label
    wording: str = ""


class Codebook:
    """Entries in slots 0 to N-1. The last entry moves to the slot of a removed one, so no slot is ever empty."""

    def __init__(self, name: str, model: str, layer: str) -> None:
        self.name, self.model, self.layer = name, model, layer
        self.seq, self.term, self.digest = 0, 0, GENESIS_DIGEST
        self.entry_ids: list[str] = []
        self.labels: list[Label] = []
        self.wordings: list[str] = []
        self.exceptions = PromptExceptions()
        self._slots: dict[str, int] = {}
        self._version = 0  # odd while a delta is being applied, so that `describe` can detect it in another thread
        self._last_check: tuple[bytes, int, CheckedDelta | None] | None = None
        """The last record given to `check`, the version of the codebook at that time, and the result."""
        self._digest_cache: tuple[int, str] | None = None  # version and its state digest
        self._keys = np.empty((0, 0), np.float32)
        self._values = np.empty((0, 0), np.float32)
        self._radii = np.empty(0, np.float32)

    def __len__(self) -> int:
        return len(self.entry_ids)

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._slots

    @property
    def keys_ND(self) -> np.ndarray:
        """The keys; a view, float32, C order."""
        return self._keys[: len(self)]

    @property
    def values_NV(self) -> np.ndarray:
        """The values; a view, float32."""
        return self._values[: len(self)]

    @property
    def radii_N(self) -> np.ndarray:
        """The radii; a view, float32."""
        return self._radii[: len(self)]

    def slot(self, entry_id: str) -> int:
        """The slot of an entry.

        Raises:
            KeyError: there is no entry of this id.
        """
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
        """Apply one record of `deltas`. Returns None, and changes nothing, if the record is of a lower term.

        Raises:
            HistoryError: the record cannot be applied; the codebook is unchanged.
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
        """The delta that `apply` would apply, or None if it would drop the record. Changes nothing.

        An `apply` of the same record object directly afterwards reuses the result.

        Raises:
            HistoryError: `apply` would raise it.
        """
        checked = self._check_record(record)
        self._last_check = record, self._version, checked
        return None if checked is None else checked[0]

    def _check_record(self, record: bytes) -> CheckedDelta | None:
        last_check = self._last_check
        if last_check is not None and last_check[0] is record and last_check[1] == self._version:
            return last_check[2]
        try:
            delta = decode_delta(record)
        except InvalidMessage as error:
            raise HistoryError(str(error)) from error
        if delta.term < self.term:
            return None
        self._check_position(delta, record)
        arrays = [self._check_entry(change) for change in delta.entries]
        if len(arrays) > 1:
            for column in zip(*arrays, strict=True):
                if len({array.shape for array in column if array is not None}) > 1:
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
        """Replace the state by a saved one, without applying the deltas that led to it. Arrays are not copied."""
        self._version += 1
        self.seq, self.term, self.digest = seq, term, digest
        self.entry_ids, self.labels, self.wordings = list(entry_ids), list(labels), list(wordings)
        self._slots = {entry_id: slot for slot, entry_id in enumerate(entry_ids)}
        self._keys, self._values, self._radii = keys_ND, values_NV, radii_N
        self.exceptions = PromptExceptions(exceptions)
        self._version += 1

    def replace_with(self, other: "Codebook") -> None:
        """Adopt the state of `other`. Arrays are shared, so `other` must not be used afterwards."""
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
        """An independent copy, equal in every bit. Must not run while a delta is being applied."""
        duplicate = Codebook(self.name, self.model, self.layer)
        duplicate.replace_with(self)
        duplicate._keys, duplicate._values, duplicate._radii = (
            duplicate._keys.copy(),
            duplicate._values.copy(),
            duplicate._radii.copy(),
        )
        return duplicate

    def describe(self) -> dict[str, object]:
        """Identity, position in the log and state digest, as `/state` and `gracestream replay` report them.

        Safe in any thread: a description read while a delta was being applied is discarded and read again. The state
        digest is None if deltas arrive faster than it can be computed.
        """
        for _ in range(MAX_DIGEST_ATTEMPTS):
            version, cached = self._version, self._digest_cache
            try:
                state_digest = cached[1] if cached is not None and cached[0] == version else self.state_digest()
                description = self._describe(state_digest)
            except (RuntimeError, IndexError, KeyError):
                continue  # a delta changed a list or dictionary during the iteration
            if version == self._version and version % 2 == 0:
                self._digest_cache = version, state_digest
                return description
        while True:
            version = self._version
            description = self._describe(None)
            if version == self._version and version % 2 == 0:
                return description

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
        """SHA-256 (hex) over entries and exceptions, sorted by id.

        Codebooks with equal digests answer alike. Slots do not count: they depend on the order of the history.
        """
        digest = hashlib.sha256()
        for entry_id in sorted(self._slots):
            slot = self._slots[entry_id]
            label = self.labels[slot]
            encoded_id = entry_id.encode()
            digest.update(
                struct.pack("<q", len(encoded_id)) + encoded_id + struct.pack(f"<q{len(label)}q", len(label), *label)
            )
            for array in (self._keys[slot], self._values[slot], self._radii[slot]):
                digest.update(np.ascontiguousarray(array, "<f4").data)
            if wording := self.wordings[slot].encode():
                # Read as the length of an entry id, these 8 bytes exceed any id. So a wording cannot pass for an entry.
                digest.update(b"wording " + struct.pack("<q", len(wording)) + wording)
        digest.update(self.exceptions.digest_bytes())
        if any(self.wordings) or any(exception.wording for exception in self.exceptions):
            digest.update(rules_digest().encode())  # wordings are compared by these rules
        return digest.hexdigest()

    def _check_position(self, delta: Delta, record: bytes) -> None:
        """Check that a delta is of this codebook and directly follows its last one.

        Raises:
            HistoryError: it does not.
        """
        own_identity, delta_identity = (self.name, self.model, self.layer), (delta.codebook, delta.model, delta.layer)
        if delta_identity != own_identity:
            field, own, received = next(
                comparison
                for comparison in zip(("codebook", "model", "layer"), own_identity, delta_identity, strict=True)
                if comparison[1] != comparison[2]
            )
            raise HistoryError(
                f"delta {delta.seq} is of {field} {received!r}; this one is {own!r}:"
                f" set {IDENTITY_SETTINGS[field]} {original_setting_hint(delta)}, or another GRACESTREAM_TOPIC_PREFIX"
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
        """Check a change of an entry. Returns its key and value as arrays, None where unchanged.

        Raises:
            HistoryError: the change does not fit the codebook.
        """
        if not 0 < len(change.entry_id) <= MAX_ID_LENGTH:
            raise HistoryError(f"an entry's id has {len(change.entry_id)} characters, not 1 to {MAX_ID_LENGTH}")
        exists = change.entry_id in self._slots
        if change.removed:
            if not exists:
                raise HistoryError(f"entry {change.entry_id!r} cannot be removed: it is not there")
            return None, None
        fields = (change.key, change.value, change.radius, change.label)
        if not exists and UNSET in fields:
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
        """Check the exceptions of a delta against the codebook with the delta's entries applied.

        Raises:
            HistoryError: an exception does not fit.
        """
        feedback_ids = [change.feedback_id for change in delta.exceptions]
        if len(set(feedback_ids)) < len(feedback_ids):
            raise HistoryError(f"delta {delta.seq} names an exception twice")
        added = {change.entry_id for change in delta.entries if not change.removed}
        removed_only = {change.entry_id for change in delta.entries if change.removed} - added
        key_shape = keys[0].shape if keys else self._keys.shape[1:]
        for change in delta.exceptions:
            feedback_id = change.feedback_id
            if not all(0 < len(identifier) <= MAX_ID_LENGTH for identifier in (feedback_id, *change.entry_ids)):
                raise HistoryError(f"an exception has an id outside 1 to {MAX_ID_LENGTH} characters")
            if not change.removed:
                self._check_exception(
                    change, lambda entry_id: entry_id in added or entry_id in self, removed_only, key_shape
                )
            elif feedback_id not in self.exceptions:
                raise HistoryError(f"exception {feedback_id!r} cannot be removed: it is not there")

    @staticmethod
    def _check_exception(
        change: ExceptionChange,
        entry_exists: Callable[[str], bool],
        removed_ids: Collection[str],
        key_shape: tuple[int, ...],
    ) -> None:
        feedback_id = change.feedback_id
        if change.query is UNSET or not change.entry_ids:
            raise HistoryError(f"exception {feedback_id!r} lacks its query or its entries")
        if len(set(change.entry_ids)) < len(change.entry_ids):
            raise HistoryError(f"exception {feedback_id!r} names an entry twice")
        if unknown := [
            entry_id for entry_id in change.entry_ids if entry_id in removed_ids or not entry_exists(entry_id)
        ]:
            raise HistoryError(f"exception {feedback_id!r} names entry {unknown[0]!r}, which is not there")
        try:
            query = change.query.array()
        except ValueError as error:
            raise HistoryError(f"exception {feedback_id!r}: {error}") from error
        if query.shape != key_shape:
            raise HistoryError(f"exception {feedback_id!r} has a query of shape {query.shape}, not {key_shape}")

    def _decode_arrays(self, change: EntryChange) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Key and value of a change as arrays, None where unchanged.

        Raises:
            HistoryError: an array cannot be decoded, or its shape does not fit the codebook.
        """
        try:
            key = None if change.key is UNSET else change.key.array()
            value = None if change.value is UNSET else change.value.array()
        except ValueError as error:
            raise HistoryError(f"entry {change.entry_id!r}: {error}") from error
        for field, array, rows in (("key", key, self._keys), ("value", value, self._values)):
            if array is not None and not _is_valid_row(array, rows):
                raise HistoryError(
                    f"entry {change.entry_id!r} has a {field} of shape {array.shape}, not {rows.shape[1:]}"
                )
        return key, value

    def _apply_changes(self, delta: Delta, arrays: list[tuple[np.ndarray | None, np.ndarray | None]]) -> AppliedDelta:
        changed_slots: set[int] = set()
        for change, (key, value) in zip(delta.entries, arrays, strict=True):
            if change.removed:
                # The last entry moves to the freed slot, so the last slot no longer exists.
                changed_slots.discard(len(self) - 1)
                changed_slots.add(self._remove(change.entry_id))
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
            changed_slots.add(slot)
        for exception in delta.exceptions:
            self.exceptions.apply(exception)
        # A removed last entry leaves its own slot in the set, which no longer exists.
        return AppliedDelta(delta, tuple(sorted(slot for slot in changed_slots if slot < len(self))))

    def _append(self, entry_id: str, key_width: int, value_width: int) -> int:
        """Append an empty entry and return its slot. Arrays double, so the cost per entry is constant on average."""
        slot = len(self.entry_ids)
        if slot == len(self._radii):
            capacity = max(64, 2 * slot)
            self._keys = _enlarge_array(self._keys, (capacity, key_width))
            self._values = _enlarge_array(self._values, (capacity, value_width))
            self._radii = _enlarge_array(self._radii, (capacity,))
        self.entry_ids.append(entry_id)
        self.labels.append(())
        self.wordings.append("")
        self._slots[entry_id] = slot
        return slot

    def _remove(self, entry_id: str) -> int:
        """Remove an entry and return its slot, which the last entry now occupies."""
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
    """True if an array fits as a row of these; the first row may have any width above 0."""
    return array.ndim == 1 and array.size > 0 and rows.shape[1] in (0, array.size)


def _enlarge_array(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A float32 array of this shape with the rows of `array` at its beginning, otherwise zeros."""
    enlarged = np.zeros(shape, np.float32)
    if len(array):
        enlarged[: len(array)] = array
    return enlarged
