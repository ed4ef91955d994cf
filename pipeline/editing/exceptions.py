"""Exceptions: prompts within the radius of an edit that the edit must not answer (docs/explanation/method.md).

1. An exception belongs to one edit. It covers each entry named after the correction or its rephrases, and each entry
   that serves one of these.
2. It holds for one prompt: queries equal within the numerical tolerance. An encoder that ignores capitals maps several
   spellings to almost one query. There the exception also holds for other white space and capitals.
3. It never holds for a prompt that the edit corrected. Such an exception is rejected, and a later correction of the
   prompt ends it.
4. New radii keep clear of it, as of a confirmed input. So no retention entry, a copy of the edit's entry, answers it.
5. It shares the fate of its entries: an undo of the correction removes it, and an undo of that undo restores it. A new
   value for an entry leaves its exceptions in place.

Not promised: an answer of the unedited model. An entry of another edit may serve the prompt.
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
from gracestream.pipeline.editing.result import DecisionResult, rejected_result
from gracestream.pipeline.editing.roles import explain_propose_denial
from gracestream.pipeline.model import PROMPT_HASH_NORM, InputError
from gracestream.pipeline.search import exact_distance
from gracestream.pipeline.wording import ELLIPSIS
from gracestream.schemas.deltas import Cause, ExceptionChange, Standing, Tensor, rephrase_name
from gracestream.schemas.messages import MAX_REPHRASES, SCHEMA_VERSION, Feedback, Outcome, to_one_line

TOLERANCE_FACTOR = 2
"""Distance, in tolerances, that two queries of one input may have: each batch moves a query by up to one."""


@dataclass(frozen=True, slots=True)
class NoNewException:
    """The reason why there is no new exception.

    Attributes:
        status: `unchanged` if this feedback made the exception before, else `rejected`.
        reason: The text for the outcome.
    """

    status: Literal["unchanged", "rejected"]
    reason: str


def decide_exception(
    engine: EditEngine, feedback: Feedback, offset: int, standing: Standing | UnsetType = UNSET
) -> DecisionResult:
    """Decide on one exception; nothing changes before the engine applies the record.

    Args:
        engine: The engine at the end of the log.
        feedback: The exception.
        offset: The offset of `feedback` in its topic.
        standing: The sender's permissions (`pipeline.editing.roles`); UNSET without a list of authors.
    """
    if (denial := explain_propose_denial(feedback, standing)) is not None:
        return rejected_result(feedback, denial)
    assert feedback.inputs is not UNSET
    assert feedback.except_from is not UNSET
    try:
        prompt = engine.model.task.tokenize(feedback.inputs)
        query_D = engine.model.queries([prompt])[0].cpu().numpy()
    except InputError as error:
        return rejected_result(feedback, to_one_line(error), is_dead_letter=True)
    if not np.isfinite(query_D).all():
        return rejected_result(feedback, "the model's activations on this input are not finite")
    wording = engine.model.task.wording(prompt) if engine.config.check_wording else ""
    # Before the check of the id: the same exception sent again is unchanged, not an error.
    exception = build_exception(engine, feedback.feedback_id, feedback.except_from, query_D, wording)
    if isinstance(exception, NoNewException):
        return _result_without_exception(feedback, exception)
    if (id_conflict := _find_id_conflict(engine, feedback)) is not None:
        return rejected_result(feedback, id_conflict)
    cause = Cause(
        feedback_id=feedback.feedback_id,
        offset=offset,
        author=feedback.author,
        query=Tensor.from_array(query_D),
        wording=wording,
        standing=standing,
    )
    outcome = Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="excepted")
    return build_result(engine.codebook, feedback, outcome, "except", exceptions=(exception,), cause=cause)


def _result_without_exception(feedback: Feedback, rejection: NoNewException) -> DecisionResult:
    if rejection.status == "rejected":
        return rejected_result(feedback, rejection.reason)
    return DecisionResult(
        Outcome(v=SCHEMA_VERSION, feedback_id=feedback.feedback_id, status="unchanged", reason=rejection.reason)
    )


def _find_id_conflict(engine: EditEngine, feedback: Feedback) -> str | None:
    """Why this feedback cannot have its id, or None."""
    if (earlier := engine.memory.offsets.get(feedback.feedback_id)) is not None:
        return f"its id was used at offset {earlier}; an exception needs an id of its own"
    return engine.find_id_conflict(feedback)


def build_exception(
    engine: EditEngine, feedback_id: str, edit_id: str, query_D: np.ndarray, wording: str
) -> ExceptionChange | NoNewException:
    """The exception from an edit for a prompt with this query and wording, for the current codebook.

    Args:
        engine: The codebook, its lookup and its edits.
        feedback_id: The feedback that asks for the exception.
        edit_id: The id of a correction, of a rephrase's key, or of an entry.
        query_D: The query (D) of the prompt.
        wording: The wording of the prompt; empty if none is compared.
    """
    tolerance, entry_ids = engine.tolerance(query_D), _entries_of_edit(engine, edit_id)
    known = engine.codebook.exceptions.get(feedback_id)
    # A query one tolerance inside the radius of the known exception lies within that radius in every batch.
    if known is not None and known in engine.codebook.exceptions.find_matching(query_D, wording, -tolerance):
        return NoNewException("unchanged", "it is an exception already, by this feedback")
    radius = TOLERANCE_FACTOR * tolerance + (_spelling_distance(engine) if wording else 0.0)
    rejection = _explain_unreachable(engine, edit_id, entry_ids, query_D, wording) or _find_correction_conflict(
        engine, entry_ids, query_D, wording, radius
    )
    if rejection is not None:
        return NoNewException("rejected", rejection)
    return ExceptionChange(
        feedback_id=feedback_id,
        except_from=edit_id,
        entry_ids=entry_ids,
        query=Tensor.from_array(query_D),
        radius=float(np.float32(radius)),
        wording=wording,
    )


def _entries_of_edit(engine: EditEngine, edit_id: str) -> tuple[str, ...]:
    """The entries of an edit, by the id of its correction, of a rephrase's key, or of an entry; each entry once."""
    memory, codebook = engine.memory, engine.codebook
    owner = memory.feedback_id_of(edit_id)
    keys = [rephrase_name(owner, number) for number in range(1, MAX_REPHRASES + 1)]
    names = [owner, *(key for key in keys if memory.rephrase_owners.get(key) == owner)]
    serving = [memory.serving_entry_id(name) for name in names if name in memory]
    entry_ids = [name for name in (*names, *serving) if name != UNEDITED_MODEL and name in codebook]
    return tuple(dict.fromkeys(entry_ids))


