"""Confidence intervals of shares."""

import math

Z_SCORE_95 = 1.959964
"""Standard deviations of a normal distribution on each side of its middle 95 %."""


def wilson_interval(successes: int, cases: int) -> tuple[float, float]:
    """The 95 % interval of a share, after Wilson (1927)."""
    if cases == 0:
        return 0.0, 1.0
    z2 = Z_SCORE_95**2
    middle = (successes + z2 / 2) / (cases + z2)
    spread = successes * (cases - successes) / cases + z2 / 4
    half = Z_SCORE_95 / (cases + z2) * math.sqrt(spread)
    return max(0.0, middle - half), min(1.0, middle + half)
