"""One two-dimensional view of every tensor, so that per-tensor and per-channel are one case."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rows(array: NDArray[Any], axis: int | None = None) -> NDArray[Any]:
    """``array`` as (rows, n): one row per tensor, or one row per index of ``axis``.

    >>> rows(np.zeros((2, 3, 4)), axis=1).shape
    (3, 8)
    >>> rows(np.float32(7.0)).shape
    (1, 1)
    """
    array = np.asarray(array)
    if axis is None:
        return array.reshape(1, -1)
    moved = np.moveaxis(array, axis, 0)
    return moved.reshape(moved.shape[0], -1) if moved.size else np.zeros((moved.shape[0], 0), array.dtype)
