"""Fixtures of these tests."""

from tests.support.model_fixtures import *  # noqa: F403  (its `__all__` lists the fixtures)
