"""Compares two points of a history: inputs whose edited answer differs, entries, and exceptions."""

from collections.abc import Mapping
from datetime import datetime

from msgspec import UNSET, Struct

from gracestream.pipeline.codebook import UNEDITED_MODEL, Codebook, EditMemory, EditState, diff_entry, entries_equal
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history import KafkaHistory
from gracestream.pipeline.replay.replay import replay_deltas
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.deltas import rephrase_name
from gracestream.schemas.messages import Feedback, Inputs, to_display_text


class InputChange(Struct, frozen=True):
    """An input whose edited answer differs: its target before and after; None: the unedited model answers."""

    inputs: str
    before: str | None
    after: str | None
    feedback_id: str


class ExceptionDiff(Struct, frozen=True):
    """An exception that exists at one point only. `excepted`: True if that is the second point."""

    inputs: str
    except_from: str
    excepted: bool
    feedback_id: str


class Diff(Struct, frozen=True):
    """All differences: inputs and exceptions in the order of their feedback, and a description by entry id."""

    inputs: list[InputChange]
    entries: dict[str, str]
    exceptions: list[ExceptionDiff]


HistoryPoint = int | datetime
"""A delta's seq, or a time: the state after its last delta."""


def diff_history(settings: KafkaSettings, codebook: str, before: HistoryPoint, after: HistoryPoint) -> Diff:
    """Compare two points of the history of a codebook. `after` may be the earlier one.

    Raises:
        HistoryError: the log cannot be replayed, or does not reach a point.
    """
    before_state, after_state = (_replay_to(settings, codebook, point) for point in (before, after))
    corrections = KafkaHistory(settings).feedback_since(0)
    before_targets, after_targets = (
        _edited_targets(before_state.memory, corrections),
        _edited_targets(after_state.memory, corrections),
    )
    inputs = []
    for name, (_, feedback_id) in (before_targets | after_targets).items():
        before_target, after_target = before_targets.get(name, (None, ""))[0], after_targets.get(name, (None, ""))[0]
        if before_target != after_target:
            inputs.append(InputChange(to_display_text(name), before_target, after_target, feedback_id))
    names = sorted({*before_state.codebook.entry_ids, *after_state.codebook.entry_ids})
    return Diff(
        inputs,
        {
            name: _describe_entry_change(name, before_state.codebook, after_state.codebook)
            for name in names
            if not entries_equal(name, before_state.codebook, after_state.codebook)
        },
        _diff_exceptions(before_state, after_state, corrections),
    )


def _diff_exceptions(before: EditState, after: EditState, feedback: Mapping[int, Feedback]) -> list[ExceptionDiff]:
    """The exceptions that exist at one of the two points only, in the order of their feedback."""
    diffs = {}
    for present_in, absent_in, excepted in ((before, after, False), (after, before, True)):
        for exception in present_in.codebook.exceptions:
            if exception.feedback_id in absent_in.codebook.exceptions:
                continue
            offset = present_in.memory.offsets[exception.feedback_id]
            correction = feedback.get(offset)
            inputs = "" if correction is None or correction.inputs is UNSET else to_display_text(correction.inputs)
            diffs[offset] = ExceptionDiff(inputs, exception.except_from, excepted, exception.feedback_id)
    return [diffs[offset] for offset in sorted(diffs)]


def _replay_to(settings: KafkaSettings, codebook_name: str, point: HistoryPoint) -> EditState:
    """The codebook and edit memory at a point; empty at delta 0."""
    memory = EditMemory()
    seq, until = (None, point) if isinstance(point, datetime) else (point, None)
    codebook = replay_deltas(settings, seq, until, lambda _record, delta, codebook: memory.apply_delta(delta, codebook))
    if codebook is None:
        if point != 0:
            raise HistoryError(f"there are no deltas up to {point}")
        codebook = Codebook(codebook_name, model="", layer="")  # before the first delta: no entries
    return EditState(codebook, memory)


def _edited_targets(memory: EditMemory, corrections: Mapping[int, Feedback]) -> dict[Inputs, tuple[str, str]]:
    """By input: the target that an entry answers, and the id of the newest edit with that input."""
    targets: dict[Inputs, tuple[str, str]] = {}
    served_by_entries = [name for name in memory.feedback_ids if memory.serving_entry_id(name) != UNEDITED_MODEL]
    for name in sorted(served_by_entries, key=lambda name: (memory.offsets[memory.feedback_id_of(name)], name)):
        feedback_id = memory.feedback_id_of(name)
        correction = corrections.get(memory.offsets[feedback_id])
        if correction is None or correction.inputs is UNSET or correction.target is UNSET:
            continue
        rephrases = {
            rephrase_name(feedback_id, number): rephrase for number, rephrase in enumerate(correction.rephrases, 1)
        }
        targets[rephrases.get(name, correction.inputs)] = correction.target, feedback_id
    return targets


def _describe_entry_change(entry_id: str, before: Codebook, after: Codebook) -> str:
    """What changed of an entry, in words."""
    if entry_id not in after:
        return "removed"
    change = diff_entry(entry_id, before, after)
    if entry_id not in before:
        return f"new, radius {change.radius:.4g}"
    descriptions = []
    if change.radius is not UNSET:
        descriptions.append(f"radius {before.radii_N[before.slot(entry_id)]:.4g} to {change.radius:.4g}")
    if change.value is not UNSET:
        descriptions.append("another value")
    if change.label is not UNSET:
        descriptions.append("another target")
    return ", ".join(descriptions)
