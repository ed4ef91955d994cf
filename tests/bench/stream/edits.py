"""Corrections one after the other, with trained values or with free ones.

Both kinds of stream use the editor worker's engine. A stream of keys gives each decision the layer's unchanged output
as its value, as in a replay of a decision with a known value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import torch
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Label
from gracestream.pipeline.codebook.edit_memory import UNEDITED_MODEL
from gracestream.pipeline.codebook.lookup import FoundEntry, if_serving
from gracestream.pipeline.editing.candidate import DraftValue, RecordedInputs
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import DecisionResult, make_correction
from gracestream.pipeline.editing.value_training import TrainedValue
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.tasks.base import InputError
from gracestream.schemas.deltas import DecisionContext
from gracestream.schemas.messages import Feedback
from tests.bench.device import timed
from tests.bench.stream.corrections import Correction, draw_authors
from tests.bench.stream.log import LoggedCorrection

T = TypeVar("T")

CODEBOOK = "bench"

BATCH_SIZE = 16
"""Prompts per pass of the encoder and per lookup, as in a batch of a replica."""


class PromptCache:
    """A cache of queries, wordings and labels. None of them depends on an edit."""

    def __init__(self, model: EditableModel) -> None:
        self._model = model
        self._queries: dict[str, np.ndarray] = {}
        self._wordings: dict[str, str] = {}
        self._labels: dict[tuple[str, str], Label | None] = {}

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """The query of each prompt (B, D), from batches of prompts of similar length."""
        new = sorted({text for text in texts if text not in self._queries}, key=len)
        for start in range(0, len(new), BATCH_SIZE):
            batch = new[start : start + BATCH_SIZE]
            queries_BD = self._model.queries([self._model.task.tokenize(text) for text in batch])
            self._queries.update(zip(batch, queries_BD.cpu().numpy(), strict=True))
        return np.stack([self._queries[text] for text in texts])

    def wording(self, text: str) -> str:
        """The wording of a prompt, as a replica compares it."""
        if text not in self._wordings:
            self._wordings[text] = self._model.task.wording(self._model.task.tokenize(text))
        return self._wordings[text]

    def label(self, text: str, target: str) -> Label | None:
        """The label of a target; None if the model cannot take the target."""
        if (text, target) not in self._labels:
            try:
                self._labels[text, target] = self._model.task.encode_target(text, target)
            except InputError:
                self._labels[text, target] = None
        return self._labels[text, target]

    def accepts(self, text: str) -> bool:
        """Whether the model can take a prompt."""
        try:
            self._model.task.tokenize(text)
        except InputError:
            return False
        return True

    def serving_entries(self, engine: EditEngine, texts: Sequence[str]) -> list[FoundEntry | None]:
        """The entry that serves each prompt: the prompt is within its radius, and the wordings agree."""
        found: list[FoundEntry | None] = []
        for start in range(0, len(texts), BATCH_SIZE):
            batch = texts[start : start + BATCH_SIZE]
            queries_BD = torch.from_numpy(self.queries(batch))
            wording = partial(_wording_of_row, self.wording, batch)
            found += engine.lookup.find_entries(queries_BD, wording)
        return [if_serving(one) for one in found]


class Stopwatch:
    """Seconds of a device, by the name of the work."""

    def __init__(self, device: torch.device) -> None:
        self.spent: dict[str, float] = {}
        self._device = device

    def measure(self, name: str, call: Callable[[], T]) -> T:
        """The result of a call. Its time is added to this name."""
        seconds, result = timed(self._device, call)
        self.spent[name] = self.spent.get(name, 0.0) + seconds
        return result


Decide = Callable[[EditEngine, Feedback, int, Stopwatch], DecisionResult]
"""Decides on a correction: the feedback at an offset."""


def decide_with_training(engine: EditEngine, feedback: Feedback, offset: int, seconds: Stopwatch) -> DecisionResult:
    """Decide as the editor worker does. The engine caches the radius, so a first call measures it separately."""
    assert isinstance(feedback.inputs, str)
    inputs = feedback.inputs
    try:
        prompt = engine.model.task.tokenize(inputs)
    except InputError:
        return engine.edit(feedback, offset)
    query_D = engine.model.queries([prompt])[0].cpu().numpy()
    seconds.measure("radius", lambda: engine.initial_radius_for(inputs, query_D))
    return seconds.measure("edit", lambda: engine.edit(feedback, offset))


def decide_with_given_value(engine: EditEngine, feedback: Feedback, offset: int, seconds: Stopwatch) -> DecisionResult:
    """Decide as in a replay with a known value: the unchanged output of the layer."""
    assert isinstance(feedback.inputs, str)
    assert feedback.target is not UNSET
    inputs, target = feedback.inputs, feedback.target
    try:
        examined = seconds.measure("examine", lambda: engine.inspect(inputs, target))
    except InputError:
        return engine.edit(feedback, offset)
    context = DecisionContext(
        radius=seconds.measure("radius", lambda: engine.initial_radius_for(inputs, examined.query_D))
    )
    value_V = examined.layer_output_V.cpu().numpy()
    given = (
        RecordedInputs(context, value_V=value_V),
        DraftValue(TrainedValue(value_V, 0, examined.target_check, converged=True), (), examined),
    )
    return seconds.measure("edit", lambda: engine.edit(feedback, offset, *given))


def answers_correctly(engine: EditEngine, feedback: Feedback) -> bool:
    """Whether the edited model predicts the target, token by token."""
    assert feedback.inputs is not UNSET
    assert feedback.target is not UNSET
    return engine.inspect(feedback.inputs, feedback.target).target_check.predicts_target


@dataclass(frozen=True, slots=True)
class StreamKind:
    """A kind of stream: how it decides, and whether its values make the model predict the targets."""

    name: str
    decide: Decide
    gives_targets: bool


STREAM_KINDS = (
    StreamKind("trained", decide_with_training, gives_targets=True),
    StreamKind("keys", decide_with_given_value, gives_targets=False),
)


def start_engine(
    model: EditableModel, plan: EditConfig, traffic: Sequence[str], texts: PromptCache, lead_record: bytes
) -> EditEngine:
    """An engine that leads with this record, and has the traffic in its traffic sample."""
    engine = EditEngine(model, CODEBOOK, plan)
    engine.apply(lead_record)
    for offset, (text, query_D) in enumerate(zip(traffic, texts.queries(traffic), strict=True)):
        score = engine.traffic_sample.offer(0, offset, 0.0)
        if score is not None:
            engine.add_traffic(score, query_D, texts.wording(text))
    return engine


def to_feedback(corrections: Sequence[Correction]) -> list[Feedback]:
    """The corrections as feedback. The id is the number."""
    return [
        msgspec.structs.replace(make_correction(str(number), one.text, one.target), author=author)
        for number, (one, author) in enumerate(zip(corrections, draw_authors(len(corrections)), strict=True))
    ]


def apply_correction(
    engine: EditEngine, stream_kind: StreamKind, texts: PromptCache, feedback: Feedback, number: int
) -> LoggedCorrection:
    """Apply one correction, and check at once whether it is right."""
    seconds = Stopwatch(engine.model.device)
    result = stream_kind.decide(engine, feedback, number, seconds)
    record = result.delta_record
    if record is not None:
        seconds.measure("edit", lambda: engine.apply(record))
    assert result.outcome is not None
    right = record is not None and (
        answers_correctly(engine, feedback) if stream_kind.gives_targets else are_served(engine, texts, [feedback])[0]
    )
    steps = 0 if result.outcome.steps is UNSET else result.outcome.steps
    return LoggedCorrection(number, result.outcome.status, right, steps, seconds.spent, record)


def are_served(engine: EditEngine, texts: PromptCache, feedback: Sequence[Feedback]) -> list[bool]:
    """Whether each correction is served: by an entry with its label, or by none if the unedited model was right."""
    prompts = [one.inputs for one in feedback if isinstance(one.inputs, str)]
    return [_serves(engine, texts, *one) for one in zip(texts.serving_entries(engine, prompts), feedback, strict=True)]


def _serves(engine: EditEngine, texts: PromptCache, entry: FoundEntry | None, feedback: Feedback) -> bool:
    if entry is None:
        return serving_entry_id(engine, feedback.feedback_id) == UNEDITED_MODEL
    assert isinstance(feedback.inputs, str)
    assert feedback.target is not UNSET
    return engine.codebook.labels[entry.slot] == texts.label(feedback.inputs, feedback.target)


def serving_entry_id(engine: EditEngine, feedback_id: str) -> str | None:
    """The id of the entry that serves an edit: `UNEDITED_MODEL` if none is needed, None if it is not in force."""
    return engine.memory.serving_entry_id(feedback_id) if feedback_id in engine.memory else None


def _wording_of_row(wording: Callable[[str], str], texts: Sequence[str], row: int) -> str:
    return wording(texts[row])
