"""Edits on a model for benchmarks: an engine that leads, its corrections, and the answers of the edited model.

1. Equal training runs happen once: settings with the same recipe share values, and the saved time is counted.
2. Answers come from `EditableModel.answer`, as a replica gives them.
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
"""Tokens of an answer that is generated; the longest target has fewer."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A correction: what is asked, in two ways, and the answer."""

    text: str
    rephrase: str
    target: str


@dataclass(frozen=True, slots=True)
class UneditedPass:
    """A text with a target, as the unedited model sees it."""

    suffix_pass: SuffixPass
    query_D: np.ndarray
    is_correct: bool


@dataclass(frozen=True, slots=True)
class CorrectionCosts:
    """What a stream of corrections took: steps of those that trained a value, seconds of all of them."""

    steps: list[int]
    seconds: list[float]
    correct_after: list[bool]
    statuses: list[str]


TrainedValues = dict[tuple[object, ...], tuple[TrainedValue, float]]
"""Values by what they were trained on, whose queries do not count, and the seconds that took."""


class CachedModel:
    """One edited layer, and what the model says there: a text's query, and whether a value makes it say a target."""

    def __init__(self, model: EditableModel, trained: TrainedValues) -> None:
        self.model = model
        self.empty = Codebook("none", model.fingerprint, model.layer)
        self._no_index = KeyIndex(self.empty, model.device)
        self._unedited_passes: dict[tuple[str, str], UneditedPass] = {}
        self.queries = QueryCache(model).get
        self._correct: dict[tuple[str, str, bytes], bool] = {}
        self._trained = trained
        self.saved_seconds = 0.0
        """Seconds of training that were not spent again."""

    def unedited_pass(self, text: str, target: str) -> UneditedPass:
        """The text as the unedited model sees it."""
        if (text, target) not in self._unedited_passes:
            supervised = self.model.prepare_correction(text, target)[1]
            verdict, session, suffix_pass = self.model.suffix_runner.inspect(
                supervised, CodebookLookup(self.empty, self._no_index)
            )
            query_D = session.queries_BD[0].cpu().numpy()
            self._unedited_passes[text, target] = UneditedPass(suffix_pass, query_D, verdict.predicts_target)
        return self._unedited_passes[text, target]

    def is_correct(self, engine: EditEngine, text: str, target: str) -> bool:
        """Whether the edited model answers the text with the target."""
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
        """What the edited model generates; without an engine, the unedited one."""
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
        """Stands for `train_value`, and trains the same thing once."""
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
    """The model, wrapped at the layer of the settings, whose engines train each value once."""
    cached_model = CachedModel(load_model(settings.model, settings.editing.policy), trained)
    with mock.patch("gracestream.pipeline.editing.value_search.train_value", cached_model.train_once):
        yield cached_model


def start_engine(cached_model: CachedModel, plan: EditConfig, traffic: Sequence[str]) -> EditEngine:
    """An engine that leads and has seen the traffic, as the editor worker shows it."""
    engine = EditEngine(cached_model.model, "bench", plan)
    engine.apply(engine.lead_delta({}))
    if plan.traffic_sample_size == 0:
        return engine
    task = cached_model.model.task
    for offset, (text, query_D) in enumerate(zip(traffic, cached_model.queries(traffic), strict=True)):
        rank = engine.reservoir.offer(0, offset, 0.0)
        if rank is not None:
            engine.add_traffic(rank, query_D, task.wording(task.tokenize(text)))
    return engine


def apply_corrections(engine: EditEngine, cached_model: CachedModel, facts: Sequence[Fact]) -> CorrectionCosts:
    """One correction after the other; what each took, and whether the model is right once it is made."""
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
    """The slot of the entry that serves each query, or -1: the nearest, if the query lies in its ball."""
    nearest = engine.index.nearest(torch.from_numpy(queries_BD))
    found = zip(nearest.slots_B.tolist(), nearest.distances_B.tolist(), strict=True)
    return [
        slot if slot != NO_SLOT and distance < engine.codebook.radii_N[slot] else NO_SLOT for slot, distance in found
    ]


def fraction(successes: Sequence[bool] | Iterator[bool]) -> float:
    """The share that is true; 0 of nothing."""
    listed = list(successes)
    return sum(listed) / len(listed) if listed else 0.0
