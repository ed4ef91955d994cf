"""What changed between two points of a history, in words: which inputs are answered otherwise, and which entries."""

from collections.abc import Mapping
from datetime import datetime

from msgspec import UNSET, Struct

from gracestream.pipeline.codebook import UNEDITED_MODEL, Codebook, EditMemory, EditState, diff_entry, entries_equal
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history.kafka_history import KafkaHistory
from gracestream.pipeline.history.replay import replay_deltas
from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import rephrase_name
from gracestream.schemas.messages import Feedback, Inputs, to_display_text


class InputChange(Struct, frozen=True):
    """An input whose answer the edits fix otherwise: its target before and after; None is the bare model's answer."""

    inputs: str
    before: str | None
    after: str | None
    feedback_id: str


class ExceptionDiff(Struct, frozen=True):
    """Inputs that an edit does not answer at one point, and may at the other. `excepted`: it is so after."""

    inputs: str
    except_from: str
    excepted: bool
    feedback_id: str


class Diff(Struct, frozen=True):
    """What differs: inputs and exceptions in order of their feedback, and by entry id what happened to it."""

    inputs: list[InputChange]
    entries: dict[str, str]
    exceptions: list[ExceptionDiff]


HistoryPoint = int | datetime
"""The state after a delta, or after the last one of a time."""


def diff_history(settings: Settings, before: HistoryPoint, after: HistoryPoint) -> Diff:
    """Compare two points of the history; the second may be the earlier one.

    Raises:
        HistoryError: the log does not fold, or does not reach a point.
    """
    was, now = _replay_to(settings, before), _replay_to(settings, after)
    corrections = KafkaHistory(settings).feedback_since(0)
    then, later = _edited_targets(was.memory, corrections), _edited_targets(now.memory, corrections)
    inputs = []
    for name, (_, feedback_id) in (then | later).items():
        old, new = then.get(name, (None, ""))[0], later.get(name, (None, ""))[0]
        if old != new:
            inputs.append(InputChange(to_display_text(name), old, new, feedback_id))
    names = sorted({*was.codebook.entry_ids, *now.codebook.entry_ids})
    return Diff(
        inputs,
        {
            name: _describe_entry_change(name, was.codebook, now.codebook)
            for name in names
            if not entries_equal(name, was.codebook, now.codebook)
        },
        _diff_exceptions(was, now, corrections),
    )


def _diff_exceptions(before: EditState, after: EditState, feedback: Mapping[int, Feedback]) -> list[ExceptionDiff]:
    """The exceptions that are of one of two points alone."""
    found = {}
    for one, other, excepted in ((before, after, False), (after, before, True)):
        for exception in one.codebook.exceptions:
            if exception.feedback_id in other.codebook.exceptions:
                continue
            offset = one.memory.offsets[exception.feedback_id]
            sent = feedback.get(offset)
            inputs = "" if sent is None or sent.inputs is UNSET else to_display_text(sent.inputs)
            found[offset] = ExceptionDiff(inputs, exception.except_from, excepted, exception.feedback_id)
    return [found[offset] for offset in sorted(found)]


def _replay_to(settings: Settings, point: HistoryPoint) -> EditState:
    memory = EditMemory()
    seq, until = (None, point) if isinstance(point, datetime) else (point, None)
    codebook = replay_deltas(settings, seq, until, lambda _record, delta, codebook: memory.apply_delta(delta, codebook))
    if codebook is None:
        if point != 0:
            raise HistoryError(f"there are no deltas up to {point}")
        codebook = Codebook(settings.codebook, model="", layer="")  # before the first delta: without an entry
    return EditState(codebook, memory)


def _edited_targets(memory: EditMemory, corrections: Mapping[int, Feedback]) -> dict[Inputs, tuple[str, str]]:
    """By inputs: the target that entries give, and the id of the newest edit that says so."""
    found: dict[Inputs, tuple[str, str]] = {}
    served = [name for name in memory.feedback_ids if memory.serving_entry_id(name) != UNEDITED_MODEL]
    for name in sorted(served, key=lambda name: (memory.offsets[memory.feedback_id_of(name)], name)):
        feedback_id = memory.feedback_id_of(name)
        correction = corrections.get(memory.offsets[feedback_id])
        if correction is None or correction.inputs is UNSET or correction.target is UNSET:
            continue
        texts = {rephrase_name(feedback_id, number): one for number, one in enumerate(correction.rephrases, 1)}
        found[texts.get(name, correction.inputs)] = correction.target, feedback_id
    return found


def _describe_entry_change(entry_id: str, before: Codebook, after: Codebook) -> str:
    if entry_id not in after:
        return "removed"
    change = diff_entry(entry_id, before, after)
    if entry_id not in before:
        return f"new, radius {change.radius:.4g}"
    changed = []
    if change.radius is not UNSET:
        changed.append(f"radius {before.radii_N[before.slot(entry_id)]:.4g} to {change.radius:.4g}")
    if change.value is not UNSET:
        changed.append("another value")
    if change.label is not UNSET:
        changed.append("another target")
    return ", ".join(changed)
