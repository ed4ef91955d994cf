"""Under which versions, device and policy values are made: what a `lead` delta records (design, section 5, point 8)."""

import dataclasses
import platform

import numpy as np
import torch
import transformers

from gracestream.pipeline.device import arithmetic, name_of
from gracestream.pipeline.editing.config import Plan
from gracestream.pipeline.model import EditableModel
from gracestream.pipeline.search import faiss_library


def environment(model: EditableModel, plan: Plan) -> dict[str, str]:
    """Names and values, all texts."""
    libraries = {"torch": torch, "transformers": transformers, "faiss": faiss_library(), "numpy": np}
    config = getattr(model.module, "config", None)
    settings = {**dataclasses.asdict(plan), **dataclasses.asdict(plan.recipe)}
    settings.pop("recipe")
    return {
        "device": name_of(model.device),
        "dtype": model.dtype,
        "query": model.queried,
        "attention": str(getattr(config, "_attn_implementation", "none")),
        **arithmetic(model.device),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{name: str(getattr(library, "__version__", "none")) for name, library in libraries.items()},
        **{name: str(value) for name, value in settings.items()},
    }
