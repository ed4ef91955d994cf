"""Checks whether a layer can be edited: injects a trial value in real forward passes when a model is loaded.

A layer is rejected if the model does not call it, fails with a value there, or ignores the value. The check costs two
forward passes over a few tokens. Generators need a third, because answers take another code path.
"""

import torch
from torch import Tensor

from gracestream.pipeline.device import raise_if_device_lost
from gracestream.pipeline.model.adaptor import Adaptor
from gracestream.pipeline.model.layers import LayerError
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.tasks.base import InputError, ModelTask
from gracestream.pipeline.model.tasks.classification import Classification
from gracestream.schemas.messages import Parameters, to_one_line

PROBE_PROMPTS = (" ".join(PROBE_TEXTS[0].split()[:5]), PROBE_TEXTS[0].split()[1])
"""A short prompt, and a one-word prompt for models with very few positions."""

PROBE_LABEL = (0, 0, 0)
"""Arbitrary tokens, or an arbitrary class with the first one: only a change of the logits matters."""


def layer_fault(task: ModelTask, adaptor: Adaptor) -> str | None:
    """The reason why the adaptor's layer cannot be edited; None if it can be, or if no probe fits the model."""
    for prompt in PROBE_PROMPTS:
        try:
            return _trial_fault(task, adaptor, prompt)
        except InputError:
            continue
        except LayerError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  (a model may fail in any way with an injected value)
            raise_if_device_lost(error)
            return f"the model fails with a value there ({to_one_line(error) or type(error).__name__})"
    return None


def _trial_fault(task: ModelTask, adaptor: Adaptor, prompt: str) -> str | None:
    target_pass = task.make_target_pass(prompt, PROBE_LABEL[: 1 if isinstance(task, Classification) else None])
    with torch.inference_mode(), adaptor.record_output(target_pass.batch) as recorded:
        before = task.logits(target_pass)
    if recorded.outputs_BV.dim() < 2:  # still the empty default of `AdaptorPass`
        return "the model does not call it when it answers"
    values_BV = _trial_values(recorded.outputs_BV)
    with torch.inference_mode(), adaptor.inject(target_pass.batch, values_BV):
        after = task.logits(target_pass)
    if all(torch.equal(*pair) for pair in zip(before, after, strict=True)):
        return "a value there changes nothing in the model's answer"
    if not isinstance(task, Classification):  # a classifier answers with the pass above
        batch = task.batch([task.tokenize(prompt)])
        with torch.inference_mode(), adaptor.with_lookup(batch, lambda _: (torch.tensor([True]), values_BV)):
            task.run(batch, [Parameters(max_new_tokens=1)])
    return None


def _trial_values(outputs_BV: Tensor) -> Tensor:
    """Values of the same scale as the outputs, above and below them: a ReLU after the layer may hide those below."""
    wave_V = torch.cos(torch.arange(outputs_BV.shape[1], device=outputs_BV.device))
    return outputs_BV + wave_V * (1 + outputs_BV.abs().mean())
