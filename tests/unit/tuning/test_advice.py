"""Which candidate is chosen, and what is said where none will do."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.tuning.advice import REACH_TOLERANCE, advise, rank_results
from gracestream.pipeline.tuning.trials import Share, TrialResult

GOOD = TrialResult(
    layer="layers.1", query="last", radius="1", settings={}, edited=Share(12, 12), kept=Share(12, 12),
    rephrases=Share(9, 12), forms=Share(60, 72), others=Share(0, 200), about=Share(1, 96), broken=Share(2, 80),
    nearer=Share(11, 12), seconds=2.0,
)  # fmt: skip


def like(**changes: object) -> TrialResult:
    return msgspec.structs.replace(GOOD, **changes)


def shares(of: int = 40) -> st.SearchStrategy[Share]:
    return st.integers(0, of).map(lambda count: Share(count, of))


candidates = st.builds(
    like, edited=shares(), forms=shares(), rephrases=shares(), others=shares(), about=shares(), kept=shares(),
    seconds=st.floats(0.1, 9), settings=st.dictionaries(st.sampled_from("ab"), st.just(1)),
)  # fmt: skip


@given(st.lists(candidates, max_size=8), st.floats(0, 1))
def test_the_chosen_is_within_the_bound_and_none_there_reaches_more(tried: list[TrialResult], bound: float) -> None:
    advice = advise(tried, bound, 1)
    fit = [one for one in tried if one.false_positives <= bound and one.edited.value >= 0.5]
    assert (advice.chosen is None) == (not fit)
    if advice.chosen is None:
        assert len(advice.findings) == 1
        return
    assert any(one is advice.chosen for one in fit)
    assert all(one.reach <= advice.chosen.reach + REACH_TOLERANCE + 1e-9 for one in fit)
    order = rank_results(tried, advice, bound)
    assert order[0] is advice.chosen
    assert len(order) == len(tried)


def test_of_equal_reach_the_cheapest_is_chosen_and_of_equal_cost_the_first() -> None:
    cheap = like(layer="layers.2", seconds=1.0)
    tried = [GOOD, like(query="encoder", seconds=0.5), cheap, like(layer="layers.3", seconds=0.96)]
    assert advise(tried, 0.05, 1).chosen is cheap


def test_of_equal_reach_the_settings_that_are_there_stay() -> None:
    cheap = like(settings={"layer": "layers.2"}, seconds=0.1)
    assert advise([cheap, GOOD], 0.05, 1).chosen is GOOD
    assert advise([like(forms=Share(70, 72), settings={"layer": "layers.2"}), GOOD], 0.05, 1).chosen is not GOOD


def test_reach_counts_rephrases_and_forms_alike_and_what_there_is_of_them() -> None:
    assert GOOD.reach == pytest.approx((9 / 12 + 60 / 72) / 2)
    assert like(rephrases=Share(0, 0)).reach == pytest.approx(60 / 72)
    assert like(rephrases=Share(0, 0), forms=Share(0, 0)).reach == 1


def test_values_that_are_not_found_have_the_most_frequent_reason() -> None:
    reasons = ("at this layer a value reaches 1 of the target's 3 tokens: edit an earlier one", "training diverged")
    failing = like(edited=Share(3, 12), reasons=reasons)
    advice = advise([failing, like(edited=Share(1, 12), reasons=("other",))], 0.05, 1)
    assert advice.chosen is None
    (finding,) = advice.findings
    assert "3 of 12 trial edits" in finding
    assert "a value reaches 1 of the target's 3 tokens" in finding


def test_an_edit_outside_its_own_radius_is_distinguished_from_one_without_a_value() -> None:
    (finding,) = advise([like(edited=Share(0, 12))], 0.05, 1).findings
    assert "outside every radius" in finding


@pytest.mark.parametrize(
    ("nearer", "said"),
    [
        (Share(2, 12), "lie no nearer than other requests: only 2 of 12"),
        (Share(11, 12), "11 of 12 rephrases lie nearer"),
        (Share(0, 0), "Give a `rephrase`"),
    ],
)
def test_queries_that_do_not_separate_are_said_to(nearer: Share, said: str) -> None:
    (finding,) = advise([like(about=Share(48, 96), nearer=nearer)], 0.05, 1).findings
    assert "even the most careful one (layers.1, query last, radius 1) captures 50%, and 5% are allowed" in finding
    assert said in finding


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kept": Share(10, 12)}, "2 of 12 trial edits no longer held"),
        ({"forms": Share(10, 72)}, "mostly holds at the exact prompt: 14%"),
        ({"rephrases": Share(3, 12)}, "Only 25% of the rephrases get the target"),
        ({"rephrases": Share(0, 0)}, "No request has a `rephrase`"),
        ({"broken": Share(40, 80)}, "50% of the captured texts had a broken answer"),
        ({"others": Share(0, 20)}, "the true share may be up to 16%"),
    ],
)
def test_a_weakness_of_the_chosen_is_named(changes: dict[str, Share], said: str) -> None:
    assert advise([GOOD], 0.05, 1).findings == []
    advice = advise([like(**changes)], 0.05, 1)
    assert advice.chosen is not None
    assert [finding for finding in advice.findings if said in finding] == advice.findings


def test_candidates_that_were_not_tried_are_counted() -> None:
    (finding,) = advise([GOOD], 0.05, 3).findings
    assert finding.startswith("Only 1 of 3 settings were tried: allow more time with --minutes")


def test_where_no_time_was_left_the_remedy_is_more_of_it() -> None:
    assert "--minutes" in advise([], 0.05, 8).findings[0]
