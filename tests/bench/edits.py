"""Corrections of a model in benchmarks: an engine that leads, its corrections, and the answers of the edited model.

1. Equal training runs happen once: settings with the same recipe share values, and the saved time is counted.
2. Answers come from `EditableModel.answer`, as in a replica.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.editing.value_training import TrainedValue, ValueTrainingConfig, train_value
from gracestream.pipeline.experiments.editors.queries import QueryCache
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.suffix_pass import SuffixPass, SuffixRunner
from gracestream.pipeline.search.key_search import NO_SLOT
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import Parameters
from gracestream.workers.bootstrap import load_model

MAX_ANSWER_TOKENS = 16
"""Most tokens of a generated answer. The longest target has fewer."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A correction: a prompt, a rephrase of it, and the target."""

    text: str
    rephrase: str
    target: str


@dataclass(frozen=True, slots=True)
class UneditedPass:
    """A pass of the unedited model over a prompt and a target: its suffix, the query, and whether it is correct."""

    suffix_pass: SuffixPass
    query_D: np.ndarray
    is_correct: bool


@dataclass(frozen=True, slots=True)
class CorrectionCosts:
    """The cost of a stream of corrections.

    Attributes:
        steps: Training steps of each correction with a trained value.
        seconds: Seconds of each of these corrections, with training time that was saved.
        correct_after: For each correction, whether the edited model is correct right after it.
        statuses: The status of each outcome.
    """

    steps: list[int]
    seconds: list[float]
    correct_after: list[bool]
    statuses: list[str]


TrainedValues = dict[tuple[object, ...], tuple[TrainedValue, float]]
"""Trained values and their training seconds, by all inputs of the training. Queries are not among them."""


class CachedModel:
    """A model with caches: queries, unedited passes, checks of values, and trained values."""

    def __init__(self, model: EditableModel, trained: TrainedValues) -> None:
        self.model = model
        self.empty = Codebook("none", model.fingerprint, model.layer)
        self._no_index = KeyIndex(self.empty, model.device)
        self._unedited_passes: dict[tuple[str, str], UneditedPass] = {}
        self.queries = QueryCache(model).get
        self._correct: dict[tuple[str, str, bytes], bool] = {}
        self._trained = trained
        self.saved_seconds = 0.0
        """Training seconds that the cache of values saved."""

    def unedited_pass(self, text: str, target: str) -> UneditedPass:
        """The unedited model's pass over a text and a target."""
        if (text, target) not in self._unedited_passes:
            supervised = self.model.prepare_correction(text, target)[1]
            verdict, session, suffix_pass = self.model.suffix_runner.inspect(
                supervised, CodebookLookup(self.empty, self._no_index)
            )
            query_D = session.queries_BD[0].cpu().numpy()
            self._unedited_passes[text, target] = UneditedPass(suffix_pass, query_D, verdict.predicts_target)
        return self._unedited_passes[text, target]

    def is_correct(self, engine: EditEngine, text: str, target: str) -> bool:
        """Whether the edited model predicts the target for the text."""
        unedited_pass = self.unedited_pass(text, target)
        slot = serving_slots(engine, unedited_pass.query_D[None])[0]
        return unedited_pass.is_correct if slot == NO_SLOT else self._value_gives_target(engine, slot, text, target)

    def _value_gives_target(self, engine: EditEngine, slot: int, text: str, target: str) -> bool:
        value_V = engine.codebook.values_NV[slot].copy()
        key = (text, target, value_V.tobytes())
        if key not in self._correct:
            unedited_pass = self.unedited_pass(text, target)
            self._correct[key] = self.model.suffix_runner.check_value(
                unedited_pass.suffix_pass, torch.from_numpy(value_V)
            ).predicts_target
        return self._correct[key]

    def generate_answers(self, texts: Sequence[str], engine: EditEngine | None = None) -> list[str]:
        """Answers of the edited model, or of the unedited model without an engine."""
        codebook, index = (engine.codebook, engine.index) if engine else (self.empty, self._no_index)
        answers: list[str] = []
        for start in range(0, len(texts), 16):
            prompts = [self.model.task.tokenize(text) for text in texts[start : start + 16]]
            parameters = [Parameters(max_new_tokens=MAX_ANSWER_TOKENS)] * len(prompts)
            for served in self.model.answer(prompts, parameters, CodebookLookup(codebook, index)):
                text = served.answer.outputs.text
                answers.append("" if text is UNSET else text)
        return answers

    def train_once(
        self, passes: SuffixRunner, suffix_pass: SuffixPass, start_V: torch.Tensor, recipe: ValueTrainingConfig
    ) -> TrainedValue:
        """Replaces `train_value`. Equal inputs are trained once."""
        ids = tuple(suffix_pass.target_pass.batch.kwargs["input_ids"].flatten().tolist())
        before = [keys.cpu().numpy().tobytes() for keys, _ in suffix_pass.target_pass.past_key_values[-1:]]
        what = (
            ids,
            *before,
            tuple(suffix_pass.target_pass.labels[0].tolist()),
            start_V.cpu().numpy().tobytes(),
            recipe,
        )
        if what not in self._trained:
            started = time.perf_counter()
            trained = train_value(passes, suffix_pass, start_V, recipe)
            self._trained[what] = trained, time.perf_counter() - started
        else:
            self.saved_seconds += self._trained[what][1]
        return self._trained[what][0]


