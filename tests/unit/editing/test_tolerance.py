"""The noise of queries is measured, and is covered by the tolerance."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gracestream.pipeline.editing.tolerance import measure_query_noise
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from tests.support.tiny_models import LIMITS, MODEL, editable


def in_dtype(model: EditableModel, dtype: torch.dtype) -> EditableModel:
    module = editable("llama").module.to(dtype)
    return EditableModel(module, model.task.tokenizer, model.layer, limits=LIMITS, fingerprint=MODEL)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_tolerance_of_each_dtype_covers_what_batches_and_padding_do(dtype: str) -> None:
    found = measure_query_noise(in_dtype(editable("llama"), getattr(torch, dtype)))
    assert (found.dtype, found.devices, found.inputs) == (dtype, ("cpu",), len(PROBE_TEXTS))
    assert found.of_tolerance <= 1


def test_noise_between_two_models_is_that_of_their_queries_of_one_input() -> None:
    """Here the second is off by a known part, as a device whose kernels round otherwise would be by less."""
    editor, replica = editable("llama"), editable("llama")
    alone = measure_query_noise(editor)
    with torch.no_grad():
        replica.module.model.layers[1].mlp.up_proj.weight *= 1.01
    between = measure_query_noise(editor, replica, inputs=PROBE_TEXTS[:8])
    assert between.devices == ("cpu", "cpu")
    assert between.relative == pytest.approx(0.01, rel=1e-3)
    assert between.of_tolerance > 1 > alone.of_tolerance
    assert between.absolute > 100 * alone.absolute


def test_a_query_that_is_no_number_is_no_small_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = editable("llama")
    queries = model.queries

    def broken(prompts: Sequence[Prompt]) -> torch.Tensor:
        found = queries(prompts).clone()
        for row, prompt in enumerate(prompts):
            if prompt == model.task.tokenize(PROBE_TEXTS[5]):
                found[row] = torch.nan
        return found

    monkeypatch.setattr(model, "queries", broken)
    assert np.isnan(measure_query_noise(model, inputs=PROBE_TEXTS[:8]).of_tolerance)
