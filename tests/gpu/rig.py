"""What every part of `make gpu` is given, and what it gives: cases, each measured and guarded by itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.tasks.base import Limits
from tests.bench.framework import Row
from tests.bench.random_models import BERT, T5, TINY, RandomModel, gpt2_xl

FULL_DEPTH_SECONDS = 300
"""With less of a budget left, and on a CPU, GPT2-XL has a quarter of its blocks."""


REHEARSAL_COUNT = 4
"""Inputs or corrections in a rehearsal."""


class CheckError(Exception):
    """Something measured is not as it has to be; the text names the value, and what it has to be."""


class SkipError(Exception):
    """A case that cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Rig:
    """The device, whether models and codebooks have their real sizes, and the seconds of the budget that are left."""

    device: torch.device
    real: bool
    seconds_left: Callable[[], float]

    def repeats(self, real: int) -> int:
        """How often something is timed: so often with real sizes, and once in a rehearsal."""
        return real if self.real else 1

    def count(self, real: int) -> int:
        """How many inputs or corrections there are: so many with real sizes, and few in a rehearsal."""
        return real if self.real else min(real, REHEARSAL_COUNT)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def models(self) -> tuple[RandomModel, ...]:
        """Those of random weights, small ones first."""
        if not self.real:
            return TINY
        return BERT, T5, gpt2_xl(48 if self.cuda and self.seconds_left() > FULL_DEPTH_SECONDS else 12)


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement, and what it needs of the host's memory and of the device's."""

    name: str
    run: Callable[[], Iterator[Row]]
    host_bytes: int = 0
    device_bytes: int = 0


def smollm2(device: torch.device, max_new_tokens: int = 16, dtype: str = "float32") -> EditableModel:
    """SmolLM2, if its weights are on this machine.

    Raises:
        SkipError: they are not, or a package that knows of them is not installed.
    """
    if find_spec("pydantic_settings") is None:
        raise SkipError("SmolLM2 needs the package pydantic-settings: pip install pydantic-settings")
    from gracestream.pipeline.model.checkpoint import ModelError  # noqa: PLC0415 - likewise
    from gracestream.pipeline.model.registry import KNOWN_MODELS, ensure_model_built  # noqa: PLC0415 - likewise
    from gracestream.pipeline.settings import load_settings  # noqa: PLC0415 - likewise

    try:
        folder = ensure_model_built("smollm2", load_settings().model.cache_dir, lambda _line: None)
    except ModelError as error:
        raise SkipError(str(error)) from error
    limits = Limits(default_max_new_tokens=max_new_tokens)
    layer = KNOWN_MODELS["smollm2"].default_layer
    return EditableModel.load(str(folder), layer, device=device.type, dtype=dtype, limits=limits)
