"""Plans and tasks as short vectors: the singular vectors of the errors, and a new task's vector from a few measurements.

    E = U S V^T,  Y = the first k rows of V^T (k, num_plans);  x = argmin |x Y_S - e_S|;  predicted errors = x Y

>>> vectors = embed(np.outer([0.5, 0.6, 0.9], [1.0, 0.5]), rank=1)
>>> predict(vectors, [0], [0.4]).round(3).tolist()
[0.4, 0.2]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RANK = 5  # published: the first five singular values of PEPPP's matrix are 78 % of their sum


def embed(errors: Array, rank: int = RANK) -> Array:
    """(k, num_plans): the first right singular vectors, orthonormal; k is `rank` or as many as there are."""
    return np.linalg.svd(errors, full_matrices=False)[2][:rank]


def predict(vectors: Array, chosen: Sequence[int], measured: Sequence[float] | Array) -> Array:
    """Errors of all plans from those measured on the chosen ones: least squares, the shortest answer where there are many."""
    task = np.linalg.lstsq(vectors[:, list(chosen)].T, np.asarray(measured, dtype=float), rcond=None)[0]
    return task @ vectors
