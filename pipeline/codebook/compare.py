"""What differs between two states of a codebook, or of two: entry by entry, and edit by edit."""

from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.edit_memory import EditMemory
from gracestream.schemas.deltas import Delta, EntryChange, ExceptionChange, Tensor


class EditState:
    """A codebook and the memory of its edits."""

    def __init__(self, codebook: Codebook, memory: EditMemory) -> None:
        self.codebook, self.memory = codebook, memory

    def apply(self, record: bytes) -> Delta | None:
        """One record of `deltas`; None where it is of a lower term, and dropped."""
        applied = self.codebook.apply(record)
        if applied is None:
            return None
        self.memory.apply_delta(applied.delta, self.codebook)
        return applied.delta


def entries_equal(entry_id: str, old: Codebook, new: Codebook) -> bool:
    """Whether two codebooks hold the same entry under a name, bit for bit, or both none."""
    if (entry_id in old) != (entry_id in new):
        return False
    if entry_id not in new:
        return True
    before, after = old.slot(entry_id), new.slot(entry_id)
    return (
        old.labels[before] == new.labels[after]
        and old.wordings[before] == new.wordings[after]
        and old.radii_N[before] == new.radii_N[after]
        and old.values_NV[before].tobytes() == new.values_NV[after].tobytes()
        and old.keys_ND[before].tobytes() == new.keys_ND[after].tobytes()
    )


def edits_equal(feedback_id: str, old: EditMemory, new: EditMemory) -> bool:
    """Whether an edit is served by the same entry in both memories, or in force in neither."""
    if (feedback_id in old) != (feedback_id in new):
        return False
    return feedback_id not in new or old.serving_entry_id(feedback_id) == new.serving_entry_id(feedback_id)


def diff_exception(feedback_id: str, old: Codebook, new: Codebook) -> ExceptionChange | None:
    """What turns the exception of a name into what it is now; None where nothing does."""
    before, after = old.exceptions.get(feedback_id), new.exceptions.get(feedback_id)
    if before == after:
        return None
    return ExceptionChange(feedback_id=feedback_id, removed=True) if after is None else after


def diff_entry(entry_id: str, old: Codebook, new: Codebook) -> EntryChange:
    """What turns an entry into what it is now; everything where it was not there."""
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
