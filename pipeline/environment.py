"""Under which versions, device and policy values are made: what a `lead` delta records (design, section 5, point 8)."""

import dataclasses
import platform

import faiss
import numpy as np
import torch
import transformers

from pipeline.model import EditableModel
from pipeline.plan import Plan


def environment(model: EditableModel, plan: Plan) -> dict[str, str]:
    """Names and values, all texts."""
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else platform.processor() or platform.machine()
    libraries = {"torch": torch, "transformers": transformers, "faiss": faiss, "numpy": np}
    settings = {**dataclasses.asdict(plan), **dataclasses.asdict(plan.recipe)}
    settings.pop("recipe")
    return {
        "device": device,
        "dtype": model.dtype,
        "query": model.queried,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{name: str(library.__version__) for name, library in libraries.items()},
        **{name: str(value) for name, value in settings.items()},
    }
