"""Comparison of two codebook states, by entry, exception and edit. Numbers are compared bit for bit."""

from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.edit_memory import EditMemory
from gracestream.schemas.deltas import Delta, EntryChange, ExceptionChange, Tensor


class EditState:
    """A codebook together with the memory of its edits."""

    def __init__(self, codebook: Codebook, memory: EditMemory) -> None:
        self.codebook, self.memory = codebook, memory

    def apply(self, record: bytes) -> Delta | None:
        """Apply one record of `deltas` to both. Returns None, and changes nothing, if it is of a lower term.

        Raises:
            HistoryError: the record cannot be applied.
        """
        applied = self.codebook.apply(record)
        if applied is None:
            return None
        self.memory.apply_delta(applied.delta, self.codebook)
        return applied.delta


def entries_equal(entry_id: str, old: Codebook, new: Codebook) -> bool:
    """True if both codebooks hold the same entry under this id, bit for bit, or both hold none."""
    if (entry_id in old) != (entry_id in new):
        return False
    if entry_id not in new:
        return True
    old_slot, new_slot = old.slot(entry_id), new.slot(entry_id)
    return (
        old.labels[old_slot] == new.labels[new_slot]
        and old.wordings[old_slot] == new.wordings[new_slot]
        and old.radii_N[old_slot] == new.radii_N[new_slot]
        and old.values_NV[old_slot].tobytes() == new.values_NV[new_slot].tobytes()
        and old.keys_ND[old_slot].tobytes() == new.keys_ND[new_slot].tobytes()
    )


def edits_equal(feedback_id: str, old: EditMemory, new: EditMemory) -> bool:
    """True if the same entry serves an edit in both memories, or the edit is in force in neither."""
    if (feedback_id in old) != (feedback_id in new):
        return False
    return feedback_id not in new or old.serving_entry_id(feedback_id) == new.serving_entry_id(feedback_id)


def diff_exception(feedback_id: str, old: Codebook, new: Codebook) -> ExceptionChange | None:
    """The change that turns an exception of `old` into that of `new`; None if they are equal."""
    before, after = old.exceptions.get(feedback_id), new.exceptions.get(feedback_id)
    if before == after:
        return None
    return ExceptionChange(feedback_id=feedback_id, removed=True) if after is None else after


def diff_entry(entry_id: str, old: Codebook, new: Codebook) -> EntryChange:
    """The change that turns an entry of `old` into that of `new`; all fields if `old` lacks it.

    Raises:
        KeyError: `new` lacks the entry.
    """
    after = new.entry(new.slot(entry_id))
    before = old.entry(old.slot(entry_id)) if entry_id in old else None
    value: Tensor | UnsetType = UNSET
    if before is None or before.value_V.tobytes() != after.value_V.tobytes():
        value = Tensor.from_array(after.value_V)
    return EntryChange(
        entry_id=entry_id,
        key=UNSET
        if before is not None and before.key_D.tobytes() == after.key_D.tobytes()
        else Tensor.from_array(after.key_D),
        value=value,
        radius=UNSET if before is not None and before.radius == after.radius else after.radius,
        label=UNSET if before is not None and before.label == after.label else after.label,
        wording=UNSET if (before.wording if before is not None else "") == after.wording else after.wording,
    )
