"""Correct deployed transformer models live.

The public API:

- `Client` sends requests and feedback to Kafka, and reads predictions and outcomes.
- `Request`, `ChatMessage`, `Parameters`, `Prediction`, `Feedback` and `Outcome` are its messages.
- `load_settings` reads the `Settings` of a `Client`, such as the address of Kafka.
- `load_codebook` reads a codebook file written by `gracestream replay --output`.

Each name is imported on first use, so that a `Client` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gracestream.pipeline.client import Client as Client
    from gracestream.pipeline.codebook import load_codebook as load_codebook
    from gracestream.pipeline.settings import Settings as Settings
    from gracestream.pipeline.settings import load_settings as load_settings
    from gracestream.schemas.messages import ChatMessage as ChatMessage
    from gracestream.schemas.messages import Feedback as Feedback
    from gracestream.schemas.messages import Outcome as Outcome
    from gracestream.schemas.messages import Parameters as Parameters
    from gracestream.schemas.messages import Prediction as Prediction
    from gracestream.schemas.messages import Request as Request

__all__ = [
    "ChatMessage",
    "Client",
    "Feedback",
    "Outcome",
    "Parameters",
    "Prediction",
    "Request",
    "Settings",
    "load_codebook",
    "load_settings",
]

_SOURCES = {
    "Client": "gracestream.pipeline.client",
    "Settings": "gracestream.pipeline.settings",
    "load_codebook": "gracestream.pipeline.codebook",
    "load_settings": "gracestream.pipeline.settings",
}
"""The module that defines each public name; the names not listed here are messages."""


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module(_SOURCES.get(name, "gracestream.schemas.messages")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
