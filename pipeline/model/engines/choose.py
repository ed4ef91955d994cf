"""The choice of an engine for a model."""

from collections.abc import Callable
from typing import Literal

import torch

from gracestream.pipeline.codebook import CodebookLookup
from gracestream.pipeline.device import raise_if_device_lost
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.engines.base import AnswerEngine, R, describe_failure
from gracestream.pipeline.model.engines.batch import BatchEngine
from gracestream.pipeline.model.engines.continuous import ContinuousEngine
from gracestream.pipeline.model.engines.row_cache import RowCache
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.tasks.base import InputError
from gracestream.pipeline.model.tasks.causal import CausalGeneration

EngineName = Literal["auto", "batch", "continuous"]
"""An engine, or `auto`: continuous for every model that supports it."""

MAX_PROBE_ERROR = 1e-3
MAX_PROBE_ERROR_16_BIT = 0.04
"""The largest difference of a probe's logits, as a share of the largest logit; for float32, and for 16-bit dtypes.

Measured with SmolLM2 on twelve probe texts: rounding makes at most 9e-7 (float32) and 0.013 (bfloat16). A missing mask
makes at least 0.061, and positions that are off by one at least 0.086.
"""


def make_engine(
    name: EngineName,
    model: EditableModel,
    lookup: CodebookLookup,
    *,
    max_rows: int,
    check_answers: bool,
    on_fallback: Callable[[str], None],
) -> AnswerEngine[R]:
    """The engine of a replica.

    Args:
        name: The engine.
        model: The model.
        lookup: Finds the entries that serve requests.
        max_rows: Requests in the model at one time, at most.
        check_answers: As for `EditableModel.answer`.
        on_fallback: Called with the reason if `auto` takes the batch engine for a causal language model.

    Raises:
        UserError: the continuous engine is asked for, and the model does not support it.
    """
    fault = "it is not a causal language model"
    if name != "batch" and isinstance(model.task, CausalGeneration):
        fault = continuous_fault(model, model.task)
        if not fault:
            return ContinuousEngine(model, lookup, max_rows=max_rows, check_answers=check_answers)
        if name == "auto":
            on_fallback(fault)
    if name == "continuous":
        raise UserError(f"the model does not support GRACESTREAM_ENGINE=continuous: {fault}; set it to auto or batch")
    return BatchEngine(model, lookup, max_rows=max_rows, check_answers=check_answers)


def continuous_fault(model: EditableModel, task: CausalGeneration) -> str:
    """Why a model cannot decode rows of different ages together; empty if it can.

    Two prompts are cached one after the other, and their next tokens decoded together. The logits must be those of
    each prompt alone, without a cache.
    """
    try:
        tokens_T = task.tokenize(PROBE_TEXTS[0]).token_ids
    except InputError:  # the limits leave no room for it
        tokens_T = tuple(range(1, min(4, task.vocabulary_size)))
    prompts = [Prompt(tokens_T[: len(tokens_T) // 2 + 1]), Prompt(tokens_T)]
    tokens = [prompt.token_ids[0] for prompt in prompts]
    try:
        with torch.inference_mode():
            rows = RowCache()
            for prompt in prompts:
                rows.append(model.prefill([prompt], None).cache, [len(prompt)])
            rows.begin_step()
            decoded_RC = task.decode(tokens, rows.mask_RT(), rows.positions_R1(), rows.cache)
            alone = [
                model.prefill([Prompt((*prompt.token_ids, token))], None).logits_BC[0]
                for prompt, token in zip(prompts, tokens, strict=True)
            ]
    except Exception as error:  # noqa: BLE001  (models fail in their own ways, such as without a cache)
        raise_if_device_lost(error)
        return f"its keys and values cannot be cached by row ({describe_failure(error)})"
    alone_RC = torch.stack(alone)
    difference = float((decoded_RC - alone_RC).abs().max() / alone_RC.abs().max())
    allowed = MAX_PROBE_ERROR if model.module.dtype == torch.float32 else MAX_PROBE_ERROR_16_BIT
    return (
        ""
        if difference <= allowed
        else f"rows of different lengths affect each other (logits differ by {difference:.1%})"
    )
