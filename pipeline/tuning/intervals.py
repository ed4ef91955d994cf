"""Confidence intervals of shares."""

import math

Z_SCORE_95 = 1.959964
"""The 97.5 % quantile of the standard normal distribution: 95 % of it lies between minus and plus this value."""


def wilson_interval(successes: int, cases: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927); (0, 1) if there are no cases."""
    if cases == 0:
        return 0.0, 1.0
    z2 = Z_SCORE_95**2
    middle = (successes + z2 / 2) / (cases + z2)
    spread = successes * (cases - successes) / cases + z2 / 4
    half_width = Z_SCORE_95 / (cases + z2) * math.sqrt(spread)
    return max(0.0, middle - half_width), min(1.0, middle + half_width)
