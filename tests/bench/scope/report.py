"""Apply the methods to the streams, and yield the rows of the report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean

from gracestream.pipeline.experiments.data import DataError
from gracestream.pipeline.experiments.plots import require_matplotlib
from gracestream.pipeline.settings import load_settings
from tests.bench.edits import TrainedValues
from tests.bench.framework import BenchError, Options, Row
from tests.bench.scope.cases import Case, Part, Stream
from tests.bench.scope.methods import METHODS, Answer, EditedModel, UneditedAnswers, open_method
from tests.bench.scope.streams import STREAMS
from tests.bench.scope.verdicts import Verdict, share_with_interval, verdict

EDITS = {"zsre": 60, "counterfact": 60, "knowedit": 60, "pairs": 100, "intents": 60}
"""Corrections of each stream."""

FORM_EDITS, QUICK_EDITS = 24, 6
"""Corrections with forms made by rules; corrections of each stream with `--quick`."""

CHECKED_PROMPTS = 16
"""Uncaptured prompts for the comparison with the unedited model's answers."""

MEASURES = ("captured", "answered", "correct", "near_miss", "broken", "repeats", "elsewhere")

GOALS: Mapping[tuple[str, str], float] = {
    ("itself", "correct"): 1.0,
    ("relation", "captured"): 0.05,
    ("relation", "answered"): 0.03,
    ("neighbour", "captured"): 0.02,
    **{(kind, "correct"): 0.95 for kind in ("upper", "lower", "space", "newline", "typo", "instruction", "context")},
    ("chat", "correct"): 0.9,
    ("question", "correct"): 0.8,
    ("pair", "answered"): 0.1,
    ("unrelated", "captured"): 0.0,
}
"""Goals for all streams, by kind and measure."""

PARAPHRASE_GOALS = {"zsre": 0.92, "counterfact": 0.82}
"""Goals for correct paraphrases, by stream."""

POOLED_KINDS = {
    "relation": "relation (all)",
    "restatement": "relation (all)",
    **dict.fromkeys(("upper", "lower", "space", "newline", "punctuation", "typo"), "surface form"),
}
"""Kinds with a joint row, and the name of that row."""

CURVE_KINDS = {
    "paraphrase", "surface form", "relation", "subject", "neighbour", "pair", "unrelated", "utterance", "other intent",
}  # fmt: skip
"""Kinds with a curve of the share captured over the threshold."""


def run(options: Options) -> Iterator[Row]:
    """The rows of `scope`, stream by stream. A stream without data is skipped, and the reason is reported."""
    if options.only and options.only not in STREAMS:
        raise BenchError(f"no stream is named {options.only!r}; the names are {', '.join(STREAMS)}")
    require_matplotlib()
    part: Part = "development" if options.development else "held-out"
    skipped: list[DataError] = []
    names = [options.only] if options.only else list(STREAMS)
    for name in names:
        edits, forms = (QUICK_EDITS, QUICK_EDITS) if options.quick else (EDITS[name], FORM_EDITS)
        try:
            stream = STREAMS[name](part, edits, forms)
        except DataError as error:
            options.report(f"{name}: skipped: {error}")
            skipped.append(error)
            continue
        for row in stream_rows(stream, options):
            yield replace(row, name=f"development {row.name}") if options.development else row
    if len(skipped) == len(names):
        raise BenchError(str(skipped[0]))


def stream_rows(stream: Stream, options: Options) -> Iterator[Row]:
    """The rows of one stream. Equal values of several methods are trained once."""
    settings = load_settings(device=options.device)
    trained_values: TrainedValues = {}
    unedited = UneditedAnswers()
    for method in METHODS:
        if stream.model and "query_source" not in method.settings:
            continue  # a classifier's queries come from the layer by default
        options.report(f"{stream.name}: {method.name}")
        setting = f"corrections/{stream.name}, {method.name}"
        with open_method(method, settings, stream.model, trained_values) as edit:
            edited = edit(stream, unedited)
            yield from cost_rows(setting, edited)
            yield from curve_rows(stream, edited, method.name, method.curves)
            options.report(f"{stream.name}: {method.name}: {len(stream.cases)} cases")
            verdicts = judge(edited, stream.cases)
            yield from verdict_rows(stream, method.name, verdicts)
            yield from check_rows(setting, edited, stream.cases)


