"""The scope radius of a correction, from its distances to other requests about the same subject.

A sentence encoder may place another request about the subject as near as a paraphrase. How near differs from subject to
subject: a long or rare name makes up most of a text's meaning. So templates of relations generate requests about the
subject of a correction. The radius is a share of the median distance to them (docs/explanation/method.md).

The shares come from split conformal prediction (docs/decisions/0001-scope-of-a-correction.md). For development
corrections, the distance to a held-out request about the subject was divided by the median distance of that correction.
The held-out requests came from two sources: other templates, and other relations of the subject in KnowEdit.
`RADIUS_SHARES` holds the quantile alpha of the stricter source.

1. For MiniLM, and a correction and request drawn from these sources, the request lies within the radius with a
   probability of at most alpha.
2. Templates of a correction's own relation count as other requests, although they ask for the same. That can only make
   radii smaller.

Not promised:

- A bound for a single correction: the probability is over all corrections.
- A bound for other encoders, other kinds of requests, or other subjects. A request that differs from the correction in
  a year, a number or a letter of a name may lie nearer than every template.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from gracestream.pipeline.model import ENCODER_MAX_RADIUS
from gracestream.pipeline.wording import SUBJECT_PLACEHOLDER, extract_request, extract_subject, relation_templates

TEMPLATES_PER_RADIUS = 25
"""Templates for one radius; 45 or 90 gave the same measured figures."""

LONG_TEXT_CHARS, TEMPLATES_FOR_LONG_TEXT = 500, 12
"""Characters from which a text counts as long, and its number of templates.

The text around the request passes through the encoder once for each template, so long texts cost more.
"""

MIN_REQUESTS = 10
"""Fewer requests give no radius, as when the model cannot take most of them because of their length."""

RADIUS_SHARES = ((0.01, 0.62), (0.02, 0.66), (0.05, 0.72), (0.1, 0.77), (0.2, 0.82))
"""Pairs of alpha and the radius as a share of the median distance, for MiniLM; `radius_share` interpolates."""


def draw_templates(subject: str, count: int = TEMPLATES_PER_RADIUS) -> list[str]:
    """`count` templates in the order of a hash with the subject; the first ones are of different relations."""
    shuffled = sorted(
        (_shuffle_key(subject, template), relation, template)
        for relation, templates in enumerate(relation_templates())
        for template in templates
    )
    # In reverse, the first template of each relation overwrites the later ones.
    first_by_relation = {relation: template for _, relation, template in reversed(shuffled)}.values()
    in_order = [template for _, _, template in shuffled]
    return list(dict.fromkeys([*sorted(first_by_relation, key=in_order.index), *in_order]))[:count]


def other_requests(text: str, count: int = TEMPLATES_PER_RADIUS) -> list[str]:
    """Other requests about the subject of a text, in the same frame; none if no subject is found."""
    subject = extract_subject(text)
    if subject is None:
        return []
    request = extract_request(text)
    others = (
        request.replace_request(template.replace(SUBJECT_PLACEHOLDER, subject))
        for template in draw_templates(subject, count)
    )
    return [other for other in others if other != text]


def radius_share(alpha: float) -> float:
    """The radius as a share of the median distance to other requests, at an error rate of `alpha`."""
    alphas, shares = np.array(RADIUS_SHARES).T
    return float(np.interp(alpha, alphas, shares))


def radius_from_distances(distances: Sequence[float], alpha: float) -> float | None:
    """The radius of a correction from its distances to other requests about its subject; None if there are too few."""
    if len(distances) < MIN_REQUESTS:
        return None
    # Queries of an encoder have unit length: at a distance of sqrt(2) two texts have nothing in common. The limit keeps
    # an unusual subject, far from all templates, from getting a radius of that size.
    return radius_share(alpha) * min(float(np.median(distances)), ENCODER_MAX_RADIUS)


def scope_radius(
    compute_queries: Callable[[Sequence[str]], np.ndarray], text: str, query_D: np.ndarray, alpha: float
) -> float | None:
    """The scope radius of a correction, or None if its text has no subject or too few requests could be measured.

    Args:
        compute_queries: Returns the queries (N, D) of texts, as replicas compute them. It may leave texts out, and
            queries may be infinite or NaN: these are ignored.
        text: The text of the correction.
        query_D: The query of the correction.
        alpha: The probability with which another request may lie within the radius.
    """
    others = other_requests(text, TEMPLATES_PER_RADIUS if len(text) <= LONG_TEXT_CHARS else TEMPLATES_FOR_LONG_TEXT)
    if not others:
        return None
    distances_N = np.linalg.norm(compute_queries(others).astype(np.float64) - query_D, axis=1)
    return radius_from_distances(distances_N[np.isfinite(distances_N)].tolist(), alpha)


def _shuffle_key(subject: str, template: str) -> bytes:
    """The sorting key of a template: pseudo-random, but the same in every process."""
    return hashlib.blake2b(f"{subject}\0{template}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
