"""Fixtures of these tests."""

from tests.support.model_fixtures import _models, gpt2_model, kind, model

__all__ = ["_models", "gpt2_model", "kind", "model"]
