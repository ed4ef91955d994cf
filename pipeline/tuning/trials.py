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

from gracestream.pipeline.codebook import Hit, Label, serving
from gracestream.pipeline.editing import AT_ONCE, Ahead, CalibrationError, EditEngine, Plan, ScopeRadius
from gracestream.pipeline.model import EditableModel, InputError, Prompt
from gracestream.pipeline.tuning.intervals import wilson
from gracestream.pipeline.tuning.samples import MADE_UP, Requests, Targets, Trial, requests_about, surface_forms, usable
from gracestream.pipeline.tuning.workbench import ENCODER, NAME, Answers, Workbench, said
from gracestream.schemas.messages import Inputs


@dataclass(frozen=True, slots=True)
class Choice:
    """A kind of query with a radius: the plan of an editor, and the settings that differ from the defaults."""

    query: str
    radius: str
    settings: Mapping[str, object]
    plan: Plan


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
        return wilson(self.hits, self.of)


class Tried(Struct, frozen=True):
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
class Material:
    """Trials and other texts, as the model takes them; `notes` say what was left out."""

    trials: list[Trial]
    others: list[Inputs]
    traffic: list[Inputs]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, bench: Workbench, answers: Answers, requests: Requests, count: int) -> "Material":
        """So many trials of these requests, fewer where there are too few.

        Raises:
            CalibrationError: too few requests are left for a trial.
        """
        left_out = {one: why for one in requests.rephrases if (why := answers.why_not(one)) is not None}
        known = {one: words for one, words in requests.rephrases.items() if one not in left_out}
        divided = Requests(known, requests.targets).divided(count)
        made = cls([], divided.others, divided.traffic)
        made.notes += [f"{_requests(times)} left out: {why}" for why, times in Counter(left_out.values()).items()]
        made._add_trials(bench, answers, Requests(known, requests.targets), divided.chosen)
        if not made.trials:
            raise CalibrationError(f"no trial edit can be made of these requests: {'; '.join(made.notes)}")
        return made

    def _add_trials(self, bench: Workbench, answers: Answers, requests: Requests, chosen: Sequence[Inputs]) -> None:
        task = bench.task
        ideas = answers.unedited([task.tokenize(one) for one in self.others[: len(MADE_UP)]])
        targets = Targets(task, ideas, [*self.others, *self.traffic])
        unedited = answers.unedited([task.tokenize(one) for one in chosen])
        for number, (inputs, before) in enumerate(zip(chosen, unedited, strict=True)):
            try:
                given = requests.targets.get(inputs, before)
                target = targets.made(number, inputs, before) if given == before else given
                bench.any_model.supervised(inputs, target)
            except InputError as error:
                self.notes.append(f"no trial edit of {str(inputs)[:60]!r}: {error}")
                continue
            self.trials.append(_trial(bench, answers, f"trial-{number}", inputs, target, requests.rephrases[inputs]))


def _requests(number: int) -> str:
    return f"{number} {'request is' if number == 1 else 'requests are'}"


def _trial(
    bench: Workbench, answers: Answers, name: str, inputs: Inputs, target: str, rephrases: Sequence[Inputs]
) -> Trial:
    """A trial with the texts that the model takes."""
    task = bench.task
    reworded = usable(task, [inputs, *rephrases], answers.taken)
    forms = usable(task, [inputs, *surface_forms(task, inputs)], answers.taken)
    about = usable(task, [inputs, *requests_about(task, inputs)], answers.taken)
    return Trial(name, inputs, target, reworded, forms, about)


@dataclass(frozen=True, slots=True)
class Text:
    """A text to look up: its tokens, and the number of the trial whose target it should get; None: none's."""

    kind: str
    prompt: Prompt
    trial: int | None = None


@dataclass(frozen=True, slots=True)
class Values:
    """The values of the trials at one layer, in their order."""

    ahead: list[Ahead]
    reasons: list[str]
    seconds: float


