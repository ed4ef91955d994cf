"""How many examples a property gets: a multiple of the profile's, so that each profile scales every property."""

import hypothesis


def examples(times: float) -> hypothesis.settings:
    """So many times the examples of the profile that `--hypothesis-profile` chooses; at least one."""
    return hypothesis.settings(max_examples=max(1, round(times * hypothesis.settings().max_examples)))
