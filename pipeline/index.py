"""The key index: which key is nearest to a query, exactly (design, section 4, Lookup).

FAISS scans the codebook's own array of keys (`faiss.knn`: no second copy, nothing to rebuild when an entry goes) and
returns candidates by squared distances from a matrix product, whose rounding error grows with the keys' norms. The
winner is found among them by direct difference, and the number of candidates grows until the error bound proves that
no key outside them can win. So the answer equals brute force, whatever the norms.
"""

import importlib
from dataclasses import dataclass

import faiss
import numpy as np
import torch

from pipeline.codebook import Applied, Codebook

NO_SLOT = -1
CANDIDATES = 8


def exact_distances(queries_BD: torch.Tensor, keys_BKD: torch.Tensor) -> torch.Tensor:
    """Euclidean distances (B, K) by direct difference, in float32.

    Differences are float32, their squares are summed in float64 and rounded once: the order of summation, which
    differs between machines, cannot be seen in the result, and a key is at distance 0 from itself at any norm.
    """
    differences_BKD = queries_BD.float()[:, None, :] - keys_BKD.float()
    return differences_BKD.double().square().sum(-1).sqrt().float()


@dataclass(frozen=True, slots=True)
class Nearest:
    """For each query the slot of its nearest key (-1: none, or the query is not finite) and the distance to it."""

    slots_B: torch.Tensor
    distances_B: torch.Tensor


class KeyIndex:
    """Exact nearest keys of a codebook, on one device. Call `refresh` after each delta the codebook applied."""

    def __init__(self, codebook: Codebook, device: torch.device) -> None:
        self._codebook = codebook
        self._device = device
        self._resources = faiss.StandardGpuResources() if _gpu_search(device) else None
        self._keys = torch.empty(0)
        self._norm = 0.0
        self.refresh(None)

    def refresh(self, applied: Applied | None) -> None:
        """Take over what `applied` changed; None: everything."""
        keys_ND = self._codebook.keys_ND
        rows = keys_ND if applied is None or applied.moved else keys_ND[list(applied.slots)]
        largest = float(np.linalg.norm(rows.astype(np.float64), axis=1).max(initial=0.0))
        self._norm = largest if rows is keys_ND else max(self._norm, largest)
        if self._device.type == "cpu":
            self._keys = torch.from_numpy(keys_ND)
        elif applied is None or applied.moved or len(self._keys) != len(keys_ND):
            self._keys = torch.from_numpy(keys_ND).to(self._device)
        elif applied.slots:
            slots = torch.tensor(applied.slots)
            self._keys[slots.to(self._device)] = torch.from_numpy(rows).to(self._device)

    def nearest(self, queries_BD: torch.Tensor) -> Nearest:
        """The nearest key of each query; of keys at the same distance the one in the lowest slot."""
        queries_BD = queries_BD.detach().to(self._device, torch.float32).contiguous()
        slots_B = torch.full((len(queries_BD),), NO_SLOT, device=self._device)
        distances_B = torch.full((len(queries_BD),), torch.inf, device=self._device)
        open_rows = torch.isfinite(queries_BD).all(dim=1).nonzero()[:, 0] if len(self._keys) else slots_B[:0]
        candidates = CANDIDATES
        while len(open_rows):
            slots, distances, proven = self._search(queries_BD[open_rows], min(candidates, len(self._keys)))
            slots_B[open_rows], distances_B[open_rows] = slots, distances
            open_rows = open_rows[~proven]
            candidates *= 8
        return Nearest(slots_B, distances_B)

    def _search(self, queries_BD: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._resources is not None:
            squares_BK, slots_BK = faiss.knn_gpu(self._resources, queries_BD, self._keys, candidates)
        else:
            squares, slots = faiss.knn(queries_BD.cpu().numpy(), self._keys.cpu().numpy(), candidates)
            squares_BK = torch.from_numpy(squares).to(self._device)
            slots_BK = torch.from_numpy(slots).to(self._device)
        slots_BK, order = slots_BK.sort(dim=1)
        distances_BK = exact_distances(queries_BD, self._keys[slots_BK]).masked_fill(slots_BK == NO_SLOT, torch.inf)
        winner_B1 = distances_BK.argmin(dim=1, keepdim=True)
        slots_B, distances_B = slots_BK.gather(1, winner_B1)[:, 0], distances_BK.gather(1, winner_B1)[:, 0]
        # A product of D terms in float32 is off by at most D roundings of the largest possible sum. A key can only win
        # where its norm is within the winner's distance of the query's: one of a huge norm makes no other unsure.
        width, norm_B = queries_BD.shape[1], queries_BD.norm(dim=1)
        largest_B = ((norm_B + distances_B) * (1 + 1e-5)).clamp(max=self._norm)
        error_B = width * torch.finfo(torch.float32).eps * (norm_B + largest_B).square()
        farthest_B = squares_BK.gather(1, order).amax(dim=1)
        proven_B = farthest_B - error_B > distances_B.square() * (1 + 1e-6)
        if candidates == len(self._keys):
            proven_B = torch.ones_like(proven_B)
        return slots_B, distances_B, proven_B


def _gpu_search(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(faiss, "StandardGpuResources"):
        return False
    importlib.import_module("faiss.contrib.torch_utils")  # teaches FAISS to take CUDA tensors as they are
    return True
