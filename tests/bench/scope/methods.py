"""The compared methods. Each applies a stream of corrections and gives an edited model.

A method is a name, and the settings that differ from the defaults. Matches and answers come from the engine, so all
features that these settings enable take part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from msgspec import UNSET

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.key_index import KeyIndex
from gracestream.pipeline.codebook.lookup import CodebookLookup, FoundEntry, if_serving
from gracestream.pipeline.codebook.policy import MAX_TRAFFIC_FRACTION
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import ChatMessage, Parameters
from gracestream.workers.bootstrap import edit_config_from_settings
from tests.bench.edits import (
    MAX_ANSWER_TOKENS,
    CachedModel,
    CorrectionCosts,
    Fact,
    TrainedValues,
    apply_corrections,
    open_cached_model,
    start_engine,
)
from tests.bench.scope.cases import Case, Stream

BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class Method:
    """A method of editing.

    Attributes:
        name: Its name in the report.
        settings: The differences from the defaults of `Settings`.
        curves: Thresholds of its curve, in medians of the traffic's nearest-neighbour distances.
        cases_in_traffic: Whether users sent all cases of edits before the corrections, as traffic.
    """

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)
    curves: tuple[float, ...] = ()
    cases_in_traffic: bool = False


BY_DISTANCE = {"train_prompt_forms": False, "check_wording": False, "use_scope_radius": False}
"""Values trained on one prompt, and matches by distance alone."""

LAYER = {"query_source": "last"}
"""Queries from the layer."""

METHODS = (
    Method("default"),
    Method("default, alpha .1", {"scope_error_rate": 0.1}),
    Method("default, asked before", {"traffic_sample_size": 4096}, cases_in_traffic=True),
    Method("default, distance", BY_DISTANCE, curves=(0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)),
    Method("layer", LAYER),
    Method("layer, distance", {**LAYER, **BY_DISTANCE}, curves=(0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5)),
)
"""The compared methods. Some have no curve, because another method has the same queries and distances."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. In a near miss, an entry served the prompt but did not give its target."""

    text: str
    near_miss: bool = False


