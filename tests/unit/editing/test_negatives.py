"""A radius from other requests about a correction's subject."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.editing.negatives import (
    LONG_TEXT_CHARS,
    MIN_REQUESTS,
    RADIUS_SHARES,
    TEMPLATES_FOR_LONG_TEXT,
    TEMPLATES_PER_RADIUS,
    draw_templates,
    other_requests,
    radius_from_distances,
    radius_share,
    scope_radius,
)
from gracestream.pipeline.model.sentence_encoder import ENCODER_MAX_RADIUS
from gracestream.pipeline.wording.relations import SUBJECT_PLACEHOLDER, relation_templates

DISTANCES = st.lists(st.floats(0, 2), min_size=MIN_REQUESTS, max_size=60)
ALPHAS = st.floats(RADIUS_SHARES[0][0], RADIUS_SHARES[-1][0])
ASKED = "Question: Where was Petteri Pennanen born? Answer:"


def test_other_requests_are_about_the_subject_and_stand_in_the_same_frame() -> None:
    found = other_requests(ASKED)
    assert len(found) == len(set(found)) == TEMPLATES_PER_RADIUS
    assert all(one.startswith("Question: ") and one.endswith(" Answer:") and "Petteri Pennanen" in one for one in found)


def test_templates_are_of_different_relations_while_there_are_some_and_of_all_in_the_end() -> None:
    of = {one: place for place, row in enumerate(relation_templates()) for one in row}  # a few stand in two
    for subject in ("Kenya", "an international transfer"):
        found = draw_templates(subject)
        assert len({of[one] for one in found}) >= TEMPLATES_PER_RADIUS - 2
        assert draw_templates(subject) == found
        assert draw_templates(subject, 10) == found[:10]
        assert sorted(draw_templates(subject, 10_000)) == sorted(of)
    assert draw_templates("Kenya") != draw_templates("Peru")


@given(st.text())
def test_any_text_has_other_requests_or_none(text: str) -> None:
    found = other_requests(text)
    assert text not in found
    assert found == other_requests(text)
    assert not any(SUBJECT_PLACEHOLDER in one for one in found) or SUBJECT_PLACEHOLDER in text


@given(DISTANCES, st.floats(0, 2), ALPHAS)
def test_no_radius_grows_by_a_nearer_request(distances: list[float], nearer: float, alpha: float) -> None:
    before = radius_from_distances(distances, alpha)
    assert before is not None
    assert before <= radius_share(alpha) * ENCODER_MAX_RADIUS
    unit = float(np.quantile(distances, 0.0)) * nearer / 2
    after = radius_from_distances([*distances, unit], alpha)
    assert after is not None
    assert after <= before + 1e-12


@given(DISTANCES, ALPHAS, ALPHAS)
def test_a_larger_alpha_makes_no_radius_smaller(distances: list[float], one: float, other: float) -> None:
    first, second = radius_from_distances(distances, min(one, other)), radius_from_distances(distances, max(one, other))
    assert first is not None
    assert second is not None
    assert first <= second


def test_too_few_requests_or_no_subject_make_no_radius() -> None:
    assert radius_from_distances([0.5] * (MIN_REQUESTS - 1), 0.05) is None
    assert radius_from_distances([], 0.05) is None
    assert scope_radius(placed, "?", np.zeros(2, np.float32), 0.05) is None


def placed(texts: Sequence[str]) -> np.ndarray:
    """At growing distances; two of them are nowhere."""
    queries_ND = np.stack([np.arange(len(texts)) / len(texts), np.zeros(len(texts))], axis=1).astype(np.float32)
    queries_ND[-2:] = np.nan
    return queries_ND


def test_the_radius_is_a_share_of_the_distance_to_the_nearer_ones() -> None:
    expected = radius_from_distances([place / TEMPLATES_PER_RADIUS for place in range(TEMPLATES_PER_RADIUS - 2)], 0.05)
    assert scope_radius(placed, ASKED, np.zeros(2, np.float32), 0.05) == pytest.approx(expected)


def test_a_long_text_takes_fewer_requests() -> None:
    asked: list[int] = []

    def counted(texts: Sequence[str]) -> np.ndarray:
        asked.append(len(texts))
        return placed(texts)

    for text in (ASKED, "The town has an old archive. " * (LONG_TEXT_CHARS // 20) + ASKED):
        assert scope_radius(counted, text, np.zeros(2, np.float32), 0.05) is not None
    assert asked == [TEMPLATES_PER_RADIUS, TEMPLATES_FOR_LONG_TEXT]
