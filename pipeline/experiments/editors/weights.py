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

from gracestream.pipeline.experiments.editors.editor import EditorError, EditOutcome
from gracestream.pipeline.experiments.tasks import Example
from gracestream.pipeline.model import Batch, EditableModel, TargetCheck, TargetPass, check_target


class WeightEditor(ABC):
    """Used as a context, at whose end the weights are the original ones again.

    Raises:
        EditorError: the layer has none.
    """

    num_entries = 0

    def __init__(self, model: EditableModel) -> None:
        self.require_editable(model)
        self._model = model
        self.layer = model.module.get_submodule(model.layer)
        self.weights: list[Tensor] = list(self.layer.parameters())
        self._original_weights = [weight.detach().clone() for weight in self.weights]
        self._version = 0

    @classmethod
    def require_editable(cls, model: EditableModel) -> None:
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
        self._version += 1
        with torch.no_grad():
            for weight, original in zip(self.weights, self._original_weights, strict=True):
                weight.copy_(original)

    def edit(self, number: int, example: Example) -> EditOutcome:
        """Change the weights, unless the model is right already."""
        del number
        begun = time.perf_counter()
        _, supervised = self._model.prepare_correction(example.inputs, example.target)
        if self._check_prediction(supervised).predicts_target:
            return EditOutcome("unchanged", 0, time.perf_counter() - begun)
        steps = self._apply_correction(example, supervised)
        self._version += 1
        right = self._check_prediction(supervised).predicts_target
        return EditOutcome("added" if right else "failed", steps, time.perf_counter() - begun)

    @abstractmethod
    def _apply_correction(self, example: Example, supervised: TargetPass) -> int:
        """Make the model give the example's target; the optimisation steps that it took."""

    def state_keys(self, texts: Sequence[str]) -> list[Hashable]:
        """Every answer depends on the weights."""
        return [self._version] * len(texts)

    def with_edits(self, batch: Batch) -> AbstractContextManager[object]:
        """The weights are in the model."""
        del batch
        return nullcontext()

    def _check_prediction(self, supervised: TargetPass) -> TargetCheck:
        with torch.no_grad():
            return check_target(self._model.task.logits(supervised)[0], supervised.labels[0])[0]


class LinearLayerEditor(WeightEditor):
    """Of those, the ones that know a layer as a linear map of its inputs.

    Raises:
        EditorError: the layer is none.
    """

    @classmethod
    def require_editable(cls, model: EditableModel) -> None:
        """Whether it can edit this model at its layer."""
        super().require_editable(model)
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
    def _with_output_hook(self, output_hook: Callable[[Tensor, Tensor], Tensor | None]) -> Iterator[None]:
        """Passes inside put out what `output_hook` makes of the layer's inputs (B, T, D) and outputs (B, T, V)."""

        def hook(_layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            return output_hook(args[0], output)

        handle = self.layer.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()
