"""The shared parts of `make gpu`: the device, its models, and cases. Each case is measured and guarded separately."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.tasks.base import Limits
from tests.bench.framework import Row
from tests.bench.random_models import BERT, T5, TINY, RandomModel, gpt2_xl

FULL_DEPTH_SECONDS = 300
"""With fewer seconds left, and on a CPU, GPT2-XL has a quarter of its blocks."""

REHEARSAL_COUNT = 4
"""Most inputs or corrections in a rehearsal."""


class CheckError(Exception):
    """A measured value is not as required. The message names the value and the requirement."""


class SkipError(Exception):
    """A case cannot run on this machine. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Rig:
    """The device, whether models and codebooks have their real sizes, and the remaining seconds of the budget."""

    device: torch.device
    real: bool
    seconds_left: Callable[[], float]

    def repeats(self, real: int) -> int:
        """The number of measurements: `real` with real sizes, 1 in a rehearsal."""
        return real if self.real else 1

    def count(self, real: int) -> int:
        """The number of inputs or corrections: `real` with real sizes, few in a rehearsal."""
        return real if self.real else min(real, REHEARSAL_COUNT)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def models(self) -> tuple[RandomModel, ...]:
        """The models with random weights, small ones first."""
        if not self.real:
            return TINY
        return BERT, T5, gpt2_xl(48 if self.cuda and self.seconds_left() > FULL_DEPTH_SECONDS else 12)


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement, and its needs of host memory and device memory, in bytes."""

    name: str
    run: Callable[[], Iterator[Row]]
    host_bytes: int = 0
    device_bytes: int = 0


def smollm2(device: torch.device, max_new_tokens: int = 16, dtype: str = "float32") -> EditableModel:
    """SmolLM2, if its weights are on this machine.

    Raises:
        SkipError: They are not, or a package that finds them is not installed.
    """
    if find_spec("pydantic_settings") is None:
        raise SkipError("SmolLM2 needs the package pydantic-settings: pip install pydantic-settings")
    from gracestream.pipeline.model.checkpoint import ModelError  # noqa: PLC0415 - needs pydantic-settings
    from gracestream.pipeline.model.registry import KNOWN_MODELS, ensure_model_built  # noqa: PLC0415 - needs pydantic-settings
    from gracestream.pipeline.settings import load_settings  # noqa: PLC0415 - needs pydantic-settings

    try:
        folder = ensure_model_built("smollm2", load_settings().model.cache_dir, lambda _line: None)
    except ModelError as error:
        raise SkipError(str(error)) from error
    limits = Limits(default_max_new_tokens=max_new_tokens)
    layer = KNOWN_MODELS["smollm2"].default_layer
    return EditableModel.load(str(folder), layer, device=device.type, dtype=dtype, limits=limits)
