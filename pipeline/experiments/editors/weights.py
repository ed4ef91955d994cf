"""What editors share that change the weights of the layer that GRACE would wrap.

The weights are the editor's until it is closed: then they are what they were.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gracestream.pipeline.experiments.editors.editor import EditorError, Made
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import Batch, EditableModel, Supervised, Verdict, verdict


class WeightEditor(ABC):
    """Used as a context, at whose end the weights are the original ones again.

    Raises:
        EditorError: the layer has none.
    """

    entries = 0

    def __init__(self, model: EditableModel) -> None:
        self.require(model)
        self._model = model
        self.layer = model.module.get_submodule(model.layer)
        self.weights: list[Tensor] = list(self.layer.parameters())
        self._original = [weight.detach().clone() for weight in self.weights]
        self._changes = 0

    @classmethod
    def require(cls, model: EditableModel) -> None:
        """Whether it can edit this model at its layer, told before any work.

        Raises:
            EditorError: it cannot.
        """
        if not any(True for _ in model.module.get_submodule(model.layer).parameters()):
            raise EditorError(f"{model.layer} has no weights, which this editor changes")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the original weights back."""
        self._changes += 1
        with torch.no_grad():
            for weight, original in zip(self.weights, self._original, strict=True):
                weight.copy_(original)

    def edit(self, number: int, example: Example) -> Made:
        """Change the weights, unless the model is right already."""
        del number
        begun = time.perf_counter()
        _, supervised = self._model.supervised(example.inputs, example.target)
        if self._judged(supervised).right:
            return Made("unchanged", 0, time.perf_counter() - begun)
        steps = self._change(example, supervised)
        self._changes += 1
        right = self._judged(supervised).right
        return Made("added" if right else "failed", steps, time.perf_counter() - begun)

    @abstractmethod
    def _change(self, example: Example, supervised: Supervised) -> int:
        """Make the model give the example's target; the optimisation steps that it took."""

    def states(self, texts: Sequence[str]) -> list[Hashable]:
        """Every answer depends on the weights."""
        return [self._changes] * len(texts)

    def serving(self, batch: Batch) -> AbstractContextManager[object]:
        """The weights are in the model."""
        del batch
        return nullcontext()

    def _judged(self, supervised: Supervised) -> Verdict:
        with torch.no_grad():
            return verdict(self._model.task.logits(supervised)[0], supervised.labels[0])[0]


class LinearEditor(WeightEditor):
    """Of those, the ones that know a layer as a linear map of its inputs.

    Raises:
        EditorError: the layer is none.
    """

    @classmethod
    def require(cls, model: EditableModel) -> None:
        """Whether it can edit this model at its layer."""
        super().require(model)
        layer = model.module.get_submodule(model.layer)
        if not isinstance(layer, nn.Linear | Conv1D):
            kind = type(layer).__name__
            raise EditorError(f"{model.layer} is no linear layer, but {kind}: this editor changes linear layers only")

    @property
    def weight_VD(self) -> Tensor:
        """The map's matrix; what is written to it is in the model."""
        (weight,) = (weight.detach() for weight in self.weights if weight.dim() == 2)
        return weight.T if isinstance(self.layer, Conv1D) else weight

    @contextmanager
    def _passing(self, change: Callable[[Tensor, Tensor], Tensor | None]) -> Iterator[None]:
        """Passes inside put out what `change` makes of the layer's inputs (B, T, D) and outputs (B, T, V)."""

        def hook(_layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            return change(args[0], output)

        handle = self.layer.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()
