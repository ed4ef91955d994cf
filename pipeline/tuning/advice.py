"""Choosing among the tried settings, and explaining why a model cannot be edited well.

1. A combination is eligible if at least `MIN_EDITED_SHARE` of its trial edits work and its false positives are at most
   the given share.
2. The eligible combination with the best reach is chosen. Among combinations of equal reach (see `REACH_TOLERANCE`) it
   is the one with the fewest changed settings, then the cheapest.
3. If no combination is eligible, a finding names the likely reason and a remedy.

Not promised: that the chosen settings are the best ones. Only combinations that were tried compete.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gracestream.pipeline.tuning.trials import TrialResult
from gracestream.pipeline.tuning.workbench import ENCODER_QUERY

MIN_EDITED_SHARE = 0.5
"""Smallest share of trial edits that must work for a combination to be eligible."""

REACH_TOLERANCE = 0.02
"""Reaches that differ by at most this much count as equal: with a hundred texts, sampling alone moves them more."""

WEAK_SHARE = 0.5
"""Share of reached texts below which a finding warns about the weak reach."""

MAX_BROKEN_SHARE = 0.2
"""Share of broken answers among captured texts above which a finding warns about them."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice to the user.

    Attributes:
        chosen: The combination to use; None: no combination is eligible.
        findings: Sentences for the user: weaknesses of the choice, or the reason for the lack of one.
    """

    chosen: TrialResult | None
    findings: list[str]


def advise(results: Sequence[TrialResult], max_false_positives: float, combination_count: int) -> Advice:
    """Return the advice for the tried combinations.

    Args:
        results: One result for each combination that was tried.
        max_false_positives: Largest share of captured requests that the user tolerates, from 0 to 1.
        combination_count: Number of combinations that could have been tried.
    """
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
    eligible = [
        result
        for result in results
        if result.edited.value >= MIN_EDITED_SHARE and result.false_positives <= max_false_positives
    ]
    if not eligible:
        return Advice(None, [_explain_no_choice(results, max_false_positives)])
    best = max(result.reach for result in eligible)
    chosen = min(
        (result for result in eligible if result.reach >= best - REACH_TOLERANCE),
        key=_cost,
    )
    return Advice(chosen, [*_list_weaknesses(chosen), *_list_uncertainties(chosen, max_false_positives)])


def _cost(result: TrialResult) -> tuple[object, ...]:
    """Sort key of the cost: settings to change, an encoder pass for each request, seconds of an edit, then quality.

    Seconds are rounded to tenths, because smaller differences are within the variation between two runs.
    """
    return (
        len(result.settings),
        result.query == ENCODER_QUERY,
        round(result.seconds, 1),
        result.false_positives,
        -result.reach,
    )


def rank_results(results: Sequence[TrialResult], advice: Advice, max_false_positives: float) -> list[TrialResult]:
    """The chosen combination, then those with tolerated false positives, then the others; each group by reach."""
    return sorted(
        results,
        key=lambda result: (
            result is not advice.chosen,
            result.false_positives > max_false_positives,
            -result.reach,
        ),
    )


def _explain_no_choice(results: Sequence[TrialResult], max_false_positives: float) -> str:
    """The reason why no combination is eligible, with a remedy."""
    best = max(results, key=lambda result: result.edited.value)
    if best.edited.value < MIN_EDITED_SHARE:
        return (
            f"The model cannot be edited well here: at the best layer, {best.layer}, {best.edited.count} of"
            f" {best.edited.of} trial edits gave their target. {_most_frequent_reason(best)}"
        )
    most_careful = min(
        (result for result in results if result.edited.value >= MIN_EDITED_SHARE),
        key=lambda result: (result.false_positives, -result.reach),
    )
    return (
        f"No setting separates corrections from other requests: even the most careful one ({most_careful.layer}, query"
        f" {most_careful.query}, radius {most_careful.radius}) captures {most_careful.false_positives:.0%}, and"
        f" {max_false_positives:.0%} are allowed."
        f" {_describe_separation(results)}"
    )


def _most_frequent_reason(result: TrialResult) -> str:
    """The most frequent reason why value training failed, as a sentence."""
    # No training failed, so the missing edits come from the lookup: an entry's radius does not contain its own prompt.
    if not result.reasons:
        return "Their values were found, but the prompts lie outside every radius: set a larger GRACESTREAM_RADIUS."
    return f"The most frequent reason: {result.reasons[0]}."


def _describe_separation(results: Sequence[TrialResult]) -> str:
    """How well the best kind of query separates rephrases from other requests, with a remedy."""
    best = max(results, key=lambda result: result.nearer.value)
    if not best.nearer.of:
        return "Give a `rephrase` with some requests, so that the distance to rephrases can be measured."
    if best.nearer.value >= WEAK_SHARE:
        return (
            f"By the queries of {best.query}, {best.nearer.count} of {best.nearer.of} rephrases lie nearer to their"
            " correction than any other request does, so traffic that the editor reads will keep radii smaller. Allow"
            " more with --false-positives, or send more traffic."
        )
    return (
        f"Rephrases lie no nearer than other requests: only {best.nearer.count} of {best.nearer.of} do, by the queries"
        f" of {best.query}. Try a sentence encoder that knows this language (GRACESTREAM_ENCODER), or give rephrases"
        " with each correction."
    )


def _list_weaknesses(chosen: TrialResult) -> list[str]:
    """Findings about shares of the chosen combination that are too low or too high."""
    findings = []
    if chosen.kept.value < 1:
        lost_count = chosen.kept.of - chosen.kept.count
        findings.append(f"{lost_count} of {chosen.kept.of} trial edits no longer held after the last one.")
    if chosen.forms.of and chosen.forms.value < WEAK_SHARE:
        findings.append(
            f"An edit mostly holds at the exact prompt: {chosen.forms.value:.0%} of its surface forms (capitals,"
            " spaces, marks, a question frame) get the target. Send requests in one fixed form."
        )
    if chosen.rephrases.of and chosen.rephrases.value < WEAK_SHARE:
        findings.append(
            f"Only {chosen.rephrases.value:.0%} of the rephrases get the target: give rephrases with a correction"
            " (`gracestream correct --rephrase`)."
        )
    if chosen.broken.value > MAX_BROKEN_SHARE:
        findings.append(
            f"{chosen.broken.value:.0%} of the captured texts had a broken answer. Replicas answer these unedited"
            " (GRACESTREAM_CHECK_ANSWERS)."
        )
    return findings


def _list_uncertainties(chosen: TrialResult, max_false_positives: float) -> list[str]:
    """Findings about shares that cannot be estimated well from so few requests."""
    findings = []
    if not chosen.rephrases.of:
        findings.append("No request has a `rephrase`, so the reach to rephrases is not known.")
    if chosen.others.interval[1] > max_false_positives:
        findings.append(
            f"Of {chosen.others.of} other requests {chosen.others.count} were captured; the true share may be up to"
            f" {chosen.others.interval[1]:.0%}. Add requests to estimate it better."
        )
    return findings
