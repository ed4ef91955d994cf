"""What `pipeline.history.audit` calls damage, for every number of deltas and outcomes."""

from collections.abc import Sequence

import pytest

from gracestream.pipeline.history.audit import _classify_damage


@pytest.mark.parametrize(
    ("made", "named", "damage"),
    [
        ([], [None], None),
        ([7], [7], None),
        ([], [], "no outcome"),
        ([7], [], "delta without outcome"),
        ([], [7], "outcome without delta"),
        ([7], [8], "outcome without its delta"),
        ([7], [None], "outcome without its delta"),
        ([], [None, None], "several outcomes"),
        ([7], [7, 7], "several outcomes"),
        ([7, 8], [7], "several deltas"),
        ([7, 8], [], "several deltas"),
    ],
)
def test_damage(made: Sequence[int], named: Sequence[int | None], damage: str | None) -> None:
    assert _classify_damage(made, named) == damage
