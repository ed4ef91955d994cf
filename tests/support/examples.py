"""The number of examples of a property: a multiple of the profile's, so that each profile scales every property."""

import hypothesis


def examples(times: float) -> hypothesis.settings:
    """This multiple of the examples of the profile that `--hypothesis-profile` selects; at least one."""
    return hypothesis.settings(max_examples=max(1, round(times * hypothesis.settings().max_examples)))