class Measuring:
    """Trial edits of one checkpoint."""

    def __init__(
        self,
        bench: Workbench,
        material: Material,
        answers: Answers,
        ended: Callable[[], bool] = lambda: False,
        step: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Measure until `ended` says that time is up; `step` is told of each edit and candidate before it is made."""
        self._bench, self._answers, self._ended, self._step = bench, answers, ended, step
        self._trials, self._material = material.trials, material
        self._scope: ScopeRadius | None = None
        task = bench.task
        self._own = [task.tokenize(trial.inputs) for trial in self._trials]
        self._texts = list(_texts(bench, material))
        self._traffic = [task.tokenize(one) for one in material.traffic]
        self._wordings: dict[Prompt, str] = {}

    def candidates(self, choices: Sequence[Choice]) -> int:
        """How many there are."""
        return sum(choice.query in models for models in self._bench.models.values() for choice in choices)

    def steps(self, choices: Sequence[Choice]) -> int:
        """How often `step` is called at most."""
        return len(self._trials) * len(self._bench.models) + self.candidates(choices)

    def tried(self, choices: Sequence[Choice]) -> Iterator[Tried]:
        """Each candidate, layer by layer; those that time runs out for are missing."""
        prompts = [*self._own, *self._traffic, *(text.prompt for text in self._texts)]
        queries = self._bench.queries(prompts)
        for number, (layer, models) in enumerate(self._bench.models.items()):
            values = self._trained(next(iter(models.values())), choices[0].plan)
            if len(values.ahead) < len(self._trials):
                if number:
                    return
                self._shorten(len(values.ahead))
            for choice in choices:
                if choice.query in models:
                    if number and self._ended():
                        return
                    self._step(f"{layer}, {choice.query}, radius {choice.radius}")
                    yield self._candidate(models[choice.query], choice, values, queries[layer, choice.query])

    def _shorten(self, trials: int) -> None:
        """Go on with the first trials: there is no time for the others."""
        self._trials, self._own = self._trials[:trials], self._own[:trials]
        self._texts = [text for text in self._texts if text.trial is None or text.trial < trials]

    def _trained(self, model: EditableModel, plan: Plan) -> Values:
        """The values of the trials at this layer, some at a time; fewer where time runs out, and some at least."""
        pads = model.passes.pads()
        engine = EditEngine(model, NAME, replace(plan, forms=plan.forms and pads))
        together = AT_ONCE if pads else 1
        clock = time.process_time if model.device.type == "cpu" else time.perf_counter
        found: list[Ahead] = []
        begun = clock()
        while len(found) < len(self._trials) and not (found and self._ended()):
            some = range(len(found), min(len(found) + together, len(self._trials)))
            for number in some:
                self._step(f"{model.layer}: trial edit {number + 1} of {len(self._trials)}")
            trained = engine.train_together([(self._trials[number].correction(), number) for number in some])
            found += [trained[number] for number in some]
        reasons = [engine.why_no_value(one.examined, one.trained) for one in found if not one.trained.converged]
        return Values(found, reasons, (clock() - begun) / len(found))

    def _candidate(
        self, model: EditableModel, choice: Choice, values: Values, queries: Mapping[Prompt, np.ndarray]
    ) -> Tried:
        """The edits of all trials, one after the other, and then every text."""
        if choice.query == ENCODER and self._scope is None:
            self._scope = ScopeRadius(model)
        lookup = Lookup(
            EditEngine(model, NAME, choice.plan, self._scope if choice.query == ENCODER else None),
            queries,
            self._wording,
            self._answers,
        )
        lookup.observe(self._traffic)
        then = []
        for number, (trial, ahead) in enumerate(zip(self._trials, values.ahead, strict=True)):
            if ahead.trained.converged:
                lookup.edit(trial, number, ahead)
            then += lookup.entries([self._own[number]])
        labels = [ahead.examined.label for ahead in values.ahead]
        edited = lookup.right(self._own, then, labels)
        now = lookup.right(self._own, lookup.entries(self._own), labels)
        shares, broken = self._shares(lookup, labels)
        return Tried(
            layer=model.layer,
            query=choice.query,
            radius=choice.radius,
            settings=dict(choice.settings),
            edited=_share(edited),
            kept=_share([still for before, still in zip(edited, now, strict=True) if before]),
            broken=broken,
            nearer=self._nearer(queries),
            seconds=values.seconds,
            reasons=tuple(reason for reason, _ in Counter(values.reasons).most_common()),
            **shares,
        )

    def _shares(self, lookup: "Lookup", labels: Sequence[Label]) -> tuple[dict[str, Share], Share]:
        """By kind of text the share with the trial's target, or that is captured; and that of broken answers."""
        entries = lookup.entries([text.prompt for text in self._texts])
        wanted = [None if text.trial is None else labels[text.trial] for text in self._texts]
        right = lookup.right([text.prompt for text in self._texts], entries, wanted)
        by_kind: dict[str, list[bool]] = {kind: [] for kind in ("rephrases", "forms", "others", "about")}
        for text, entry, gives in zip(self._texts, entries, right, strict=True):
            by_kind[text.kind].append(entry is not None if text.trial is None else gives)
        captured = [(text.prompt, entry) for text, entry in zip(self._texts, entries, strict=True) if entry is not None]
        return {kind: _share(found) for kind, found in by_kind.items()}, _share(lookup.broken(captured))

    def _nearer(self, queries: Mapping[Prompt, np.ndarray]) -> Share:
        """Rephrases whose own correction is nearer to them than any other request is."""
        others = [*self._own, *self._traffic, *(text.prompt for text in self._texts if text.kind == "others")]
        points_ND = np.stack([queries[prompt] for prompt in others]).astype(np.float64)
        found = []
        for text in self._texts:
            if text.kind == "rephrases" and text.trial is not None:
                distances_N = np.linalg.norm(points_ND - queries[text.prompt], axis=1)
                own = distances_N[text.trial]
                distances_N[text.trial] = np.inf
                found.append(bool(own < distances_N.min()))
        return _share(found)

    def _wording(self, prompt: Prompt) -> str:
        if prompt not in self._wordings:
            self._wordings[prompt] = self._bench.task.wording(prompt)
        return self._wordings[prompt]


def _texts(bench: Workbench, material: Material) -> Iterator[Text]:
    """All texts but the trials' own."""
    task = bench.task
    for number, trial in enumerate(material.trials):
        yield from (Text("rephrases", task.tokenize(one), number) for one in trial.rephrases)
        yield from (Text("forms", task.tokenize(one), number) for one in trial.forms)
        yield from (Text("about", task.tokenize(one)) for one in trial.about)
    yield from (Text("others", task.tokenize(one)) for one in material.others)


def _share(found: Sequence[bool]) -> Share:
    return Share(sum(found), len(found))


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry that serves a text, as it was then."""

    label: Label
    value_V: np.ndarray


class Lookup:
    """An engine, with queries and wordings that are known already."""

    def __init__(
        self,
        engine: EditEngine,
        queries: Mapping[Prompt, np.ndarray],
        wording: Callable[[Prompt], str],
        answers: Answers,
    ) -> None:
        self._engine, self._queries, self._wording, self._answers = engine, queries, wording, answers
        engine.apply(engine.lead({}))

    def observe(self, traffic: Sequence[Prompt]) -> None:
        """Show the engine requests that nobody flagged, as an editor does."""
        for offset, prompt in enumerate(traffic):
            rank = self._engine.traffic.wants(0, offset, 0.0)
            if rank is not None:
                self._engine.observe(rank, self._queries[prompt], self._wording(prompt))

    def edit(self, trial: Trial, number: int, ahead: Ahead) -> None:
        """Decide on a trial's correction with its value, which is trained already, and apply the decision."""
        query_D = self._queries[self._engine.model.task.tokenize(trial.inputs)]
        known = replace(ahead, examined=replace(ahead.examined, query_D=query_D.copy()))
        edited = self._engine.edit(trial.correction(), number, ahead=known)
        if edited.record is not None:
            self._engine.apply(edited.record)

    def entries(self, prompts: Sequence[Prompt]) -> list[Entry | None]:
        """The entry that serves each prompt."""
        if not prompts:
            return []
        queries_BD = torch.from_numpy(np.stack([self._queries[prompt] for prompt in prompts]))
        found = self._engine.lookup.matches(queries_BD, lambda row: self._wording(prompts[row]))
        return [self._entry(serving(match)) for match in found]

    def _entry(self, hit: Hit | None) -> Entry | None:
        codebook = self._engine.codebook
        return None if hit is None else Entry(codebook.labels[hit.slot], codebook.values_NV[hit.slot].copy())

    def right(
        self, prompts: Sequence[Prompt], entries: Sequence[Entry | None], wanted: Sequence[Label | None]
    ) -> list[bool]:
        """Whether an entry serves each prompt with the wanted target."""
        found = [False] * len(prompts)
        asked = [
            (row, prompt, entry, label)
            for row, (prompt, entry, label) in enumerate(zip(prompts, entries, wanted, strict=True))
            if entry is not None and label is not None
        ]
        task, parameters = self._engine.model.task, self._answers.parameters
        answers = self._answers.edited(self._engine.model, [(prompt, entry.value_V) for _, prompt, entry, _ in asked])
        for (row, _, _, label), answer in zip(asked, answers, strict=True):
            found[row] = task.gives(answer, label, parameters)
        return found

    def broken(self, captured: Sequence[tuple[Prompt, Entry]]) -> list[bool]:
        """Whether each answer is neither the entry's target nor the unedited one."""
        model, parameters = self._engine.model, self._answers.parameters
        answers = self._answers.edited(model, [(prompt, entry.value_V) for prompt, entry in captured])
        failed = [
            not model.task.gives(answer, entry.label, parameters)
            for answer, (_, entry) in zip(answers, captured, strict=True)
        ]
        prompts = [prompt for (prompt, _), fails in zip(captured, failed, strict=True) if fails]
        unedited = dict(zip(prompts, self._answers.unedited(prompts), strict=True))
        return [
            fails and said(answer) != unedited[prompt]
            for fails, answer, (prompt, _) in zip(failed, answers, captured, strict=True)
        ]