@contextmanager
def open_cached_model(settings: Settings, trained: TrainedValues) -> Iterator[CachedModel]:
    """The model of the settings. Inside the context, engines train each value once."""
    cached_model = CachedModel(load_model(settings.model, settings.editing.policy), trained)
    with mock.patch("gracestream.pipeline.editing.value_search.train_value", cached_model.train_once):
        yield cached_model


def start_engine(cached_model: CachedModel, plan: EditConfig, traffic: Sequence[str]) -> EditEngine:
    """An engine that leads, with the traffic in its traffic sample, as in the editor worker."""
    engine = EditEngine(cached_model.model, "bench", plan)
    engine.apply(engine.lead_delta({}))
    if plan.traffic_sample_size == 0:
        return engine
    task = cached_model.model.task
    for offset, (text, query_D) in enumerate(zip(traffic, cached_model.queries(traffic), strict=True)):
        score = engine.traffic_sample.offer(0, offset, 0.0)
        if score is not None:
            engine.add_traffic(score, query_D, task.wording(task.tokenize(text)))
    return engine


def apply_corrections(engine: EditEngine, cached_model: CachedModel, facts: Sequence[Fact]) -> CorrectionCosts:
    """Apply corrections one after the other. Returns their cost and whether each is correct afterwards."""
    cost = CorrectionCosts([], [], [], [])
    for number, fact in enumerate(facts):
        saved_seconds, started_at = cached_model.saved_seconds, time.perf_counter()
        result = engine.edit(make_correction(str(number), fact.text, fact.target), number)
        if result.delta_record is not None:
            engine.apply(result.delta_record)
        assert result.outcome is not None
        if result.outcome.steps is not UNSET:
            cost.steps.append(result.outcome.steps)
            cost.seconds.append(time.perf_counter() - started_at + cached_model.saved_seconds - saved_seconds)
        cost.statuses.append(result.outcome.status)
        cost.correct_after.append(cached_model.is_correct(engine, fact.text, fact.target))
    return cost


def serving_slots(engine: EditEngine, queries_BD: np.ndarray) -> list[int]:
    """The slot of the nearest entry for each query if the query is within its radius, else -1."""
    nearest = engine.index.nearest(torch.from_numpy(queries_BD))
    found = zip(nearest.slots_B.tolist(), nearest.distances_B.tolist(), strict=True)
    return [
        slot if slot != NO_SLOT and distance < engine.codebook.radii_N[slot] else NO_SLOT for slot, distance in found
    ]


def fraction(successes: Sequence[bool] | Iterator[bool]) -> float:
    """The share of true values; 0 for an empty sequence."""
    listed = list(successes)
    return sum(listed) / len(listed) if listed else 0.0
