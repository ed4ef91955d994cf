"""Whether a layer can be edited: a trial value is put there in real forward passes, once, when a model is loaded.

A layer is refused if the model does not call it, fails with a value there, or answers the same with and without one.
It costs two forward passes over a few tokens, and a third for generators, which answer by another way.
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
"""A short prompt, and a shorter one for models that take very few tokens."""

PROBE_LABEL = (0, 0, 0)
"""Any tokens, or any class: what counts is that the logits change."""


def layer_fault(task: ModelTask, adaptor: Adaptor) -> str | None:
    """Why the layer that the adaptor wraps cannot be edited; None if it can, or if no probe fits into the model."""
    for prompt in PROBE_PROMPTS:
        try:
            return _trial_fault(task, adaptor, prompt)
        except InputError:
            continue
        except LayerError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  (a model fails in its own way on what it was not built for)
            raise_if_device_lost(error)
            return f"the model fails with a value there ({to_one_line(error) or type(error).__name__})"
    return None


def _trial_fault(task: ModelTask, adaptor: Adaptor, prompt: str) -> str | None:
    supervised = task.make_target_pass(prompt, PROBE_LABEL[: 1 if isinstance(task, Classification) else None])
    with torch.inference_mode(), adaptor.capture_output(supervised.batch) as seen:
        before = task.logits(supervised)
    if seen.outputs_BV.dim() < 2:
        return "the model does not call it when it answers"
    values_BV = _trial_values(seen.outputs_BV)
    with torch.inference_mode(), adaptor.inject(supervised.batch, values_BV):
        after = task.logits(supervised)
    if all(torch.equal(*pair) for pair in zip(before, after, strict=True)):
        return "a value there changes nothing in the model's answer"
    if not isinstance(task, Classification):  # whose answers come from the very pass above
        batch = task.batch([task.tokenize(prompt)])
        with torch.inference_mode(), adaptor.with_lookup(batch, lambda _: (torch.tensor([True]), values_BV)):
            task.run(batch, [Parameters(max_new_tokens=1)])
    return None


def _trial_values(outputs_BV: Tensor) -> Tensor:
    """Other values of the same scale, of both signs: a layer behind a ReLU passes on only some."""
    wave_V = torch.cos(torch.arange(outputs_BV.shape[1], device=outputs_BV.device))
    return outputs_BV + wave_V * (1 + outputs_BV.abs().mean())
