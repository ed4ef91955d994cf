"""What differs between two states of a codebook, or of two: entry by entry, and edit by edit."""

from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.edit_memory import EditMemory
from gracestream.schemas.deltas import Delta, EntryChange, ExceptionChange, Tensor


class Fold:
    """A codebook and the memory of its edits."""

    def __init__(self, codebook: Codebook, memory: EditMemory) -> None:
        self.codebook, self.memory = codebook, memory

    def apply(self, record: bytes) -> Delta | None:
        """One record of `deltas`; None where it is of a lower term, and dropped."""
        applied = self.codebook.apply(record)
        if applied is None:
            return None
        self.memory.fold(applied.delta, self.codebook)
        return applied.delta


def same_entry(name: str, was: Codebook, now: Codebook) -> bool:
    """Whether two codebooks hold the same entry under a name, bit for bit, or both none."""
    if (name in was) != (name in now):
        return False
    if name not in now:
        return True
    before, after = was.slot(name), now.slot(name)
    return (
        was.labels[before] == now.labels[after]
        and was.wordings[before] == now.wordings[after]
        and was.radii_N[before] == now.radii_N[after]
        and was.values_NV[before].tobytes() == now.values_NV[after].tobytes()
        and was.keys_ND[before].tobytes() == now.keys_ND[after].tobytes()
    )


def same_edit(name: str, was: EditMemory, now: EditMemory) -> bool:
    """Whether an edit is served by the same entry in both memories, or in force in neither."""
    if (name in was) != (name in now):
        return False
    return name not in now or was.serving_entry(name) == now.serving_entry(name)


def exception_change(name: str, was: Codebook, now: Codebook) -> ExceptionChange | None:
    """What turns the exception of a name into what it is now; None where nothing does."""
    before, after = was.exceptions.get(name), now.exceptions.get(name)
    if before == after:
        return None
    return ExceptionChange(feedback_id=name, removed=True) if after is None else after


def entry_change(name: str, was: Codebook, now: Codebook) -> EntryChange:
    """What turns an entry into what it is now; everything where it was not there."""
    after = now.entry(now.slot(name))
    before = was.entry(was.slot(name)) if name in was else None
    value: Tensor | UnsetType = UNSET
    if before is None or before.value_V.tobytes() != after.value_V.tobytes():
        value = Tensor.of(after.value_V)
    return EntryChange(
        entry_id=name,
        key=UNSET if before is not None and before.key_D.tobytes() == after.key_D.tobytes() else Tensor.of(after.key_D),
        value=value,
        radius=UNSET if before is not None and before.radius == after.radius else after.radius,
        label=UNSET if before is not None and before.label == after.label else after.label,
        wording=UNSET if (before.wording if before is not None else "") == after.wording else after.wording,
    )
