"""Fixtures of the contract tests."""

from tests.support.deployment_fixtures import *  # noqa: F403  (its `__all__` lists the fixtures)
