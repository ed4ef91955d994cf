"""Trial edits under each combination of layer, kind of query and radius, and what they reach.

1. Every figure is that of the editor's engine and of the lookup that replicas run.
2. Values are trained once for each layer. Queries and radii need only lookups.
3. Texts that must not change are none of those from which the engine takes its radii.

Not promised: that a deployment with other requests shows the same shares. Their intervals count sampling alone.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from msgspec import Struct

from gracestream.pipeline.codebook import Hit, Label, serving_hit
from gracestream.pipeline.editing import (
    FORM_BATCH_SIZE,
    CalibrationError,
    DraftValue,
    EditConfig,
    EditEngine,
    ScopeRadius,
)
from gracestream.pipeline.model import EditableModel, InputError, Prompt
from gracestream.pipeline.tuning.intervals import wilson_interval
from gracestream.pipeline.tuning.samples import (
    INVENTED_NAMES,
    TargetMaker,
    TrialEdit,
    UserRequests,
    same_subject_requests,
    surface_forms,
    usable_inputs,
)
from gracestream.pipeline.tuning.workbench import ENCODER_QUERY, TRIAL_FINGERPRINT, AnswerCache, Workbench, answer_text
from gracestream.schemas.messages import Inputs


@dataclass(frozen=True, slots=True)
class ConfigChoice:
    """A kind of query with a radius: the plan of an editor, and the settings that differ from the defaults."""

    query: str
    radius: str
    settings: Mapping[str, object]
    config: EditConfig


class Share(Struct, frozen=True):
    """So many of some cases."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        """The share; 0 of no cases."""
        return self.hits / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval."""
        return wilson_interval(self.hits, self.of)


class TrialResult(Struct, frozen=True):
    """What one candidate showed.

    Attributes:
        layer: Where values go.
        query: The kind of query.
        radius: The radius in words.
        settings: What differs from the defaults, without the layer.
        edited: Trial edits after which the model gave the target.
        kept: Of these, edits that still hold after the last one.
        rephrases: The user's other words for trials that got the target.
        forms: Surface forms of trials that got the target.
        others: Held-out requests that an entry captures.
        about: Other requests about a trial's subject that an entry captures.
        broken: Of all captured texts, answers that are neither the entry's target nor the unedited answer.
        nearer: Rephrases whose correction is nearer to them than any other request.
        seconds: Of training one edit, mean, with some edits trained at once: CPU seconds where the model runs there.
        reasons: Why values were not found, the most frequent first.
    """

    layer: str
    query: str
    radius: str
    settings: dict[str, object]
    edited: Share
    kept: Share
    rephrases: Share
    forms: Share
    others: Share
    about: Share
    broken: Share
    nearer: Share
    seconds: float
    reasons: tuple[str, ...] = ()

    @property
    def reach(self) -> float:
        """The share of texts that should get the target and do: rephrases and forms count half each."""
        kinds = [share.value for share in (self.rephrases, self.forms) if share.of]
        return sum(kinds) / len(kinds) if kinds else self.edited.value

    @property
    def false_positives(self) -> float:
        """The larger share of captured requests that should not be."""
        return max(self.others.value, self.about.value)


@dataclass(slots=True)
class TrialMaterial:
    """Trials and other texts, as the model takes them; `notes` say what was left out."""

    trials: list[TrialEdit]
    held_out: list[Inputs]
    traffic: list[Inputs]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def from_requests(
        cls, bench: Workbench, answers: AnswerCache, requests: UserRequests, trial_count: int
    ) -> "TrialMaterial":
        """So many trials of these requests, fewer where there are too few.

        Raises:
            CalibrationError: too few requests are left for a trial.
        """
        left_out = {one: why for one in requests.rephrases if (why := answers.explain_rejection(one)) is not None}
        known = {one: words for one, words in requests.rephrases.items() if one not in left_out}
        divided = UserRequests(known, requests.targets).divide(trial_count)
        made = cls([], divided.held_out, divided.traffic)
        made.notes += [
            f"{_pluralize_requests(times)} left out: {why}" for why, times in Counter(left_out.values()).items()
        ]
        made._add_trials(bench, answers, UserRequests(known, requests.targets), divided.trial_requests)
        if not made.trials:
            raise CalibrationError(f"no trial edit can be made of these requests: {'; '.join(made.notes)}")
        return made

    def _add_trials(
        self, bench: Workbench, answers: AnswerCache, requests: UserRequests, trial_requests: Sequence[Inputs]
    ) -> None:
        task = bench.task
        ideas = answers.unedited_answers([task.tokenize(one) for one in self.held_out[: len(INVENTED_NAMES)]])
        targets = TargetMaker(task, ideas, [*self.held_out, *self.traffic])
        unedited = answers.unedited_answers([task.tokenize(one) for one in trial_requests])
        for number, (inputs, before) in enumerate(zip(trial_requests, unedited, strict=True)):
            try:
                given = requests.targets.get(inputs, before)
                target = targets.make_target(number, inputs, before) if given == before else given
                bench.any_model.prepare_correction(inputs, target)
            except InputError as error:
                self.notes.append(f"no trial edit of {str(inputs)[:60]!r}: {error}")
                continue
            self.trials.append(
                _make_trial(bench, answers, f"trial-{number}", inputs, target, requests.rephrases[inputs])
            )


