"""A radius of a correction's own, from other requests about its subject (design, section 4).

To a sentence encoder another request about the same subject may be as near as other words for the request, and how near
differs from subject to subject: a long or a rare name is most of what a text says. So requests about a correction's
subject are made from templates of relations, and its radius is a share of the median distance to them.

The shares are those of split conformal prediction. The distance from a correction to another request about its subject,
divided by its own median, was taken for development corrections: to requests from templates that were not among those
of the median, and to those that KnowEdit lists as other relations of the subject. `RADIUS_SHARES` has the quantile
alpha of the stricter of the two. For a correction and another request that are drawn like these, and MiniLM, the chance
that the request lies within the correction's radius is alpha at most. The templates of a correction's own relation
count as other requests here, though they are none, which errs on the careful side.

What is not promised: anything for a single correction, as the chance is over all of them; for another encoder, or for
requests of another kind; or for other subjects. That a request differs from the correction in a year, a number or a
letter of a name is not seen in its distance to requests about the same subject.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from gracestream.pipeline.model import ENCODER_MAX_RADIUS
from gracestream.pipeline.wording import SUBJECT_PLACEHOLDER, extract_request, extract_subject, relation_templates

TEMPLATES_PER_RADIUS = 25
"""Templates that one radius takes; with 45 or 90, measured figures are the same."""

LONG_TEXT_CHARS, TEMPLATES_FOR_LONG_TEXT = 500, 12
"""Characters of a text above which fewer templates do: what stands around the request goes through the encoder with
each of them."""

MIN_REQUESTS = 10
"""Of fewer requests, as where most are too long for the model, no radius is made."""

RADIUS_SHARES = ((0.01, 0.62), (0.02, 0.66), (0.05, 0.72), (0.1, 0.77), (0.2, 0.82))
"""By alpha, the radius as a share of the median, for MiniLM. Between two of them it is interpolated."""


def draw_templates(subject: str, count: int = TEMPLATES_PER_RADIUS) -> list[str]:
    """That many templates, each of another relation while there is one: drawn by a hash of the subject."""
    drawn = sorted(
        (_shuffle_key(subject, one), place, one) for place, row in enumerate(relation_templates()) for one in row
    )
    first = {place: one for _, place, one in reversed(drawn)}.values()
    in_order = [one for _, _, one in drawn]
    return list(dict.fromkeys([*sorted(first, key=in_order.index), *in_order]))[:count]


def other_requests(text: str, count: int = TEMPLATES_PER_RADIUS) -> list[str]:
    """Other requests about the subject of a text, in the same frame; none where it has no subject."""
    subject = extract_subject(text)
    if subject is None:
        return []
    request = extract_request(text)
    made = (
        request.replace_request(template.replace(SUBJECT_PLACEHOLDER, subject))
        for template in draw_templates(subject, count)
    )
    return [one for one in made if one != text]


def radius_share(alpha: float) -> float:
    """The radius as a share of the median distance to other requests, of which alpha lie within it."""
    alphas, shares = np.array(RADIUS_SHARES).T
    return float(np.interp(alpha, alphas, shares))


def radius_from_distances(distances: Sequence[float], alpha: float) -> float | None:
    """A correction's radius by its distances to other requests about its subject; None of too few."""
    if len(distances) < MIN_REQUESTS:
        return None
    return radius_share(alpha) * min(float(np.median(distances)), ENCODER_MAX_RADIUS)


def scope_radius(
    compute_queries: Callable[[Sequence[str]], np.ndarray], text: str, query_D: np.ndarray, alpha: float
) -> float | None:
    """The radius of a correction of this text, whose query is `query_D`; None where no subject is found in it.

    `compute_queries` (N, D) are those that a replica would make of texts; it may leave out some, and need not be
    finite.
    """
    others = other_requests(text, TEMPLATES_PER_RADIUS if len(text) <= LONG_TEXT_CHARS else TEMPLATES_FOR_LONG_TEXT)
    if not others:
        return None
    distances_N = np.linalg.norm(compute_queries(others).astype(np.float64) - query_D, axis=1)
    return radius_from_distances(distances_N[np.isfinite(distances_N)].tolist(), alpha)


def _shuffle_key(subject: str, template: str) -> bytes:
    return hashlib.blake2b(f"{subject}\0{template}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
