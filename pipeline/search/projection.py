"""Where points lie in a few orthonormal directions, and beside them: maps that never lengthen a distance."""

import numpy as np
import torch

MAX_DIMENSIONS = 127
"""Directions, at most."""

PROJECTION_CHUNK_ROWS = 8192
"""Points that are mapped together."""

_EPS = float(np.finfo(np.float32).eps)


class OrthonormalProjection:
    """Maps points to their projections on orthonormal directions from a centre, and the length of what is left beside.

    Args:
        sample_MD: Points like those to come. Their principal directions are taken, the widest first; where there are
            no more points than directions, any.
    """

    def __init__(self, sample_MD: np.ndarray) -> None:
        width = sample_MD.shape[1]
        sample_MD = sample_MD[np.isfinite(sample_MD).all(axis=1) & (np.abs(sample_MD) < 1e15).all(axis=1)]
        sample_MD = sample_MD.astype(np.float64)
        center_D = np.median(sample_MD, axis=0) if len(sample_MD) else np.zeros(width)  # a huge key does not move it
        basis_DP = np.random.default_rng(0).standard_normal((width, min(MAX_DIMENSIONS, width)))
        if len(sample_MD) > basis_DP.shape[1]:
            centred_MD = sample_MD - center_D
            for _ in range(3):  # of subspace iteration: directions need not be the very widest
                basis_DP = _matmul(centred_MD.T, _matmul(centred_MD, _orthonormalize(basis_DP)))
            basis_DP = torch.linalg.svd(torch.from_numpy(basis_DP), full_matrices=False)[0].numpy()
        self.center_D = center_D.astype(np.float32)
        self._basis_PD = np.ascontiguousarray(_orthonormalize(basis_DP).T, np.float32)

    def __len__(self) -> int:
        return len(self._basis_PD)

    def project(self, points_MD: np.ndarray, dimensions: int) -> tuple[np.ndarray, np.ndarray]:
        """Projections on so many directions and the length beside them, (M, count + 1), float32.

        And of each (M) how far what rounding has made of it may lie from the truth.
        """
        basis_PD = self._basis_PD[:dimensions]
        mapped_MP = np.empty((len(points_MD), dimensions + 1), np.float32)
        slack_M = np.empty(len(points_MD), np.float32)
        for start in range(0, len(points_MD), PROJECTION_CHUNK_ROWS):
            rows = slice(start, start + PROJECTION_CHUNK_ROWS)
            centred_MD = points_MD[rows] - self.center_D
            mapped_MP[rows, :-1] = _matmul(centred_MD, basis_PD.T)
            slack_M[rows] = row_norms(centred_MD)
            # By difference, and not from the squares of both, which may be nearly equal.
            centred_MD -= _matmul(mapped_MP[rows, :-1], basis_PD)
            mapped_MP[rows, -1] = row_norms(centred_MD)
        slack_M *= 4 * _EPS * (points_MD.shape[1] + 8) * dimensions**0.5
        return mapped_MP, slack_M

    @staticmethod
    def truncate(mapped_MP: np.ndarray, dimensions: int) -> np.ndarray:
        """The points in fewer directions, (M, count + 1): what lies in the others is added to the length beside."""
        return np.column_stack([mapped_MP[:, :dimensions], row_norms(mapped_MP[:, dimensions:])])


def row_norms(points_MP: np.ndarray) -> np.ndarray:
    """Euclidean lengths (M)."""
    lengths_M: np.ndarray = np.sqrt(np.einsum("mp,mp->m", points_MP, points_MP))
    return lengths_M


def _orthonormalize(basis_DP: np.ndarray) -> np.ndarray:
    """By torch, for the same reason as `_matmul`: on a busy machine numpy's threads wait for each other."""
    found_DP: np.ndarray = torch.linalg.qr(torch.from_numpy(basis_DP))[0].numpy()
    return found_DP


def _matmul(left_MP: np.ndarray, right_PB: np.ndarray) -> np.ndarray:
    """By torch, in as many threads as a worker is given; those of numpy's products cannot be set at run time."""
    product_MB: np.ndarray = (torch.from_numpy(left_MP) @ torch.from_numpy(right_PB)).numpy()
    return product_MB
