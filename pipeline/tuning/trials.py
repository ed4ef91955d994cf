"""Trial edits under each combination of layer, kind of query and radius, and the shares of texts that they reach.

1. The shares are measured with the editor's engine and with the lookup that replicas run.
2. Values are trained once per layer. Other kinds of query and other radii only repeat the lookups.
3. The engine never sees the texts that must not change when it chooses a radius.

Not promised: the same shares in a deployment with other requests. The intervals cover sampling error only.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from msgspec import Struct

from gracestream.pipeline.codebook import FoundEntry, Label, if_serving
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
from gracestream.pipeline.tuning.trial_texts import (
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
    """A kind of query with a radius.

    Attributes:
        query: The kind of query, as in GRACESTREAM_QUERY_SOURCE.
        radius: The radius as printed to the user.
        settings: The settings that differ from the defaults, without the layer.
        config: The editor's configuration with these settings.
    """

    query: str
    radius: str
    settings: Mapping[str, object]
    config: EditConfig


class Share(Struct, frozen=True):
    """A share of cases: `count` of `of` cases."""

    count: int
    of: int

    @property
    def value(self) -> float:
        """The share from 0 to 1; 0 if there are no cases."""
        return self.count / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval."""
        return wilson_interval(self.count, self.of)


class TrialResult(Struct, frozen=True):
    """The measurement of one combination.

    Attributes:
        layer: The edited layer.
        query: The kind of query.
        radius: The radius as printed to the user.
        settings: The settings that differ from the defaults, without the layer.
        edited: Trial edits after which the model predicted the target.
        kept: Successful trial edits that still hold after the last edit.
        rephrases: Rephrases of trials that got the target.
        forms: Surface forms of trials that got the target.
        others: Held-out requests that an entry captures.
        about: Other requests about a trial's subject that an entry captures.
        broken: Captured texts whose answer is neither the entry's target nor the unedited answer.
        nearer: Rephrases that are nearer to their own correction than to any other request.
        seconds: Mean training time of a value in a batch: CPU seconds on a CPU, else wall-clock seconds.
        reasons: Reasons why value training failed, the most frequent first.
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
        """The mean of the shares of rephrases and of forms that get the target; without both the share `edited`."""
        kinds = [share.value for share in (self.rephrases, self.forms) if share.of]
        return sum(kinds) / len(kinds) if kinds else self.edited.value

    @property
    def false_positives(self) -> float:
        """The larger of the two shares of wrongly captured requests."""
        return max(self.others.value, self.about.value)


@dataclass(slots=True)
class TrialMaterial:
    """Trial edits and other texts that the model can take; `notes` names what was left out, and why."""

    trials: list[TrialEdit]
    held_out: list[Inputs]
    traffic: list[Inputs]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def from_requests(
        cls, bench: Workbench, answers: AnswerCache, requests: UserRequests, trial_count: int
    ) -> "TrialMaterial":
        """Make at most `trial_count` trials of these requests.

        Raises:
            CalibrationError: too few requests are usable, or none can become a trial.
        """
        left_out = {
            inputs: reason for inputs in requests.rephrases if (reason := answers.explain_rejection(inputs)) is not None
        }
        usable = {inputs: rephrases for inputs, rephrases in requests.rephrases.items() if inputs not in left_out}
        division = UserRequests(usable, requests.targets).divide(trial_count)
        material = cls([], division.held_out, division.traffic)
        material.notes += [
            f"{_pluralize_requests(times)} left out: {reason}" for reason, times in Counter(left_out.values()).items()
        ]
        material._add_trials(bench, answers, UserRequests(usable, requests.targets), division.trial_requests)
        if not material.trials:
            raise CalibrationError(f"no trial edit can be made of these requests: {'; '.join(material.notes)}")
        return material

    def _add_trials(
        self, bench: Workbench, answers: AnswerCache, requests: UserRequests, trial_requests: Sequence[Inputs]
    ) -> None:
        task = bench.task
        held_out_answers = answers.unedited_answers(
            [task.tokenize(text) for text in self.held_out[: len(INVENTED_NAMES)]]
        )
        targets = TargetMaker(task, held_out_answers, [*self.held_out, *self.traffic])
        unedited = answers.unedited_answers([task.tokenize(text) for text in trial_requests])
        for number, (inputs, unedited_answer) in enumerate(zip(trial_requests, unedited, strict=True)):
            try:
                # A target equal to the unedited answer would need no edit, so such a request gets a made target, too.
                wanted = requests.targets.get(inputs, unedited_answer)
                target = targets.make_target(number, inputs, unedited_answer) if wanted == unedited_answer else wanted
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
    """A trial with those of its texts that the model can answer."""
    task = bench.task
    usable_rephrases = usable_inputs(task, [inputs, *rephrases], answers.is_usable)
    forms = usable_inputs(task, [inputs, *surface_forms(task, inputs)], answers.is_usable)
    about = usable_inputs(task, [inputs, *same_subject_requests(task, inputs)], answers.is_usable)
    return TrialEdit(name, inputs, target, usable_rephrases, forms, about)


@dataclass(frozen=True, slots=True)
class LookupText:
    """A text to look up.

    Attributes:
        kind: The name of the share that the text counts for.
        prompt: Its tokens.
        trial_number: The trial whose target it should get; None: no entry should capture it.
    """

    kind: str
    prompt: Prompt
    trial_number: int | None = None


@dataclass(frozen=True, slots=True)
class LayerValues:
    """The trained values of one layer.

    Attributes:
        drafts: The draft values, in the order of the trials.
        reasons: The reason of each failed training.
        seconds: Mean seconds of one training.
    """

    drafts: list[DraftValue]
    reasons: list[str]
    seconds: float


class TrialMeasurement:
    """Measures trial edits on one checkpoint."""

    def __init__(
        self,
        bench: Workbench,
        material: TrialMaterial,
        answers: AnswerCache,
        is_time_up: Callable[[], bool] = lambda: False,
        on_step: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Tokenize the material.

        Args:
            bench: The wrapped models.
            material: Trials and other texts.
            answers: The cache of answers, shared by all layers.
            is_time_up: Ends the measurement when it returns true.
            on_step: Called with a description before each training and before each combination.
        """
        self._bench, self._answers, self._is_time_up, self._on_step = bench, answers, is_time_up, on_step
        self._trials, self._material = material.trials, material
        self._scope: ScopeRadius | None = None
        task = bench.task
        self._trial_prompts = [task.tokenize(trial.inputs) for trial in self._trials]
        self._texts = list(_lookup_texts(bench, material))
        self._traffic = [task.tokenize(inputs) for inputs in material.traffic]
        self._wordings: dict[Prompt, str] = {}

    def count_combinations(self, choices: Sequence[ConfigChoice]) -> int:
        """The number of combinations: choices times the layers that support their kind of query."""
        return sum(choice.query in models for models in self._bench.models.values() for choice in choices)

    def count_steps(self, choices: Sequence[ConfigChoice]) -> int:
        """The largest number of calls of `on_step`."""
        return len(self._trials) * len(self._bench.models) + self.count_combinations(choices)

    def measure(self, choices: Sequence[ConfigChoice]) -> Iterator[TrialResult]:
        """The results of the combinations, layer by layer; they end early when the time is up.

        The first layer is measured in any case. If time runs out during its training, fewer trials are measured.
        """
        prompts = [*self._trial_prompts, *self._traffic, *(text.prompt for text in self._texts)]
        queries = self._bench.compute_queries(prompts)
        for layer_number, (layer, models) in enumerate(self._bench.models.items()):
            values = self._train_layer(next(iter(models.values())), choices[0].config)
            if len(values.drafts) < len(self._trials):
                # Shares of fewer trials could not be compared with those of the layers before.
                if layer_number:
                    return
                self._limit_trials(len(values.drafts))
            for choice in choices:
                if choice.query in models:
                    if layer_number and self._is_time_up():
                        return
                    self._on_step(f"{layer}, {choice.query}, radius {choice.radius}")
                    yield self._measure_combination(models[choice.query], choice, values, queries[layer, choice.query])

    def _limit_trials(self, trial_count: int) -> None:
        """Drop all trials but the first `trial_count`, with their texts."""
        self._trials, self._trial_prompts = self._trials[:trial_count], self._trial_prompts[:trial_count]
        self._texts = [text for text in self._texts if text.trial_number is None or text.trial_number < trial_count]

    def _train_layer(self, model: EditableModel, config: EditConfig) -> LayerValues:
        """Train the values of the trials at this layer in batches; stop when the time is up, but after one batch."""
        supports_padding = model.suffix_runner.supports_padding()
        engine = EditEngine(
            model, TRIAL_FINGERPRINT, replace(config, train_prompt_forms=config.train_prompt_forms and supports_padding)
        )
        batch_size = FORM_BATCH_SIZE if supports_padding else 1
        # On a CPU the time of this process alone counts, so that a busy machine does not change the advice.
        clock = time.process_time if model.device.type == "cpu" else time.perf_counter
        drafts: list[DraftValue] = []
        started = clock()
        while len(drafts) < len(self._trials) and not (drafts and self._is_time_up()):
            batch = range(len(drafts), min(len(drafts) + batch_size, len(self._trials)))
            for number in batch:
                self._on_step(f"{model.layer}: trial edit {number + 1} of {len(self._trials)}")
            trained = engine.train_batch([(self._trials[number].to_feedback(), number) for number in batch])
            drafts += [trained[number] for number in batch]
        reasons = [
            engine.explain_failed_training(draft.inspection, draft.trained)
            for draft in drafts
            if not draft.trained.converged
        ]
        return LayerValues(drafts, reasons, (clock() - started) / len(drafts))

    def _measure_combination(
        self, model: EditableModel, choice: ConfigChoice, values: LayerValues, queries: Mapping[Prompt, np.ndarray]
    ) -> TrialResult:
        """Apply the edits of all trials in order, then look up every text."""
        if choice.query == ENCODER_QUERY and self._scope is None:
            self._scope = ScopeRadius(model)
        engine = CachedEngine(
            EditEngine(model, TRIAL_FINGERPRINT, choice.config, self._scope if choice.query == ENCODER_QUERY else None),
            queries,
            self._wording,
            self._answers,
        )
        engine.add_traffic(self._traffic)
        entries_at_edit = []
        for number, (trial, draft) in enumerate(zip(self._trials, values.drafts, strict=True)):
            if draft.trained.converged:
                engine.edit(trial, number, draft)
            entries_at_edit += engine.find_entries([self._trial_prompts[number]])
        labels = [draft.inspection.label for draft in values.drafts]
        edited = engine.check_targets(self._trial_prompts, entries_at_edit, labels)
        holds_at_end = engine.check_targets(self._trial_prompts, engine.find_entries(self._trial_prompts), labels)
        shares, broken = self._measure_texts(engine, labels)
        return TrialResult(
            layer=model.layer,
            query=choice.query,
            radius=choice.radius,
            settings=dict(choice.settings),
            edited=_to_share(edited),
            kept=_to_share([holds for worked, holds in zip(edited, holds_at_end, strict=True) if worked]),
            broken=broken,
            nearer=self._nearest_correction_share(queries),
            seconds=values.seconds,
            reasons=tuple(reason for reason, _ in Counter(values.reasons).most_common()),
            **shares,
        )

    def _measure_texts(self, engine: "CachedEngine", labels: Sequence[Label]) -> tuple[dict[str, Share], Share]:
        """The share of each kind of text, and the share of broken answers among all captured texts.

        For a text of a trial the share counts answers with the trial's target, for any other text its capture.
        """
        entries = engine.find_entries([text.prompt for text in self._texts])
        targets = [None if text.trial_number is None else labels[text.trial_number] for text in self._texts]
        gets_target = engine.check_targets([text.prompt for text in self._texts], entries, targets)
        by_kind: dict[str, list[bool]] = {kind: [] for kind in ("rephrases", "forms", "others", "about")}
        for text, entry, is_target in zip(self._texts, entries, gets_target, strict=True):
            by_kind[text.kind].append(entry is not None if text.trial_number is None else is_target)
        captured = [(text.prompt, entry) for text, entry in zip(self._texts, entries, strict=True) if entry is not None]
        return {kind: _to_share(outcomes) for kind, outcomes in by_kind.items()}, _to_share(
            engine.check_broken(captured)
        )

    def _nearest_correction_share(self, queries: Mapping[Prompt, np.ndarray]) -> Share:
        """The share of rephrases that are nearer to their own correction than to any other request."""
        prompts = [
            *self._trial_prompts,
            *self._traffic,
            *(text.prompt for text in self._texts if text.kind == "others"),
        ]
        # Row i of `points_ND` is the query of trial i, because the trials come first. float64: nearly equal distances
        # keep their order.
        points_ND = np.stack([queries[prompt] for prompt in prompts]).astype(np.float64)
        outcomes = []
        for text in self._texts:
            if text.kind == "rephrases" and text.trial_number is not None:
                distances_N = np.linalg.norm(points_ND - queries[text.prompt], axis=1)
                own_distance = distances_N[text.trial_number]
                distances_N[text.trial_number] = np.inf
                outcomes.append(bool(own_distance < distances_N.min()))
        return _to_share(outcomes)

    def _wording(self, prompt: Prompt) -> str:
        if prompt not in self._wordings:
            self._wordings[prompt] = self._bench.task.wording(prompt)
        return self._wordings[prompt]


