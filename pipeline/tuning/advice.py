"""Which of the tried settings to use, and why a model cannot be edited well.

1. Only settings count whose false positives are at most the stated share and whose trial edits mostly hold.
2. Of these the one with the best reach is chosen; where others reach as much, the one that changes the fewest settings,
   and of these the cheapest.
3. Where no setting counts, a finding names the likely reason and a remedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gracestream.pipeline.tuning.trials import TrialResult
from gracestream.pipeline.tuning.workbench import ENCODER_QUERY

MIN_EDITED_SHARE = 0.5
"""The least share of trial edits that must work."""

REACH_TOLERANCE = 0.02
"""Reaches that differ by less count as equal: with a hundred texts, sampling alone moves them more."""

WEAK_SHARE = 0.5
"""A share of reached texts below which a finding says so."""

MAX_BROKEN_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Advice:
    """The settings to use, if there are any, and what a user should know of them."""

    chosen: TrialResult | None
    findings: list[str]


def advise(results: Sequence[TrialResult], max_false_positives: float, combination_count: int) -> Advice:
    """Choose among what was tried of so many candidates, with false positives of at most `max_false_positives`."""
    if not results:
        return Advice(None, ["Nothing was tried: allow more time with --minutes."])
    advice = _choose(results, max_false_positives)
    if len(results) < combination_count:
        advice.findings.append(
            f"Only {len(results)} of {combination_count} settings were tried: allow more time with --minutes, or"
            " name layers"
            " with --layer."
        )
    return advice


def _choose(results: Sequence[TrialResult], max_false_positives: float) -> Advice:
    fit = [
        one for one in results if one.edited.value >= MIN_EDITED_SHARE and one.false_positives <= max_false_positives
    ]
    if not fit:
        return Advice(None, [_explain_no_choice(results, max_false_positives)])
    best = max(one.reach for one in fit)
    chosen = min(
        (one for one in fit if one.reach >= best - REACH_TOLERANCE),
        key=_cost,
    )
    return Advice(chosen, [*_list_weaknesses(chosen), *_list_uncertainties(chosen, max_false_positives)])


def _cost(result: TrialResult) -> tuple[object, ...]:
    """What a candidate costs: settings to change, then a pass of an encoder for each request, then seconds of an edit.

    Seconds are rounded to tenths: smaller differences are noise.
    """
    return (
        len(result.settings),
        result.query == ENCODER_QUERY,
        round(result.seconds, 1),
        result.false_positives,
        -result.reach,
    )


def rank_results(results: Sequence[TrialResult], advice: Advice, max_false_positives: float) -> list[TrialResult]:
    """The chosen candidate first, then the others: those within the bound before those beyond it, by reach."""
    return sorted(
        results, key=lambda one: (one is not advice.chosen, one.false_positives > max_false_positives, -one.reach)
    )


def _explain_no_choice(results: Sequence[TrialResult], max_false_positives: float) -> str:
    """Why no candidate will do."""
    best = max(results, key=lambda one: one.edited.value)
    if best.edited.value < MIN_EDITED_SHARE:
        return (
            f"The model cannot be edited well here: at the best layer, {best.layer}, {best.edited.hits} of"
            f" {best.edited.of} trial edits gave their target. {_most_frequent_reason(best)}"
        )
    least = min(
        (one for one in results if one.edited.value >= MIN_EDITED_SHARE),
        key=lambda one: (one.false_positives, -one.reach),
    )
    return (
        f"No setting separates corrections from other requests: even the most careful one ({least.layer}, query"
        f" {least.query}, radius {least.radius}) captures {least.false_positives:.0%}, and"
        f" {max_false_positives:.0%} are allowed."
        f" {_describe_separation(results)}"
    )


def _most_frequent_reason(result: TrialResult) -> str:
    """The most frequent reason why values were not found."""
    if not result.reasons:
        return "Their values were found, but the prompts lie outside of every radius: give a larger GRACESTREAM_RADIUS."
    return f"The most frequent reason: {result.reasons[0]}."


def _describe_separation(results: Sequence[TrialResult]) -> str:
    """How well the best query separates rephrases from other requests."""
    most = max(results, key=lambda one: one.nearer.value)
    if not most.nearer.of:
        return "Give a `rephrase` with some requests, so that the distance to other words can be measured."
    if most.nearer.value >= WEAK_SHARE:
        return (
            f"By the queries of {most.query}, {most.nearer.hits} of {most.nearer.of} rephrases lie nearer to their"
            " correction than any other request does, so traffic that the editor sees will keep radii smaller. Allow"
            " more with --false-positives, or send more traffic."
        )
    return (
        f"Rephrases lie no nearer than other requests: only {most.nearer.hits} of {most.nearer.of} do, by the queries"
        f" of {most.query}. Try a sentence encoder that knows this language (GRACESTREAM_ENCODER), or give rephrases"
        " with each correction."
    )


def _list_weaknesses(chosen: TrialResult) -> list[str]:
    """What the chosen settings do badly."""
    found = []
    if chosen.kept.value < 1:
        lost = chosen.kept.of - chosen.kept.hits
        found.append(f"{lost} of {chosen.kept.of} trial edits no longer held after the last one.")
    if chosen.forms.of and chosen.forms.value < WEAK_SHARE:
        found.append(
            f"An edit mostly holds at the exact prompt: {chosen.forms.value:.0%} of its surface forms (capitals,"
            " spaces, marks, a question frame) get the target. Send requests in one fixed form."
        )
    if chosen.rephrases.of and chosen.rephrases.value < WEAK_SHARE:
        found.append(
            f"Other words are reached for {chosen.rephrases.value:.0%} only: give rephrases with a correction"
            " (`gracestream correct --rephrase`)."
        )
    if chosen.broken.value > MAX_BROKEN_SHARE:
        found.append(
            f"{chosen.broken.value:.0%} of the captured texts had a broken answer. Replicas answer these unedited"
            " (GRACESTREAM_CHECK_ANSWERS)."
        )
    return found


def _list_uncertainties(chosen: TrialResult, max_false_positives: float) -> list[str]:
    """What the requests are too few to tell."""
    found = []
    if not chosen.rephrases.of:
        found.append("No request has a `rephrase`, so the reach of other words is not known.")
    if chosen.others.interval[1] > max_false_positives:
        found.append(
            f"Of {chosen.others.of} other requests {chosen.others.hits} were captured; the true share may be up to"
            f" {chosen.others.interval[1]:.0%}. Add requests to know it better."
        )
    return found
