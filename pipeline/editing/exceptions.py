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

from gracestream.pipeline.codebook import BARE_MODEL, same_request
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import Edited, rejected
from gracestream.pipeline.editing.roles import why_not_propose
from gracestream.pipeline.model import MARK, InputError
from gracestream.pipeline.search import exact_distance
from gracestream.pipeline.wording import ELLIPSIS
from gracestream.schemas.deltas import Cause, ExceptionChange, Standing, Tensor, rephrase_name
from gracestream.schemas.messages import MAX_REPHRASES, VERSION, Feedback, Outcome, one_line

ROOM = 2
"""In units of noise: two batches may move a query apart by so much."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no new exception: this feedback made it already (`unchanged`), or it cannot be one."""

    status: Literal["unchanged", "rejected"]
    reason: str


def except_from(engine: EditEngine, feedback: Feedback, offset: int, standing: Standing | UnsetType = UNSET) -> Edited:
    """Decide on one exception; nothing changes before the engine applies the record.

    `standing` says what its sender is allowed (`pipeline.editing.roles`).
    """
    if (forbidden := why_not_propose(feedback, standing)) is not None:
        return rejected(feedback, forbidden)
    assert feedback.inputs is not UNSET
    assert feedback.except_from is not UNSET
    try:
        prompt = engine.model.task.tokenize(feedback.inputs)
        query_D = engine.model.queries([prompt])[0].cpu().numpy()
    except InputError as error:
        return rejected(feedback, one_line(error), invalid=True)
    if not np.isfinite(query_D).all():
        return rejected(feedback, "the model's activations on this input are not finite")
    wording = engine.model.task.wording(prompt) if engine.plan.wording else ""
    found = exception_for(engine, feedback.feedback_id, feedback.except_from, query_D, wording)
    if isinstance(found, Refusal):
        return _refused(feedback, found)
    if (taken := _id_taken(engine, feedback)) is not None:
        return rejected(feedback, taken)
    cause = Cause(
        feedback_id=feedback.feedback_id,
        offset=offset,
        author=feedback.author,
        query=Tensor.of(query_D),
        wording=wording,
        standing=standing,
    )
    outcome = Outcome(v=VERSION, feedback_id=feedback.feedback_id, status="excepted")
    return engine.publish(feedback, outcome, "except", exceptions=(found,), cause=cause)


def _refused(feedback: Feedback, refusal: Refusal) -> Edited:
    if refusal.status == "rejected":
        return rejected(feedback, refusal.reason)
    return Edited(Outcome(v=VERSION, feedback_id=feedback.feedback_id, status="unchanged", reason=refusal.reason))


def _id_taken(engine: EditEngine, feedback: Feedback) -> str | None:
    """Why feedback cannot have its id; None where it can."""
    if (earlier := engine.memory.offsets.get(feedback.feedback_id)) is not None:
        return f"its id was used at offset {earlier}; an exception needs an id of its own"
    return engine.why_not_named(feedback)


def exception_for(
    engine: EditEngine, feedback_id: str, edit: str, query_D: np.ndarray, wording: str
) -> ExceptionChange | Refusal:
    """The exception of prompts with this query and wording from an edit, as the codebook is now."""
    noise, entry_ids = engine.noise(query_D), _entries(engine, edit)
    known = engine.codebook.exceptions.get(feedback_id)
    if known is not None and known in engine.codebook.exceptions.near(query_D, wording, -noise):
        return Refusal("unchanged", "it is an exception already, by this feedback")
    radius = ROOM * noise + (_spellings(engine) if wording else 0.0)
    why_not = _why_not(engine, edit, entry_ids, query_D, wording) or _made_for(
        engine, entry_ids, query_D, wording, radius
    )
    if why_not is not None:
        return Refusal("rejected", why_not)
    return ExceptionChange(
        feedback_id=feedback_id,
        except_from=edit,
        entry_ids=entry_ids,
        query=Tensor.of(query_D),
        radius=float(np.float32(radius)),
        wording=wording,
    )


def _entries(engine: EditEngine, edit: str) -> tuple[str, ...]:
    """The entries of the edit that an id names, be it that of a correction, of a rephrase's key, or of an entry."""
    memory, codebook = engine.memory, engine.codebook
    owner = memory.feedback_of(edit)
    keys = [rephrase_name(owner, number) for number in range(1, MAX_REPHRASES + 1)]
    names = [owner, *(key for key in keys if memory.owners.get(key) == owner)]
    serving = [memory.serving_entry(name) for name in names if name in memory]
    found = [name for name in (*names, *serving) if name != BARE_MODEL and name in codebook]
    return tuple(dict.fromkeys(found))


def _spellings(engine: EditEngine) -> float:
    """How far apart two spellings of one request lie at most, where the encoder makes the same of both."""
    return 2 * MARK if engine.model.reads_text else 0.0


def _why_not(
    engine: EditEngine, edit: str, entry_ids: Collection[str], query_D: np.ndarray, wording: str
) -> str | None:
    """Why an edit cannot answer a prompt, so that there is nothing to be excepted from it; None where it may."""
    codebook, room = engine.codebook, ROOM * engine.noise(query_D)
    if not entry_ids:
        return (
            f"no edit {edit!r} is in force; `except_from` names a correction, or the entry that a prediction names in"
            " `edit` or `near_miss`"
        )
    (match,) = engine.lookup.matches(torch.from_numpy(query_D.copy())[None], lambda _row: wording)
    if match is not None and match.entry_id in entry_ids:
        return None
    slots = [codebook.slot(entry_id) for entry_id in entry_ids]
    distances = [exact_distance(query_D, codebook.keys_ND[slot]) for slot in slots]
    if any(far < codebook.radii_N[slot] + room for far, slot in zip(distances, slots, strict=True)):
        return None
    distance, slot = min(zip(distances, slots, strict=True))
    return (
        f"the edit {edit!r} does not reach these inputs: its nearest key lies {distance:.4g} away, and has the radius"
        f" {codebook.radii_N[slot]:.4g}"
    )


def _made_for(
    engine: EditEngine, entry_ids: Collection[str], query_D: np.ndarray, wording: str, radius: float
) -> str | None:
    """Why an exception would hold for a prompt that these entries were made for; None where it would not."""
    memory, noise = engine.memory, engine.noise(query_D)
    for name in sorted(memory.same_input(query_D, radius + ROOM * noise)):
        corrected = memory.wording(name).removeprefix(ELLIPSIS)
        other = bool(corrected) and not same_request(wording.removeprefix(ELLIPSIS), corrected)
        if other or memory.serving_entry(name) not in entry_ids:
            continue
        owner, distance = memory.feedback_of(name), exact_distance(query_D, memory.query(name))
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
