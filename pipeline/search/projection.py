"""A projection of points on a few orthonormal directions that never lengthens a distance.

A point x maps to (B(x - c), |r|): its coordinates on the rows of B, and the norm of its
remainder r = x - c - B'B(x - c).
The directions are orthonormal and r is orthogonal to them, so for two points x and y:

    |x - y|^2 = |B(x - y)|^2 + |r_x - r_y|^2 >= |B(x - y)|^2 + (|r_x| - |r_y|)^2

The right side is the squared distance of the two mapped points. So a distance between mapped points is a lower bound.

Not promised: that the directions are the principal ones. Any orthonormal directions give valid bounds.
"""

import numpy as np
import torch

MAX_DIMENSIONS = 127
"""Largest number of directions. With the norm of the remainder a point has at most 128 numbers."""

PROJECTION_CHUNK_ROWS = 8192
"""Points per matrix product. This bounds the memory for centred copies."""

_EPS = float(np.finfo(np.float32).eps)
_TINY = float(np.finfo(np.float32).tiny)


class OrthonormalProjection:
    """Maps points to coordinates on orthonormal directions around a centre, and the norm of the remainder.

    Args:
        sample_MD: Typical points. The directions approximate their principal directions, widest first. With no more
            points than directions, random directions are used.
    """

    def __init__(self, sample_MD: np.ndarray) -> None:
        width = sample_MD.shape[1]
        sample_MD = sample_MD[np.isfinite(sample_MD).all(axis=1) & (np.abs(sample_MD) < 1e15).all(axis=1)]
        sample_MD = sample_MD.astype(np.float64)
        # The median instead of the mean: one huge key does not move it.
        center_D = np.median(sample_MD, axis=0) if len(sample_MD) else np.zeros(width)
        basis_DP = np.random.default_rng(0).standard_normal((width, min(MAX_DIMENSIONS, width)))
        if len(sample_MD) > basis_DP.shape[1]:
            centred_MD = sample_MD - center_D
            for _ in range(3):  # subspace iteration; three rounds suffice, as any directions are valid
                basis_DP = _matmul(centred_MD.T, _matmul(centred_MD, _orthonormalize(basis_DP)))
            basis_DP = torch.linalg.svd(torch.from_numpy(basis_DP), full_matrices=False)[0].numpy()
        self.center_D = center_D.astype(np.float32)
        self._basis_PD = np.ascontiguousarray(_orthonormalize(basis_DP).T, np.float32)

    def __len__(self) -> int:
        return len(self._basis_PD)

    def project(self, points_MD: np.ndarray, dimensions: int) -> tuple[np.ndarray, np.ndarray]:
        """Map points (M, D) to their first `dimensions` coordinates and the norm of the remainder.

        Returns the mapped points (M, dimensions + 1), float32, and their slack (M). The slack of a point is a bound on
        its distance to the point that exact arithmetic would give.
        """
        basis_PD = self._basis_PD[:dimensions]
        mapped_MP = np.empty((len(points_MD), dimensions + 1), np.float32)
        slack_M = np.empty(len(points_MD), np.float32)
        for start in range(0, len(points_MD), PROJECTION_CHUNK_ROWS):
            rows = slice(start, start + PROJECTION_CHUNK_ROWS)
            centred_MD = points_MD[rows] - self.center_D
            mapped_MP[rows, :-1] = _matmul(centred_MD, basis_PD.T)
            slack_M[rows] = row_norms(centred_MD)
            # The remainder by difference: |x - c|^2 - |B(x - c)|^2 would cancel where both are nearly equal.
            centred_MD -= _matmul(mapped_MP[rows, :-1], basis_PD)
            mapped_MP[rows, -1] = row_norms(centred_MD)
        # With n = |x - c|, P directions and u = eps / 2 (half a unit in the last place), in units of sqrt(P) u n:
        # - coordinates: D for the sums of D products (in any order), 1 for rounding B, 1 for rounding x - c;
        # - remainder: the same D + 2 again through B', P <= D for the sums of P products, at most 3 for rounding B',
        #   x - c and the difference, and D / 2 + 1 for its norm.
        # Together at most 3.5 D + 8, which is sqrt(P) eps n (1.75 D + 4). The factor 4 (D + 8) is more than twice this.
        # The other half covers the rounding of `slack_M` and of the norm in `truncate`, and second-order terms.
        slack_M *= 4 * _EPS * (points_MD.shape[1] + 8) * dimensions**0.5
        # Twice the underflow of a norm: once for the remainder's norm here, once for the norm in `truncate`. It is also
        # far more than what the D products of a coordinate lose.
        slack_M += 2 * norm_underflow(points_MD.shape[1])
        return mapped_MP, slack_M

    @staticmethod
    def truncate(mapped_MP: np.ndarray, dimensions: int) -> np.ndarray:
        """The mapped points in fewer dimensions, (M, dimensions + 1).

        The last number is the norm over the dropped coordinates and the old remainder: the new remainder's norm.
        """
        return np.column_stack([mapped_MP[:, :dimensions], row_norms(mapped_MP[:, dimensions:])])


def norm_underflow(width: int) -> np.float32:
    """How much the norm of a row may lose where its squares underflow: at most tiny in each of `width` squares."""
    return np.float32((width * _TINY) ** 0.5 * (1 + 1e-5))


def row_norms(points_MP: np.ndarray) -> np.ndarray:
    """Euclidean norms (M) of points (M, P). A norm may be too small by `norm_underflow(P)`."""
    norms_M: np.ndarray = np.sqrt(np.einsum("mp,mp->m", points_MP, points_MP))
    return norms_M


def _orthonormalize(basis_DP: np.ndarray) -> np.ndarray:
    """Orthonormal columns with the same span, by QR. In torch for the reason given in `_matmul`."""
    orthonormal_DP: np.ndarray = torch.linalg.qr(torch.from_numpy(basis_DP))[0].numpy()
    return orthonormal_DP


def _matmul(left_MP: np.ndarray, right_PB: np.ndarray) -> np.ndarray:
    """A matrix product in torch, which keeps to the worker's number of threads.

    Numpy's thread count cannot be set at run time, and on a busy machine its threads wait for each other.
    """
    product_MB: np.ndarray = (torch.from_numpy(left_MP) @ torch.from_numpy(right_PB)).numpy()
    return product_MB
