"""A model whose queries a test chooses: its inputs are coordinates, and the wrapped module gets them unchanged.

Everything else is real: torch module, adaptor, value training, engine. The unedited model answers class 0.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gracestream.pipeline.codebook.codebook import Label
from gracestream.pipeline.codebook.lookup import WordingGetter
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.model.adaptor import Adaptor
from gracestream.pipeline.model.batch import Batch, Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.suffix_pass import SuffixRunner
from gracestream.pipeline.model.tasks.base import InputError, ModelAnswer, ModelTask, TargetPass
from gracestream.pipeline.wording.comparison import common_words, contrast_groups
from gracestream.schemas.messages import Inputs, Outputs, Parameters
from tests.support.tiny_models import CODEBOOK, MODEL

CLASSES = 4


COMMON = tuple(sorted(word for word in common_words() if len(word) > 1 and not contrast_groups().get(word)))
"""Words by which two agreeing wordings may differ."""


class PointTask(ModelTask):
    """Inputs are numbers, such as `0.5 -1 2`; a target is a class."""

    def __init__(self, module: nn.Module, worded: bool) -> None:
        self.model, self.worded = module, worded

    def _logits(self, points_B1D: Tensor) -> Tensor:
        """The module's output plus a small function of the input, so that no value is equally good for two inputs."""
        logits_B1C: Tensor = self.model(points_B1D)
        return logits_B1C + 0.3 * torch.cos(points_B1D.sum(dim=-1, keepdim=True) * torch.arange(1, CLASSES + 1))

    def tokenize(self, inputs: Inputs) -> Prompt:
        """One token per coordinate: its tenths."""
        return Prompt(tuple(round(10 * float(number)) for number in str(inputs).split()))

    def batch(self, prompts: Sequence[Prompt]) -> Batch:
        return Batch({"points_B1D": torch.tensor([prompt.token_ids for prompt in prompts])[:, None] / 10}, None)

    def wording(self, prompt: Prompt) -> str:
        """If points are `worded`: the parity of the sum of the tenths, and the region. Even and odd wordings disagree.

        Points of one region and one parity have the same words, all others have different words.
        """
        if not self.worded:
            return ""
        region = sum(7**place * round(tenths / 10) for place, tenths in enumerate(prompt.token_ids))
        return f"place {sum(prompt.token_ids) % 2} {COMMON[region % len(COMMON)]}"

    def wording_getter(self, batch: Batch) -> WordingGetter:
        if not self.worded:
            return lambda _row: ""
        return lambda row: self.wording(self.tokenize(at(*batch.kwargs["points_B1D"][row, 0].tolist())))

    def forward_prompt(self, batch: Batch) -> None:
        self.model(batch.kwargs["points_B1D"])

    def run(self, batch: Batch, parameters: Sequence[Parameters]) -> list[ModelAnswer]:
        del parameters
        classes_B = self._logits(batch.kwargs["points_B1D"])[:, 0].argmax(dim=-1)
        return [ModelAnswer(Outputs(label=str(found))) for found in classes_B.tolist()]

    def batch_key(self, prompt: Prompt, parameters: Parameters) -> object:
        del prompt, parameters
        return None

    def matches_target(self, answer: ModelAnswer, label: Label, parameters: Parameters) -> bool:
        del parameters
        return answer.outputs.label == self.decode_label(label)

    def encode_target(self, inputs: Inputs, target: str) -> Label:
        del inputs
        if int(target) >= CLASSES:
            raise InputError(f"no class {target}")
        return (int(target),)

    def decode_label(self, label: Label) -> str:
        return str(label[0])

    def make_target_pass(self, inputs: Inputs, label: Label) -> TargetPass:
        points_11D = torch.tensor([[[float(number) for number in str(inputs).split()]]])
        return TargetPass(Batch({"points_B1D": points_11D}, None), (torch.tensor(label),), 1)

    def logits(self, target_pass: TargetPass) -> list[Tensor]:
        return list(self._logits(target_pass.batch.kwargs["points_B1D"]))

    def _pad_value(self, name: str) -> int:
        del name
        return 0


class PointModel(EditableModel):
    """Maps `(1, 1, D)` points to `(1, 1, C)` logits by one linear module, which is edited."""

    def __init__(self, width: int, *, worded: bool = False) -> None:
        self.module: Any = nn.Linear(width, CLASSES)
        # Small, so that the bias decides; yet the outputs, from which values are trained, differ by input.
        self.module.weight.data = 1e-3 * torch.arange(1.0, CLASSES * width + 1).reshape(CLASSES, width).cos()
        self.module.bias.data = torch.eye(CLASSES)[0]
        self.module.requires_grad_(requires_grad=False)
        self.layer, self.dtype, self.fingerprint = "", "float32", MODEL
        self.query_source, self.query_dtype = "last", "float32"
        self._encoder, self.reads_text = None, False
        self.device = torch.device("cpu")
        self.task = PointTask(self.module, worded)
        self.adaptor = Adaptor(self.module, "last", "last")
        self.suffix_runner = SuffixRunner(self.module, self.layer, self.task, self.adaptor)
        self.suffix_runner._optimisations, self.suffix_runner._padding_supported = "none", True


def engine(plan: EditConfig, width: int = 2, *, worded: bool = False) -> EditEngine:
    """An engine in its first term."""
    made = EditEngine(PointModel(width, worded=worded), CODEBOOK, plan)
    made.apply(made.lead_delta({}))
    return made


def at(*coordinates: float) -> str:
    return " ".join(repr(float(number)) for number in coordinates)


def answer(made: EditEngine, *point: float) -> int:
    """The edited model's class for a point."""
    supervised = made.model.task.make_target_pass(at(*point), (0,))
    with made.model.adaptor.with_codebook(
        supervised.batch, made.lookup, row_wording=made.model.task.wording_getter(supervised.batch)
    ):
        return int(made.model.task.run(supervised.batch, [])[0].outputs.label)  # type: ignore[arg-type]


def point(*coordinates: float) -> np.ndarray:
    return np.array(coordinates, np.float32)