def _spelling_distance(engine: EditEngine) -> float:
    """The largest distance between two spellings of one request that the encoder reads alike; 0 for other queries.

    Such queries differ by their prompt hashes only, two vectors of norm `PROMPT_HASH_NORM`.
    """
    return 2 * PROMPT_HASH_NORM if engine.model.reads_text else 0.0


def _explain_unreachable(
    engine: EditEngine, edit_id: str, entry_ids: Collection[str], query_D: np.ndarray, wording: str
) -> str | None:
    """Why these entries of an edit cannot answer a prompt, so that an exception is pointless; None if they may."""
    codebook, slack = engine.codebook, TOLERANCE_FACTOR * engine.tolerance(query_D)
    if not entry_ids:
        return (
            f"no edit {edit_id!r} is in force; `except_from` names a correction, or the entry that a prediction names"
            " in `edit` or `near_miss`"
        )
    # The lookup skips an exempt entry. The exception in force shows that the edit reaches the prompt.
    in_force = codebook.exceptions.find_matching(query_D, wording, tolerance=0.0)
    if any(entry_id in entry_ids for exception in in_force for entry_id in exception.entry_ids):
        return None
    (found,) = engine.lookup.find_entries(torch.from_numpy(query_D.copy())[None], lambda _row: wording)
    if found is not None and found.entry_id in entry_ids:
        return None
    slots = [codebook.slot(entry_id) for entry_id in entry_ids]
    distances = [exact_distance(query_D, codebook.keys_ND[slot]) for slot in slots]
    if any(distance < codebook.radii_N[slot] + slack for distance, slot in zip(distances, slots, strict=True)):
        return None
    distance, slot = min(zip(distances, slots, strict=True))
    return (
        f"the edit {edit_id!r} does not reach these inputs: its nearest key lies {distance:.4g} away, and has the"
        f" radius {codebook.radii_N[slot]:.4g}"
    )


def _find_correction_conflict(
    engine: EditEngine, entry_ids: Collection[str], query_D: np.ndarray, wording: str, radius: float
) -> str | None:
    """Why an exception with this radius would hold for a prompt that an edit of these entries corrected, or None."""
    memory, tolerance = engine.memory, engine.tolerance(query_D)
    for name in sorted(memory.edits_of_input(query_D, radius + TOLERANCE_FACTOR * tolerance)):
        corrected = memory.wording(name).removeprefix(ELLIPSIS)
        # A wording with an ellipsis is an excerpt of its prompt; here only the request itself is compared.
        is_other_request = bool(corrected) and not is_same_request(wording.removeprefix(ELLIPSIS), corrected)
        if is_other_request or memory.serving_entry_id(name) not in entry_ids:
            continue
        owner, distance = memory.feedback_id_of(name), exact_distance(query_D, memory.query(name))
        if wording or distance <= tolerance:
            return (
                f"feedback {owner!r} corrected these very inputs; undo it (`gracestream undo {owner}`), or correct the"
                " inputs anew"
            )
        return (
            f"feedback {owner!r} corrected inputs that lie {distance:.3g} away, and in {engine.model.query_dtype}"
            " inputs that near are not distinguished; correct these inputs instead"
        )
    return None
