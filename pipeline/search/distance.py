"""The distance between a query and a key, which replicas, editor and tests compute by this one routine."""

import numpy as np
import torch


def exact_distances(queries_BD: torch.Tensor, keys_BKD: torch.Tensor) -> torch.Tensor:
    """Euclidean distances (B, K) by direct difference, in float32.

    Differences are float32, their squares are summed in float64 and rounded once: the order of summation, which
    differs between machines, cannot be seen in the result, and a key is at distance 0 from itself at any norm.
    """
    differences_BKD = queries_BD.float()[:, None, :] - keys_BKD.float()
    return differences_BKD.double().square().sum(-1).sqrt().float()


def exact_distance(one_D: np.ndarray, other_D: np.ndarray) -> float:
    """Between two points, likewise."""
    return float(exact_distances(torch.tensor(one_D)[None], torch.tensor(other_D)[None, None])[0, 0])