def judge(edited: EditedModel, cases: Sequence[Case]) -> list[Verdict]:
    """The verdict on each case. Only answers that can change a verdict are generated."""
    prompts = list(map(edited.prompt, cases))
    serving_entries = edited.serving_entries(prompts)
    captured = [place for place, entry in enumerate(serving_entries) if entry is not None]
    answers = dict(zip(captured, edited.answers([prompts[place] for place in captured]), strict=True))
    # A captured positive with the target as its answer is correct whatever the unedited model answers. An uncaptured
    # negative gets the unedited model's answer, so it is correct.
    unedited_needed = [
        place
        for place, case in enumerate(cases)
        if (place in answers) != case.applies or (place in answers and answers[place].text != case.target)
    ]
    unedited_answers = dict(
        zip(unedited_needed, edited.unedited([prompts[place] for place in unedited_needed]), strict=True)
    )
    found = []
    for place, (case, entry) in enumerate(zip(cases, serving_entries, strict=True)):
        unedited = unedited_answers.get(place, "")
        answer = answers.get(place, Answer(unedited))
        own_entry = None if case.edit is None else edited.own_entry(case.edit)
        elsewhere = entry is not None and own_entry is not None and entry.entry_id != own_entry
        serving = None if entry is None else edited.target(entry)
        found.append(verdict(case, answer.text, unedited, serving, near_miss=answer.near_miss, elsewhere=elsewhere))
    return found


def verdict_rows(stream: Stream, method: str, verdicts: Sequence[Verdict]) -> Iterator[Row]:
    """The rows of each kind, in the order of the cases."""
    for kind, places in group_by_kind(stream).items():
        of_kind = [verdicts[place] for place in places]
        setting = f"{stream.name}/{method}/{kind}"
        yield Row(f"{setting}/cases", len(of_kind), "count")
        for measure in MEASURES:
            share, interval, _ = share_with_interval(getattr(found, measure) for found in of_kind)
            yield Row(f"{setting}/{measure}", share, "share", goal_of(stream.name, kind, measure), interval)


def group_by_kind(stream: Stream) -> dict[str, list[int]]:
    """The positions of the cases of each kind, and of the joint kinds."""
    found: dict[str, list[int]] = {}
    for place, case in enumerate(stream.cases):
        found.setdefault(case.kind, []).append(place)
        pooled = POOLED_KINDS.get(case.kind)
        if stream.name == "pairs" and not case.applies:
            pooled = "pair"
        if pooled:
            found.setdefault(pooled, []).append(place)
    return found


def goal_of(stream: str, kind: str, measure: str) -> float | None:
    """The goal of a measure, if it has one."""
    if measure == "broken":
        return 0.0
    if (kind, measure) == ("paraphrase", "correct"):
        return PARAPHRASE_GOALS.get(stream)
    return GOALS.get((kind, measure))


def cost_rows(setting: str, edited: EditedModel) -> Iterator[Row]:
    """Rows of the results of corrections."""
    cost = edited.cost
    yield Row(f"{setting}/made", len(cost.statuses), "count")
    yield Row(f"{setting}/rejected", cost.statuses.count("rejected"), "count")
    yield Row(f"{setting}/entries", len(edited.engine.codebook), "count")
    if cost.seconds:
        yield Row(f"{setting}/seconds", mean(cost.seconds), "s")


def curve_rows(stream: Stream, edited: EditedModel, method: str, curve: Sequence[float]) -> Iterator[Row]:
    """The share of each kind captured at each threshold, with and without the limit by traffic."""
    prompts = list(map(edited.prompt, stream.cases))
    for name, limit_by_traffic in ((f"{method}, held", True), (f"{method}, no traffic", False)):
        found = edited.thresholds(prompts, limit_by_traffic=limit_by_traffic)
        for kind, places in group_by_kind(stream).items():
            for threshold in curve if kind in CURVE_KINDS else ():
                share, interval, _ = share_with_interval(bool(found[place] < threshold) for place in places)
                setting = f"curve {stream.name} {kind}/{name}/{threshold:g}"
                yield Row(f"{setting}/captured", share, "share", None, interval)
        if limit_by_traffic and curve:
            radius = edited.engine.config.radius
            served = [entry is not None for entry in edited.serving_entries(prompts)]
            agrees = [bool(one < radius) == is_served for one, is_served in zip(found, served, strict=True)]
            yield Row(f"corrections/{stream.name}, {method}/agrees", mean(agrees), "share")


def check_rows(setting: str, edited: EditedModel, cases: Sequence[Case]) -> Iterator[Row]:
    """The row that compares answers to uncaptured prompts with the unedited model's."""
    prompts = list(map(edited.prompt, cases))
    uncaptured = [
        prompt for prompt, entry in zip(prompts, edited.serving_entries(prompts), strict=True) if entry is None
    ]
    sample = uncaptured[:: max(1, len(uncaptured) // CHECKED_PROMPTS)][:CHECKED_PROMPTS]
    if sample:
        pairs = zip(edited.answers(sample), edited.unedited(sample), strict=True)
        yield Row(f"{setting}/same", mean(now.text == unedited_answers for now, unedited_answers in pairs), "share")
