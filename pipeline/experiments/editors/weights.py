"""The common part of editors that change the weights of the layer that GRACE would wrap.

At the end of the editor's context the original weights are back, bit for bit. Nothing else may change the weights
meanwhile.
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
    """Edits the layer's weights. Use it as a context manager: its end restores the original weights.

    Raises:
        EditorError: the layer has no weights.
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
        """Check that this editor can edit the model at its layer, before any work.

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
        self._version += 1  # answers that were scored with the edited weights are stale
        with torch.no_grad():
            for weight, original in zip(self.weights, self._original_weights, strict=True):
                weight.copy_(original)

    def edit(self, number: int, example: Example) -> EditOutcome:
        """Change the weights, unless the model predicts the target already."""
        del number
        started = time.perf_counter()
        _, supervised = self._model.prepare_correction(example.inputs, example.target)
        if self._check_prediction(supervised).predicts_target:
            return EditOutcome("unchanged", 0, time.perf_counter() - started)
        steps = self._apply_correction(example, supervised)
        self._version += 1
        predicts_target = self._check_prediction(supervised).predicts_target
        return EditOutcome("added" if predicts_target else "failed", steps, time.perf_counter() - started)

    @abstractmethod
    def _apply_correction(self, example: Example, supervised: TargetPass) -> int:
        """Make the model predict the example's target; return the number of optimisation steps."""

    def state_keys(self, texts: Sequence[str]) -> list[Hashable]:
        """The version of the weights for every text: every answer depends on the weights."""
        return [self._version] * len(texts)

    def with_edits(self, batch: Batch) -> AbstractContextManager[object]:
        """An empty context: the model itself holds the edited weights."""
        del batch
        return nullcontext()

    def _check_prediction(self, supervised: TargetPass) -> TargetCheck:
        with torch.no_grad():
            return check_target(self._model.task.logits(supervised)[0], supervised.labels[0])[0]


class LinearLayerEditor(WeightEditor):
    """Edits the matrix of a linear layer.

    Raises:
        EditorError: the layer is not linear.
    """

    @classmethod
    def require_editable(cls, model: EditableModel) -> None:
        """Check that the layer is linear.

        Raises:
            EditorError: it is not.
        """
        super().require_editable(model)
        layer = model.module.get_submodule(model.layer)
        if not isinstance(layer, nn.Linear | Conv1D):
            kind = type(layer).__name__
            raise EditorError(f"{model.layer} is not a linear layer but {kind}: this editor changes linear layers only")

    @property
    def weight_VD(self) -> Tensor:
        """The layer's matrix (V, D), a view: writing to it changes the model. Conv1D stores it transposed."""
        (weight,) = (weight.detach() for weight in self.weights if weight.dim() == 2)
        return weight.T if isinstance(self.layer, Conv1D) else weight

    @contextmanager
    def _with_output_hook(self, output_hook: Callable[[Tensor, Tensor], Tensor | None]) -> Iterator[None]:
        """A context in which `output_hook` replaces the layer's outputs.

        The hook takes the layer's inputs (B, T, D) and outputs (B, T, V). None leaves the outputs unchanged.
        """

        def hook(_layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            return output_hook(args[0], output)

        handle = self.layer.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()
