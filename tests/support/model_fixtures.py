"""Fixtures of each kind of tiny model, built once a session. A test that changes a model builds its own."""

from collections.abc import Callable
from functools import cache

import pytest

from gracestream.pipeline.model.editable import EditableModel
from tests.support.tiny_models import KINDS, editable

__all__ = ["_models", "gpt2_model", "kind", "model"]


@pytest.fixture(scope="session")
def _models() -> Callable[[str], EditableModel]:
    return cache(editable)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of model in turn."""
    return str(request.param)


@pytest.fixture
def model(kind: str, _models: Callable[[str], EditableModel]) -> EditableModel:
    return _models(kind)


@pytest.fixture
def gpt2_model(_models: Callable[[str], EditableModel]) -> EditableModel:
    return _models("gpt2")
