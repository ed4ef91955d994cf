"""The draft phase: find a value that makes the model predict the target of a correction, or explain why none was found.

A value is trained alone when its correction is decided on, or before that in one batch with other corrections
(`train_group`). Both start from the same point. A batch changes the result by rounding only, so a value from a batch is
checked once more on its own (`find_value`).

Not promised: that a value exists. The last tokens of a target may lie beyond the reach of the edited layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import Label
from gracestream.pipeline.editing.candidate import DraftValue, EditCandidate, Inspection
from gracestream.pipeline.editing.rephrases import make_training_texts
from gracestream.pipeline.editing.value_training import TrainedValue, train_further, train_value, train_values
from gracestream.pipeline.editing.workspace import EditWorkspace
from gracestream.pipeline.model import Seq2SeqGeneration, is_in_decoder
from gracestream.schemas.messages import Feedback

FORM_BATCH_SIZE = 4
"""Corrections whose values are trained further on their forms in one batch.

Each brings up to `forms.MAX_FORM_TOKENS` tokens, so this bounds the memory of a pass.
"""

SHORT_TARGET_TOKENS = 8
"""Tokens of a short target. A failed training suggests a shorter target only above this length."""


def warm_start_entry(workspace: EditWorkspace, label: Label, query_D: np.ndarray) -> str | UnsetType:
    """The entry whose value is the starting point of a new one: with `value_init=label`, the nearest of the same label.

    UNSET without such an entry, or with another `value_init`. Of equally near entries the first by id is taken.
    """
    codebook = workspace.codebook
    if workspace.config.value_init != "label" or label not in codebook.labels:
        return UNSET
    rows = [row for row, other in enumerate(codebook.labels) if other == label]
    distances = np.linalg.norm(codebook.keys_ND[rows] - query_D, axis=1).tolist()
    return min(zip(distances, (codebook.entry_ids[row] for row in rows), strict=True))[1]


def start_value(workspace: EditWorkspace, candidate: EditCandidate) -> torch.Tensor:
    """The starting point (V) of a candidate's value; the entry that it comes from is noted in the decision context."""
    candidate.context_recorder.start_entry = warm_start_entry(workspace, candidate.inspection.label, candidate.query_D)
    if candidate.context_recorder.start_entry is UNSET:
        return _cold_start_value(workspace, candidate.offset, candidate.inspection.layer_output_V)
    codebook = workspace.codebook
    return torch.from_numpy(codebook.values_NV[codebook.slot(candidate.context_recorder.start_entry)].copy())


def find_value(
    workspace: EditWorkspace, candidate: EditCandidate, start_V: torch.Tensor
) -> tuple[EditCandidate, TrainedValue]:
    """The candidate's draft if it predicts the target on its own too, else a value trained alone from `start_V`.

    The second case also returns the candidate without its draft: the delta must not name a batch that gave no value.
    """
    trained = None if candidate.draft is None else _verified_draft(workspace, candidate, candidate.draft.trained)
    if trained is None:
        candidate = replace(candidate, draft=None)
        trained = train_value(
            workspace.model.suffix_runner, candidate.inspection.suffix, start_V, workspace.config.recipe
        )
    return candidate, trained


def train_group(
    workspace: EditWorkspace,
    corrections: Sequence[tuple[Feedback, int, Inspection]],
    heartbeat: Callable[[], object] = lambda: None,
) -> dict[int, DraftValue]:
    """Train values for inspected corrections in one batch; returns drafts by feedback offset.

    Values that converge are then trained further on the forms of their corrections (`pipeline.editing.forms`).

    Args:
        workspace: The model and the training configuration.
        corrections: Feedback, its offset and its inspection. The order matters for reproducing the same bits.
        heartbeat: Called at each training step.
    """
    offsets = tuple(offset for _, offset, _ in corrections)
    suffix_runner, recipe = workspace.model.suffix_runner, workspace.config.recipe
    suffix = suffix_runner.suffix_of([inspection.target_pass for *_, inspection in corrections])
    starts = [_cold_start_value(workspace, offset, inspection.layer_output_V) for _, offset, inspection in corrections]
    values = train_values(suffix_runner, suffix, starts, recipe, heartbeat)
    texts_N = [
        make_training_texts(workspace, feedback, inspection, value)
        for (feedback, _, inspection), value in zip(corrections, values, strict=True)
    ]
    with_forms = [row for row, texts in enumerate(texts_N) if texts.form_passes and texts.trained.converged]
    for start in range(0, len(with_forms), FORM_BATCH_SIZE):
        rows = with_forms[start : start + FORM_BATCH_SIZE]
        further = train_further(suffix_runner, [texts_N[row] for row in rows], recipe, heartbeat)
        for row, value in zip(rows, further, strict=True):
            values[row] = value
    return {
        offset: DraftValue(value, offsets, inspection)
        for (_, offset, inspection), value in zip(corrections, values, strict=True)
    }


def explain_failed_training(workspace: EditWorkspace, inspection: Inspection, trained: TrainedValue) -> str:
    """Why training found no value, and which setting or target to change."""
    model, recipe = workspace.model, workspace.config.recipe
    if not math.isfinite(trained.target_check.loss):
        return (
            f"no value was found: training diverged after {trained.steps} steps; lower GRACESTREAM_LEARNING_RATE,"
            f" which is {recipe.learning_rate:g}"
        )
    reason = f"no value was found in {trained.steps} steps; the loss is still {trained.target_check.loss:.3g}"
    tokens = len(inspection.label)
    influenced = model.suffix_runner.tokens_influenced(inspection.suffix, torch.from_numpy(trained.value_V))
    if influenced == tokens:
        # An encoder layer runs over all tokens of the input, so replacing more of them gives the value more influence.
        can_replace_all = isinstance(model.task, Seq2SeqGeneration) and not is_in_decoder(model.layer)
        replace_all = (
            ", set GRACESTREAM_INJECT_TOKENS=all" if can_replace_all and model.adaptor.replace == "last" else ""
        )
        shorter = " or give a shorter target" if tokens > SHORT_TARGET_TOKENS else ""
        return (
            f"{reason}; raise GRACESTREAM_MAX_STEPS, which is {recipe.max_steps}{replace_all}, edit another layer"
            f" (`gracestream layers`){shorter}"
        )
    return f"{reason}; at this layer a value reaches {influenced} of the target's {tokens} tokens: edit an earlier one"


def _verified_draft(workspace: EditWorkspace, candidate: EditCandidate, trained: TrainedValue) -> TrainedValue | None:
    """A value from a batch with its check repeated on the candidate alone; None if it fails there."""
    if not trained.converged:
        return None
    check = workspace.model.suffix_runner.check_value(candidate.inspection.suffix, torch.from_numpy(trained.value_V))
    return replace(trained, target_check=check) if check.predicts_target else None


def _cold_start_value(workspace: EditWorkspace, offset: int, layer_output_V: torch.Tensor) -> torch.Tensor:
    """The start of a value that starts from no entry: the layer's own output, or random with `value_init=random`."""
    if workspace.config.value_init != "random":
        return layer_output_V
    # A generator of its own, seeded by the offset: the same feedback starts from the same numbers in every process.
    generator = torch.Generator().manual_seed(workspace.config.seed * 1_000_003 + offset)
    return torch.rand(layer_output_V.shape, generator=generator)