def _lookup_texts(bench: Workbench, material: TrialMaterial) -> Iterator[LookupText]:
    """All texts to look up, without the trials' own prompts."""
    task = bench.task
    for number, trial in enumerate(material.trials):
        yield from (LookupText("rephrases", task.tokenize(inputs), number) for inputs in trial.rephrases)
        yield from (LookupText("forms", task.tokenize(inputs), number) for inputs in trial.forms)
        yield from (LookupText("about", task.tokenize(inputs)) for inputs in trial.same_subject)
    yield from (LookupText("others", task.tokenize(inputs)) for inputs in material.held_out)


def _to_share(outcomes: Sequence[bool]) -> Share:
    return Share(sum(outcomes), len(outcomes))


@dataclass(frozen=True, slots=True)
class ServingEntry:
    """The entry that serves a text, copied: a later edit may change the codebook."""

    label: Label
    value_V: np.ndarray


class CachedEngine:
    """An engine whose queries, wordings and answers come from caches."""

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
        """Offer the engine requests as unflagged traffic, as an editor does."""
        for offset, prompt in enumerate(traffic):
            score = self._engine.traffic_sample.offer(0, offset, 0.0)
            if score is not None:
                self._engine.add_traffic(score, self._queries[prompt], self._wording(prompt))

    def edit(self, trial: TrialEdit, number: int, draft: DraftValue) -> None:
        """Decide on a trial's correction with a draft value, and apply the decision."""
        query_D = self._queries[self._engine.model.task.tokenize(trial.inputs)]
        # The draft was trained once per layer; its query depends on the kind of query that is measured.
        with_query = replace(draft, inspection=replace(draft.inspection, query_D=query_D.copy()))
        result = self._engine.edit(trial.to_feedback(), number, draft=with_query)
        if result.delta_record is not None:
            self._engine.apply(result.delta_record)

    def find_entries(self, prompts: Sequence[Prompt]) -> list[ServingEntry | None]:
        """The entry that serves each prompt; None: no entry does."""
        if not prompts:
            return []
        queries_BD = torch.from_numpy(np.stack([self._queries[prompt] for prompt in prompts]))
        found_entries = self._engine.lookup.find_entries(queries_BD, lambda row: self._wording(prompts[row]))
        return [self._serving_entry(if_serving(found)) for found in found_entries]

    def _serving_entry(self, found: FoundEntry | None) -> ServingEntry | None:
        codebook = self._engine.codebook
        return (
            None if found is None else ServingEntry(codebook.labels[found.slot], codebook.values_NV[found.slot].copy())
        )

    def check_targets(
        self, prompts: Sequence[Prompt], entries: Sequence[ServingEntry | None], wanted: Sequence[Label | None]
    ) -> list[bool]:
        """Whether each prompt is served by an entry and gets the wanted target."""
        is_target = [False] * len(prompts)
        served = [
            (row, prompt, entry, label)
            for row, (prompt, entry, label) in enumerate(zip(prompts, entries, wanted, strict=True))
            if entry is not None and label is not None
        ]
        task, parameters = self._engine.model.task, self._answers.parameters
        answers = self._answers.edited_answers(
            self._engine.model, [(prompt, entry.value_V) for _, prompt, entry, _ in served]
        )
        for (row, _, _, label), answer in zip(served, answers, strict=True):
            is_target[row] = task.matches_target(answer, label, parameters)
        return is_target

    def check_broken(self, captured: Sequence[tuple[Prompt, ServingEntry]]) -> list[bool]:
        """Whether each captured prompt gets neither the entry's target nor the unedited answer."""
        model, parameters = self._engine.model, self._answers.parameters
        answers = self._answers.edited_answers(model, [(prompt, entry.value_V) for prompt, entry in captured])
        misses_target = [
            not model.task.matches_target(answer, entry.label, parameters)
            for answer, (_, entry) in zip(answers, captured, strict=True)
        ]
        prompts = [prompt for (prompt, _), misses in zip(captured, misses_target, strict=True) if misses]
        unedited = dict(zip(prompts, self._answers.unedited_answers(prompts), strict=True))
        return [
            misses and answer_text(answer) != unedited[prompt]
            for misses, answer, (prompt, _) in zip(misses_target, answers, captured, strict=True)
        ]
