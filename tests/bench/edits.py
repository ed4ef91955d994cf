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

ANSWER = 16
"""Tokens of an answer that is generated; the longest target has fewer."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A correction: what is asked, in two ways, and the answer."""

    text: str
    rephrase: str
    target: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A text with a target, as the unedited model sees it."""

    rest: SuffixPass
    query_D: np.ndarray
    right: bool


@dataclass(frozen=True, slots=True)
class Cost:
    """What a stream of corrections took: steps of those that trained a value, seconds of all of them."""

    steps: list[int]
    seconds: list[float]
    after: list[bool]
    statuses: list[str]


Known = dict[tuple[object, ...], tuple[TrainedValue, float]]
"""Values by what they were trained on, whose queries do not count, and the seconds that took."""


class Asked:
    """One edited layer, and what the model says there: a text's query, and whether a value makes it say a target."""

    def __init__(self, model: EditableModel, trained: Known) -> None:
        self.model = model
        self.empty = Codebook("none", model.fingerprint, model.layer)
        self._no_index = KeyIndex(self.empty, model.device)
        self._seen: dict[tuple[str, str], Seen] = {}
        self.queries = QueryCache(model).get
        self._right: dict[tuple[str, str, bytes], bool] = {}
        self._trained = trained
        self.saved = 0.0
        """Seconds of training that were not spent again."""

    def seen(self, text: str, target: str) -> Seen:
        """The text as the unedited model sees it."""
        if (text, target) not in self._seen:
            supervised = self.model.prepare_correction(text, target)[1]
            verdict, session, rest = self.model.suffix_runner.inspect(
                supervised, CodebookLookup(self.empty, self._no_index)
            )
            query_D = session.queries_BD[0].cpu().numpy()
            self._seen[text, target] = Seen(rest, query_D, verdict.predicts_target)
        return self._seen[text, target]

    def right(self, engine: EditEngine, text: str, target: str) -> bool:
        """Whether the edited model answers the text with the target."""
        seen = self.seen(text, target)
        slot = serving(engine, seen.query_D[None])[0]
        return seen.right if slot == NO_SLOT else self._gives(engine, slot, text, target)

    def _gives(self, engine: EditEngine, slot: int, text: str, target: str) -> bool:
        value_V = engine.codebook.values_NV[slot].copy()
        asked = (text, target, value_V.tobytes())
        if asked not in self._right:
            seen = self.seen(text, target)
            self._right[asked] = self.model.suffix_runner.check_value(
                seen.rest, torch.from_numpy(value_V)
            ).predicts_target
        return self._right[asked]

    def answers(self, texts: Sequence[str], engine: EditEngine | None = None) -> list[str]:
        """What the edited model generates; without an engine, the unedited one."""
        codebook, index = (engine.codebook, engine.index) if engine else (self.empty, self._no_index)
        said: list[str] = []
        for start in range(0, len(texts), 16):
            prompts = [self.model.task.tokenize(text) for text in texts[start : start + 16]]
            parameters = [Parameters(max_new_tokens=ANSWER)] * len(prompts)
            for served in self.model.answer(prompts, parameters, CodebookLookup(codebook, index)):
                text = served.answer.outputs.text
                said.append("" if text is UNSET else text)
        return said

    def train(
        self, passes: SuffixRunner, rest: SuffixPass, start_V: torch.Tensor, recipe: ValueTrainingConfig
    ) -> TrainedValue:
        """Stands for `train_value`, and trains the same thing once."""
        ids = tuple(rest.target_pass.batch.kwargs["input_ids"].flatten().tolist())
        before = [keys.cpu().numpy().tobytes() for keys, _ in rest.target_pass.past_key_values[-1:]]
        what = (ids, *before, tuple(rest.target_pass.labels[0].tolist()), start_V.cpu().numpy().tobytes(), recipe)
        if what not in self._trained:
            started = time.perf_counter()
            trained = train_value(passes, rest, start_V, recipe)
            self._trained[what] = trained, time.perf_counter() - started
        else:
            self.saved += self._trained[what][1]
        return self._trained[what][0]


@contextmanager
def asked_at(settings: Settings, trained: Known) -> Iterator[Asked]:
    """The model, wrapped at the layer of the settings, whose engines train each value once."""
    asked = Asked(load_model(settings.model, settings.editing.policy), trained)
    with mock.patch("gracestream.pipeline.editing.value_search.train_value", asked.train):
        yield asked


def started(asked: Asked, plan: EditConfig, traffic: Sequence[str]) -> EditEngine:
    """An engine that leads and has seen the traffic, as the editor worker shows it."""
    engine = EditEngine(asked.model, "bench", plan)
    engine.apply(engine.lead_delta({}))
    if plan.traffic_sample_size == 0:
        return engine
    task = asked.model.task
    for offset, (text, query_D) in enumerate(zip(traffic, asked.queries(traffic), strict=True)):
        rank = engine.reservoir.offer(0, offset, 0.0)
        if rank is not None:
            engine.add_traffic(rank, query_D, task.wording(task.tokenize(text)))
    return engine


def correct(engine: EditEngine, asked: Asked, facts: Sequence[Fact]) -> Cost:
    """One correction after the other; what each took, and whether the model is right once it is made."""
    cost = Cost([], [], [], [])
    for number, fact in enumerate(facts):
        saved, begun = asked.saved, time.perf_counter()
        edited = engine.edit(make_correction(str(number), fact.text, fact.target), number)
        if edited.delta_record is not None:
            engine.apply(edited.delta_record)
        assert edited.outcome is not None
        if edited.outcome.steps is not UNSET:
            cost.steps.append(edited.outcome.steps)
            cost.seconds.append(time.perf_counter() - begun + asked.saved - saved)
        cost.statuses.append(edited.outcome.status)
        cost.after.append(asked.right(engine, fact.text, fact.target))
    return cost


def serving(engine: EditEngine, queries_BD: np.ndarray) -> list[int]:
    """The slot of the entry that serves each query, or -1: the nearest, if the query lies in its ball."""
    nearest = engine.index.nearest(torch.from_numpy(queries_BD))
    found = zip(nearest.slots_B.tolist(), nearest.distances_B.tolist(), strict=True)
    return [
        slot if slot != NO_SLOT and distance < engine.codebook.radii_N[slot] else NO_SLOT for slot, distance in found
    ]


def share(successes: Sequence[bool] | Iterator[bool]) -> float:
    """The share that is true; 0 of nothing."""
    listed = list(successes)
    return sum(listed) / len(listed) if listed else 0.0
