"""Fixtures of the tests for GPUs."""

from tests.support.model_fixtures import *  # noqa: F403  (its `__all__` lists the fixtures)
