"""Exceptions: a prompt that an edit answers, or nearly does, and is not to answer any more (design, section 4).

1. An exception is of one edit: of every entry that bears its correction's name or its rephrases', or serves them.
2. It holds for the same prompt: the same query, within the noise of batches. An encoder that does not read capitals
   makes one point of several spellings, so there it holds for other white space and capitals, too.
3. It never holds for a prompt that the edit was made for: such an exception is rejected, and a later correction of the
   prompt ends it.
4. New radii keep clear of it, as of an input that the unedited model answers rightly. So no copy of the entry, as the
   guard makes them, answers it.

An exception goes with its entries: an undo of the correction takes it along, and an undo of that undo brings it back.
A new value for an entry leaves its exceptions as they are.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import UNEDITED_MODEL, is_same_request
from gracestream.pipeline.editing.delta_builder import build_result
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import EditResult, rejected_result
from gracestream.pipeline.editing.roles import explain_propose_denial
from gracestream.pipeline.model import PROMPT_HASH_NORM, InputError
from gracestream.pipeline.search import exact_distance
from gracestream.pipeline.wording import ELLIPSIS
from gracestream.schemas.deltas import Cause, ExceptionChange, Standing, Tensor, rephrase_name
from gracestream.schemas.messages import MAX_REPHRASES, SCHEMA_VERSION, Feedback, Outcome, to_one_line

TOLERANCE_FACTOR = 2
"""In units of noise: two batches may move a query apart by so much."""


@dataclass(frozen=True, slots=True)
class ExceptionRefusal:
    """Why there is no new exception: this feedback made it already (`unchanged`), or it cannot be one."""

    status: Literal["unchanged", "rejected"]
    reason: str


def decide_exception(
    engine: EditEngine, feedback: Feedback, offset: int, standing: Standing | UnsetType = UNSET
) -> EditResult:
    """Decide on one exception; nothing changes before the engine applies the record.

    `standing` says what its sender is allowed (`pipeline.editing.roles`).
    """
    if (forbidden := explain_propose_denial(feedback, standing)) is not None:
        return rejected_result(feedback, forbidden)
    assert feedback.inputs is not UNSET
    assert feedback.except_from is not UNSET
    try:
        prompt = engine.model.task.tokenize(feedback.inputs)
        query_D = engine.model.queries([prompt])[0].cpu().numpy()
    except InputError as error:
        return rejected_result(feedback, to_one_line(error), is_dead_letter=True)
    if not np.isfinite(query_D).all():
        return rejected_result(feedback, "the model's activations on this input are not finite")
    wording = engine.model.task.wording(prompt) if engine.config.wording else ""
    found = build_exception(engine, feedback.feedback_id, feedback.except_from, query_D, wording)
    if isinstance(found, ExceptionRefusal):
        return _refusal_result(feedback, found)
    if (taken := _find_id_conflict(engine, feedback)) is not None:
        return rejected_result(feedback, taken)
    cause = Cause(
        feedback_id=feedback.feedback_id,
        offset=offset,
        author=feedback.author,
        query=Tensor.from_array(query_D),
        wording=wording,
        standing=standing,
    )
    outcome = Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="excepted")
    return build_result(engine.codebook, feedback, outcome, "except", exceptions=(found,), cause=cause)


def _refusal_result(feedback: Feedback, refusal: ExceptionRefusal) -> EditResult:
    if refusal.status == "rejected":
        return rejected_result(feedback, refusal.reason)
    return EditResult(
        Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="unchanged", reason=refusal.reason)
    )


def _find_id_conflict(engine: EditEngine, feedback: Feedback) -> str | None:
    """Why feedback cannot have its id; None where it can."""
    if (earlier := engine.memory.offsets.get(feedback.feedback_id)) is not None:
        return f"its id was used at offset {earlier}; an exception needs an id of its own"
    return engine.find_id_conflict(feedback)


def build_exception(
    engine: EditEngine, feedback_id: str, edit_id: str, query_D: np.ndarray, wording: str
) -> ExceptionChange | ExceptionRefusal:
    """The exception of prompts with this query and wording from an edit, as the codebook is now."""
    noise, entry_ids = engine.tolerance(query_D), _entries_of_edit(engine, edit_id)
    known = engine.codebook.exceptions.get(feedback_id)
    if known is not None and known in engine.codebook.exceptions.find_matching(query_D, wording, -noise):
        return ExceptionRefusal("unchanged", "it is an exception already, by this feedback")
    radius = TOLERANCE_FACTOR * noise + (_spelling_distance(engine) if wording else 0.0)
    why_not = _explain_unreachable(engine, edit_id, entry_ids, query_D, wording) or _find_correction_conflict(
        engine, entry_ids, query_D, wording, radius
    )
    if why_not is not None:
        return ExceptionRefusal("rejected", why_not)
    return ExceptionChange(
        feedback_id=feedback_id,
        except_from=edit_id,
        entry_ids=entry_ids,
        query=Tensor.from_array(query_D),
        radius=float(np.float32(radius)),
        wording=wording,
    )


def _entries_of_edit(engine: EditEngine, edit_id: str) -> tuple[str, ...]:
    """The entries of the edit that an id names, be it that of a correction, of a rephrase's key, or of an entry."""
    memory, codebook = engine.memory, engine.codebook
    owner = memory.feedback_id_of(edit_id)
    keys = [rephrase_name(owner, number) for number in range(1, MAX_REPHRASES + 1)]
    names = [owner, *(key for key in keys if memory.rephrase_owners.get(key) == owner)]
    serving = [memory.serving_entry_id(name) for name in names if name in memory]
    found = [name for name in (*names, *serving) if name != UNEDITED_MODEL and name in codebook]
    return tuple(dict.fromkeys(found))


