"""The distance between a query and a key. Replicas, the editor and the tests all use this one routine.

Guarantees:

1. The distance of a finite point to itself is exactly 0.
2. A distance is off by at most 1.01 eps of itself (eps = 2^-23), at any norm of the points.

Not promised: a finite distance where a difference overflows float32; equal bits on two machines in every single case.
Machines sum in different orders, which changes the rounded result of at most about one distance in a million.
"""

import numpy as np
import torch


def exact_distances(queries_BD: torch.Tensor, keys_BKD: torch.Tensor) -> torch.Tensor:
    """Euclidean distances (B, K), float32, of queries (B, D) to K keys each (B, K, D).

    Computed by direct difference instead of |q|^2 - 2 q.k + |k|^2, which loses all digits where a long key is close.
    """
    differences_BKD = queries_BD.float()[:, None, :] - keys_BKD.float()
    # Differences are rounded once, by at most eps / 2 each. Two orders of summation in float64 differ by at most about
    # 1e-13 of the sum. The final rounding to float32 (eps / 2) hides this, unless a rounding boundary lies in between.
    return differences_BKD.double().square().sum(-1).sqrt().float()


def exact_distance(one_D: np.ndarray, other_D: np.ndarray) -> float:
    """The Euclidean distance between two points (D), computed by `exact_distances`."""
    return float(exact_distances(torch.tensor(one_D)[None], torch.tensor(other_D)[None, None])[0, 0])