class UneditedAnswers:
    """Answers of the unedited model. All methods share them, so each prompt is answered once."""

    def __init__(self) -> None:
        self._known: dict[Prompt, str] = {}

    def answers(self, model: EditableModel, prompts: Sequence[Prompt]) -> list[str]:
        """The full answer to each prompt."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._known]
        codebook = Codebook("none", model.fingerprint, model.layer)
        found = generate_answers(model, new, codebook, KeyIndex(codebook, model.device))
        self._known.update((prompt, answer.text) for prompt, answer in zip(new, found, strict=True))
        return [self._known[prompt] for prompt in prompts]


class EditedModel:
    """The model after a stream of corrections."""

    def __init__(
        self, cached_model: CachedModel, engine: EditEngine, cost: CorrectionCosts, unedited: UneditedAnswers
    ) -> None:
        self.model, self.engine, self.cost = cached_model.model, engine, cost
        self._unedited = unedited
        self._queries: dict[Prompt, np.ndarray] = {}

    def prompt(self, case: Case) -> Prompt:
        """The tokens of a case."""
        return self.model.task.tokenize((ChatMessage("user", case.text),) if case.chat else case.text)

    def serving_entries(self, prompts: Sequence[Prompt]) -> list[FoundEntry | None]:
        """The entry that serves each prompt, if any."""
        queries_BD = torch.from_numpy(self.queries(prompts))
        get_wording = self.model.task.wording_getter(self.model.task.batch(prompts))
        found_entries = self.engine.lookup.find_entries(queries_BD, get_wording)
        return [if_serving(found) for found in found_entries]

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """The edited model's full answer to each prompt, as in a replica."""
        return generate_answers(self.model, prompts, self.engine.codebook, self.engine.index)

    def unedited(self, prompts: Sequence[Prompt]) -> list[str]:
        """The unedited model's full answer to each prompt."""
        return self._unedited.answers(self.model, prompts)

    def target(self, entry: FoundEntry) -> str:
        """The target of an entry."""
        return self.model.task.decode_label(self.engine.codebook.labels[entry.slot])

    def own_entry(self, edit: int) -> str:
        """The id of the entry that serves a correction; empty if the correction is not in force."""
        memory = self.engine.memory
        return memory.serving_entry_id(str(edit)) if str(edit) in memory else ""

    def thresholds(self, prompts: Sequence[Prompt], *, limit_by_traffic: bool) -> np.ndarray:
        """The smallest threshold that captures each prompt, in units of radii; infinite if none does.

        `limit_by_traffic` limits radii by the distance to the traffic. The nearest key decides, whatever its radius.
        """
        keys_ND = self.engine.codebook.keys_ND
        if not len(keys_ND):
            return np.full(len(prompts), np.inf)
        unit = self.engine.initial_radius() / self.engine.config.radius
        limits_N = np.full(len(keys_ND), self.engine.config.max_radius)
        if limit_by_traffic:
            clear = [
                self.engine.traffic_sample.nearest_distance(key_D, self.engine.tolerance(key_D)) for key_D in keys_ND
            ]
            limits_N = np.minimum(limits_N, MAX_TRAFFIC_FRACTION * np.array(clear))
        found = self.engine.index.nearest(torch.from_numpy(self.queries(prompts)))
        distances_B = found.distances_B.cpu().numpy()
        return np.where(distances_B < limits_N[found.slots_B.cpu().numpy()], distances_B / unit, np.inf)

    def queries(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """The query of each prompt: (B, D)."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._queries]
        new.sort(key=len)
        for start in range(0, len(new), BATCH_SIZE):
            batch = new[start : start + BATCH_SIZE]
            self._queries.update(zip(batch, self.model.queries(batch).cpu().numpy(), strict=True))
        return np.stack([self._queries[prompt] for prompt in prompts])


@contextmanager
def open_method(
    method: Method, settings: Settings, model: str, trained_values: TrainedValues
) -> Iterator[Callable[..., EditedModel]]:
    """Load the model of a method. Call the result with a stream and the answers of the unedited model."""
    changed = dict(method.settings) | ({"model": model, "query_source": "auto"} if model else {})
    updated = settings.replace(**changed)
    with open_cached_model(updated, trained_values) as cached_model:
        yield partial(apply_stream, cached_model, updated, cases_in_traffic=method.cases_in_traffic)


def apply_stream(
    cached_model: CachedModel, settings: Settings, stream: Stream, unedited: UneditedAnswers, *, cases_in_traffic: bool
) -> EditedModel:
    """Apply the corrections of a stream, one after the other."""
    cases = [case.text for case in stream.cases if cases_in_traffic and case.edit is not None and not case.chat]
    plan = edit_config_from_settings(settings.editing, uses_encoder=cached_model.model.reads_text)
    engine = start_engine(cached_model, plan, [*stream.traffic, *cases])
    cost = apply_corrections(engine, cached_model, [Fact(one.text, "", one.target) for one in stream.corrections])
    return EditedModel(cached_model, engine, cost, unedited)


def generate_answers(
    model: EditableModel, prompts: Sequence[Prompt], codebook: Codebook, index: KeyIndex
) -> list[Answer]:
    """The answer to each prompt: a text, or the label of a classifier. Prompts of similar length share a batch.

    As in a replica, the unedited model answers if an entry does not give its target.
    """
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    found: dict[int, Answer] = {}
    for start in range(0, len(order), BATCH_SIZE):
        places = order[start : start + BATCH_SIZE]
        batch = [prompts[place] for place in places]
        answers = model.answer(batch, [PARAMETERS] * len(batch), CodebookLookup(codebook, index), check_answers=True)
        for place, served in zip(places, answers, strict=True):
            outputs = served.answer.outputs
            answer = outputs.label if outputs.text is UNSET else outputs.text
            found[place] = Answer(
                "" if answer is UNSET else answer,
                served.near_miss is not None and not served.near_miss.reason_not_served,
            )
    return [found[place] for place in range(len(prompts))]


PARAMETERS = Parameters(max_new_tokens=MAX_ANSWER_TOKENS)