def _spelling_distance(engine: EditEngine) -> float:
    """How far apart two spellings of one request lie at most, where the encoder makes the same of both."""
    return 2 * PROMPT_HASH_NORM if engine.model.reads_text else 0.0


def _explain_unreachable(
    engine: EditEngine, edit_id: str, entry_ids: Collection[str], query_D: np.ndarray, wording: str
) -> str | None:
    """Why an edit cannot answer a prompt, so that there is nothing to be excepted from it; None where it may."""
    codebook, room = engine.codebook, TOLERANCE_FACTOR * engine.tolerance(query_D)
    if not entry_ids:
        return (
            f"no edit {edit_id!r} is in force; `decide_exception` names a correction, or the entry that a"
            " prediction names in"
            " `edit` or `near_miss`"
        )
    (match,) = engine.lookup.find_hits(torch.from_numpy(query_D.copy())[None], lambda _row: wording)
    if match is not None and match.entry_id in entry_ids:
        return None
    slots = [codebook.slot(entry_id) for entry_id in entry_ids]
    distances = [exact_distance(query_D, codebook.keys_ND[slot]) for slot in slots]
    if any(far < codebook.radii_N[slot] + room for far, slot in zip(distances, slots, strict=True)):
        return None
    distance, slot = min(zip(distances, slots, strict=True))
    return (
        f"the edit {edit_id!r} does not reach these inputs: its nearest key lies {distance:.4g} away, and has the"
        " radius"
        f" {codebook.radii_N[slot]:.4g}"
    )


def _find_correction_conflict(
    engine: EditEngine, entry_ids: Collection[str], query_D: np.ndarray, wording: str, radius: float
) -> str | None:
    """Why an exception would hold for a prompt that these entries were made for; None where it would not."""
    memory, noise = engine.memory, engine.tolerance(query_D)
    for name in sorted(memory.edits_of_input(query_D, radius + TOLERANCE_FACTOR * noise)):
        corrected = memory.wording(name).removeprefix(ELLIPSIS)
        other = bool(corrected) and not is_same_request(wording.removeprefix(ELLIPSIS), corrected)
        if other or memory.serving_entry_id(name) not in entry_ids:
            continue
        owner, distance = memory.feedback_id_of(name), exact_distance(query_D, memory.query(name))
        if wording or distance <= noise:
            return (
                f"feedback {owner!r} corrected these very inputs; undo it (`gracestream undo {owner}`), or correct the"
                " inputs anew"
            )
        return (
            f"feedback {owner!r} corrected inputs that lie {distance:.3g} away, and in {engine.model.query_dtype}"
            " inputs that near are not told apart; correct these inputs instead"
        )
    return None