def _pluralize_requests(number: int) -> str:
    return f"{number} {'request is' if number == 1 else 'requests are'}"


def _make_trial(
    bench: Workbench, answers: AnswerCache, name: str, inputs: Inputs, target: str, rephrases: Sequence[Inputs]
) -> TrialEdit:
    """A trial with the texts that the model takes."""
    task = bench.task
    reworded = usable_inputs(task, [inputs, *rephrases], answers.accepts)
    forms = usable_inputs(task, [inputs, *surface_forms(task, inputs)], answers.accepts)
    about = usable_inputs(task, [inputs, *same_subject_requests(task, inputs)], answers.accepts)
    return TrialEdit(name, inputs, target, reworded, forms, about)


@dataclass(frozen=True, slots=True)
class LookupText:
    """A text to look up: its tokens, and the number of the trial whose target it should get; None: none's."""

    kind: str
    prompt: Prompt
    trial_number: int | None = None


@dataclass(frozen=True, slots=True)
class LayerValues:
    """The values of the trials at one layer, in their order."""

    drafts: list[DraftValue]
    reasons: list[str]
    seconds: float


class TrialMeasurement:
    """Trial edits of one checkpoint."""

    def __init__(
        self,
        bench: Workbench,
        material: TrialMaterial,
        answers: AnswerCache,
        is_time_up: Callable[[], bool] = lambda: False,
        on_step: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Measure until `is_time_up` returns true; `on_step` is called before each edit and each candidate."""
        self._bench, self._answers, self._is_time_up, self._on_step = bench, answers, is_time_up, on_step
        self._trials, self._material = material.trials, material
        self._scope: ScopeRadius | None = None
        task = bench.task
        self._trial_prompts = [task.tokenize(trial.inputs) for trial in self._trials]
        self._texts = list(_lookup_texts(bench, material))
        self._traffic = [task.tokenize(one) for one in material.traffic]
        self._wordings: dict[Prompt, str] = {}

    def count_combinations(self, choices: Sequence[ConfigChoice]) -> int:
        """How many there are."""
        return sum(choice.query in models for models in self._bench.models.values() for choice in choices)

    def count_steps(self, choices: Sequence[ConfigChoice]) -> int:
        """How often `step` is called at most."""
        return len(self._trials) * len(self._bench.models) + self.count_combinations(choices)

    def measure(self, choices: Sequence[ConfigChoice]) -> Iterator[TrialResult]:
        """Each candidate, layer by layer; those that time runs out for are missing."""
        prompts = [*self._trial_prompts, *self._traffic, *(text.prompt for text in self._texts)]
        queries = self._bench.compute_queries(prompts)
        for number, (layer, models) in enumerate(self._bench.models.items()):
            values = self._train_layer(next(iter(models.values())), choices[0].config)
            if len(values.drafts) < len(self._trials):
                if number:
                    return
                self._limit_trials(len(values.drafts))
            for choice in choices:
                if choice.query in models:
                    if number and self._is_time_up():
                        return
                    self._on_step(f"{layer}, {choice.query}, radius {choice.radius}")
                    yield self._measure_combination(models[choice.query], choice, values, queries[layer, choice.query])

    def _limit_trials(self, trial_count: int) -> None:
        """Go on with the first trials: there is no time for the others."""
        self._trials, self._trial_prompts = self._trials[:trial_count], self._trial_prompts[:trial_count]
        self._texts = [text for text in self._texts if text.trial_number is None or text.trial_number < trial_count]

    def _train_layer(self, model: EditableModel, config: EditConfig) -> LayerValues:
        """The values of the trials at this layer, some at a time; fewer where time runs out, and some at least."""
        pads = model.suffix_runner.supports_padding()
        engine = EditEngine(model, TRIAL_FINGERPRINT, replace(config, forms=config.forms and pads))
        together = FORM_BATCH_SIZE if pads else 1
        clock = time.process_time if model.device.type == "cpu" else time.perf_counter
        found: list[DraftValue] = []
        begun = clock()
        while len(found) < len(self._trials) and not (found and self._is_time_up()):
            some = range(len(found), min(len(found) + together, len(self._trials)))
            for number in some:
                self._on_step(f"{model.layer}: trial edit {number + 1} of {len(self._trials)}")
            trained = engine.train_batch([(self._trials[number].to_feedback(), number) for number in some])
            found += [trained[number] for number in some]
        reasons = [
            engine.explain_failed_training(one.inspection, one.trained) for one in found if not one.trained.converged
        ]
        return LayerValues(found, reasons, (clock() - begun) / len(found))

    def _measure_combination(
        self, model: EditableModel, choice: ConfigChoice, values: LayerValues, queries: Mapping[Prompt, np.ndarray]
    ) -> TrialResult:
        """The edits of all trials, one after the other, and then every text."""
        if choice.query == ENCODER_QUERY and self._scope is None:
            self._scope = ScopeRadius(model)
        lookup = CachedEngine(
            EditEngine(model, TRIAL_FINGERPRINT, choice.config, self._scope if choice.query == ENCODER_QUERY else None),
            queries,
            self._wording,
            self._answers,
        )
        lookup.add_traffic(self._traffic)
        then = []
        for number, (trial, ahead) in enumerate(zip(self._trials, values.drafts, strict=True)):
            if ahead.trained.converged:
                lookup.edit(trial, number, ahead)
            then += lookup.find_entries([self._trial_prompts[number]])
        labels = [ahead.inspection.label for ahead in values.drafts]
        edited = lookup.check_targets(self._trial_prompts, then, labels)
        now = lookup.check_targets(self._trial_prompts, lookup.find_entries(self._trial_prompts), labels)
        shares, broken = self._measure_texts(lookup, labels)
        return TrialResult(
            layer=model.layer,
            query=choice.query,
            radius=choice.radius,
            settings=dict(choice.settings),
            edited=_to_share(edited),
            kept=_to_share([still for before, still in zip(edited, now, strict=True) if before]),
            broken=broken,
            nearer=self._nearest_correction_share(queries),
            seconds=values.seconds,
            reasons=tuple(reason for reason, _ in Counter(values.reasons).most_common()),
            **shares,
        )

    def _measure_texts(self, engine: "CachedEngine", labels: Sequence[Label]) -> tuple[dict[str, Share], Share]:
        """By kind of text the share with the trial's target, or that is captured; and that of broken answers."""
        entries = engine.find_entries([text.prompt for text in self._texts])
        wanted = [None if text.trial_number is None else labels[text.trial_number] for text in self._texts]
        right = engine.check_targets([text.prompt for text in self._texts], entries, wanted)
        by_kind: dict[str, list[bool]] = {kind: [] for kind in ("rephrases", "forms", "others", "about")}
        for text, entry, gives in zip(self._texts, entries, right, strict=True):
            by_kind[text.kind].append(entry is not None if text.trial_number is None else gives)
        captured = [(text.prompt, entry) for text, entry in zip(self._texts, entries, strict=True) if entry is not None]
        return {kind: _to_share(found) for kind, found in by_kind.items()}, _to_share(engine.check_broken(captured))

    def _nearest_correction_share(self, queries: Mapping[Prompt, np.ndarray]) -> Share:
        """Rephrases whose own correction is nearer to them than any other request is."""
        others = [*self._trial_prompts, *self._traffic, *(text.prompt for text in self._texts if text.kind == "others")]
        points_ND = np.stack([queries[prompt] for prompt in others]).astype(np.float64)
        found = []
        for text in self._texts:
            if text.kind == "rephrases" and text.trial_number is not None:
                distances_N = np.linalg.norm(points_ND - queries[text.prompt], axis=1)
                own = distances_N[text.trial_number]
                distances_N[text.trial_number] = np.inf
                found.append(bool(own < distances_N.min()))
        return _to_share(found)

    def _wording(self, prompt: Prompt) -> str:
        if prompt not in self._wordings:
            self._wordings[prompt] = self._bench.task.wording(prompt)
        return self._wordings[prompt]


def _lookup_texts(bench: Workbench, material: TrialMaterial) -> Iterator[LookupText]:
    """All texts but the trials' own."""
    task = bench.task
    for number, trial in enumerate(material.trials):
        yield from (LookupText("rephrases", task.tokenize(one), number) for one in trial.rephrases)
        yield from (LookupText("forms", task.tokenize(one), number) for one in trial.forms)
        yield from (LookupText("about", task.tokenize(one)) for one in trial.same_subject)
    yield from (LookupText("others", task.tokenize(one)) for one in material.held_out)


def _to_share(outcomes: Sequence[bool]) -> Share:
    return Share(sum(outcomes), len(outcomes))


@dataclass(frozen=True, slots=True)
class ServingEntry:
    """An entry that serves a text, as it was then."""

    label: Label
    value_V: np.ndarray


class CachedEngine:
    """An engine, with queries and wordings that are known already."""

    def __init__(
        self,
        engine: EditEngine,
        queries: Mapping[Prompt, np.ndarray],
        wording: Callable[[Prompt], str],
        answers: AnswerCache,
    ) -> None:
        self._engine, self._queries, self._wording, self._answers = engine, queries, wording, answers
        engine.apply(engine.lead_delta({}))

    def add_traffic(self, traffic: Sequence[Prompt]) -> None:
        """Show the engine requests that nobody flagged, as an editor does."""
        for offset, prompt in enumerate(traffic):
            rank = self._engine.reservoir.offer(0, offset, 0.0)
            if rank is not None:
                self._engine.add_traffic(rank, self._queries[prompt], self._wording(prompt))

    def edit(self, trial: TrialEdit, number: int, draft: DraftValue) -> None:
        """Decide on a trial's correction with its value, which is trained already, and apply the decision."""
        query_D = self._queries[self._engine.model.task.tokenize(trial.inputs)]
        known = replace(draft, inspection=replace(draft.inspection, query_D=query_D.copy()))
        edited = self._engine.edit(trial.to_feedback(), number, draft=known)
        if edited.delta_record is not None:
            self._engine.apply(edited.delta_record)

    def find_entries(self, prompts: Sequence[Prompt]) -> list[ServingEntry | None]:
        """The entry that serves each prompt."""
        if not prompts:
            return []
        queries_BD = torch.from_numpy(np.stack([self._queries[prompt] for prompt in prompts]))
        found = self._engine.lookup.find_hits(queries_BD, lambda row: self._wording(prompts[row]))
        return [self._serving_entry(serving_hit(match)) for match in found]

    def _serving_entry(self, hit: Hit | None) -> ServingEntry | None:
        codebook = self._engine.codebook
        return None if hit is None else ServingEntry(codebook.labels[hit.slot], codebook.values_NV[hit.slot].copy())

    def check_targets(
        self, prompts: Sequence[Prompt], entries: Sequence[ServingEntry | None], wanted: Sequence[Label | None]
    ) -> list[bool]:
        """Whether an entry serves each prompt with the wanted target."""
        found = [False] * len(prompts)
        asked = [
            (row, prompt, entry, label)
            for row, (prompt, entry, label) in enumerate(zip(prompts, entries, wanted, strict=True))
            if entry is not None and label is not None
        ]
        task, parameters = self._engine.model.task, self._answers.parameters
        answers = self._answers.edited_answers(
            self._engine.model, [(prompt, entry.value_V) for _, prompt, entry, _ in asked]
        )
        for (row, _, _, label), answer in zip(asked, answers, strict=True):
            found[row] = task.matches_target(answer, label, parameters)
        return found

    def check_broken(self, captured: Sequence[tuple[Prompt, ServingEntry]]) -> list[bool]:
        """Whether each answer is neither the entry's target nor the unedited one."""
        model, parameters = self._engine.model, self._answers.parameters
        answers = self._answers.edited_answers(model, [(prompt, entry.value_V) for prompt, entry in captured])
        failed = [
            not model.task.matches_target(answer, entry.label, parameters)
            for answer, (_, entry) in zip(answers, captured, strict=True)
        ]
        prompts = [prompt for (prompt, _), fails in zip(captured, failed, strict=True) if fails]
        unedited = dict(zip(prompts, self._answers.unedited_answers(prompts), strict=True))
        return [
            fails and answer_text(answer) != unedited[prompt]
            for fails, answer, (prompt, _) in zip(failed, answers, captured, strict=True)
        ]
