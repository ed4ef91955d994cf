"""Codebooks of a given size, and their keys. This module needs only the packages of the engine."""

from collections.abc import Sequence

import numpy as np
import torch

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.schemas.deltas import GENESIS_DIGEST


def queries(model: EditableModel, prompts: Sequence[Prompt]) -> np.ndarray:
    """The query of each prompt: (N, D), in random order."""
    ordered = sorted(prompts, key=len)
    parts = [model.queries(ordered[start : start + 64]).cpu().numpy() for start in range(0, len(ordered), 64)]
    found = np.concatenate(parts)
    np.random.default_rng(5).shuffle(found)
    return found


def stored(real_ND: np.ndarray, count: int) -> np.ndarray:
    """`count` keys: the real ones, then random points between two real ones."""
    generator = np.random.default_rng(2)
    keys_ND = np.resize(real_ND, (count, real_ND.shape[1]))
    for start in range(len(real_ND), count, 8192):
        more = keys_ND[start : start + 8192]
        shares = generator.uniform(0.1, 0.5, (len(more), 1)).astype(np.float32)
        more += shares * (real_ND[generator.integers(0, len(real_ND), len(more))] - more)
    return keys_ND


def codebook_of(model: EditableModel, keys_ND: np.ndarray, others_RD: np.ndarray) -> Codebook:
    """A codebook with one entry per key, with the radii of `radii_of`."""
    width_V = value_width(model.module.get_submodule(model.layer), keys_ND.shape[1])
    return filled(model.fingerprint, model.layer, keys_ND, radii_of(keys_ND, others_RD), width_V)


def radii_of(keys_ND: np.ndarray, others_RD: np.ndarray) -> np.ndarray:
    """One radius (N) per key: 0.8 of the distance to the nearest of some other queries, and at most their median."""
    count = len(keys_ND)
    nearest_N = np.empty(count, np.float32)
    for start in range(0, count, 8192):
        distances = torch.cdist(torch.from_numpy(keys_ND[start : start + 8192]), torch.from_numpy(others_RD))
        nearest_N[start : start + 8192] = distances.amin(dim=1).numpy()
    radii_N: np.ndarray = np.minimum(0.8 * nearest_N, np.median(nearest_N)).astype(np.float32)
    return radii_N


def filled(model: str, layer: str, keys_ND: np.ndarray, radii_N: np.ndarray, width_V: int) -> Codebook:
    """A codebook with one entry per key; all values are zeros."""
    count = len(keys_ND)
    codebook = Codebook("default", model, layer)
    codebook.restore(
        seq=count, term=1, digest=GENESIS_DIGEST, entry_ids=[f"e{row}" for row in range(count)], labels=[(0,)] * count,
        wordings=[""] * count,
        keys_ND=keys_ND, values_NV=np.zeros((count, width_V), np.float32), radii_N=radii_N,
    )  # fmt: skip
    return codebook


def extended(codebook: Codebook, keys_ND: np.ndarray, radii_N: np.ndarray) -> Codebook:
    """A codebook with one more entry per key; the values of the new entries are zeros."""
    count, total = len(keys_ND), len(codebook) + len(keys_ND)
    longer = Codebook("default", codebook.model, codebook.layer)
    longer.restore(
        seq=total, term=1, digest=GENESIS_DIGEST,
        entry_ids=[*codebook.entry_ids, *(f"e{number}" for number in range(count))],
        labels=[*codebook.labels, *[(0,)] * count], wordings=[*codebook.wordings, *[""] * count],
        keys_ND=np.concatenate([codebook.keys_ND, keys_ND]),
        values_NV=np.concatenate([codebook.values_NV, np.zeros((count, codebook.values_NV.shape[1]), np.float32)]),
        radii_N=np.concatenate([codebook.radii_N, radii_N]),
    )  # fmt: skip
    return longer


def value_width(module: torch.nn.Module, width: int) -> int:
    """The output width of a module for an input of this width."""
    inputs_11D = next(module.parameters()).new_zeros(1, 1, width)
    with torch.inference_mode():
        return int(module(inputs_11D).shape[-1])
