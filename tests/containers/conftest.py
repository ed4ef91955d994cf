"""Stand-ins have the names of other images only while the tests run."""

from collections.abc import Iterator

import pytest

from tests.containers.standins import remove_stand_ins


@pytest.fixture(scope="session", autouse=True)
def _stand_ins() -> Iterator[None]:
    yield
    remove_stand_ins()
