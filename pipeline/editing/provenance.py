"""The provenance of values: library versions, device and configuration, as a `lead` delta records them.

A reproduction under the same provenance trains the same values bit for bit (docs/explanation/determinism.md).

Not promised: that another environment gives the same bits.
"""

import platform

import numpy as np
import torch
import transformers

from gracestream.pipeline.device import arithmetic_settings, device_name
from gracestream.pipeline.editing.config import EditConfig, edit_config_to_environment
from gracestream.pipeline.model import EditableModel
from gracestream.pipeline.search import load_faiss


def describe_environment(model: EditableModel, edit_config: EditConfig) -> dict[str, str]:
    """The environment of a `lead` delta: the names and values of everything that training depends on, as text."""
    libraries = {"torch": torch, "transformers": transformers, "faiss": load_faiss(), "numpy": np}
    config = getattr(model.module, "config", None)
    return {
        "device": device_name(model.device),
        "dtype": model.dtype,
        "query": model.query_source,
        "attention": str(getattr(config, "_attn_implementation", "none")),
        **arithmetic_settings(model.device),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{name: str(getattr(library, "__version__", "none")) for name, library in libraries.items()},
        **edit_config_to_environment(edit_config),
    }
