"""One two-dimensional view of every tensor, so that per-tensor, per-channel and per-block are one
case.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Rows and columns that are turned at a time.
_TILE = 128


def rows(
    array: NDArray[Any],
    axis: int | None = None,
    block_size: int = 0,
) -> NDArray[Any]:
    """``array`` as (rows, n): one row per tensor, one per index of ``axis``, or one per block of
    values along ``axis``.

    The last block of a line is filled up with zeros, which every range contains anyway.

    >>> rows(np.zeros((2, 3, 4)), axis=1).shape
    (3, 8)
    >>> rows(np.zeros((40, 3)), axis=0, block_size=16).shape
    (9, 16)
    >>> rows(np.float32(7.0)).shape
    (1, 1)
    """
    array = np.asarray(array)
    if axis is None:
        return array.reshape(1, -1)
    if block_size:
        lines = (
            turned(array)
            if array.ndim == 2 and axis % 2 == 0
            else np.moveaxis(array, axis, -1)
        )
        fill = -lines.shape[-1] % block_size
        if fill:
            lines = np.pad(lines, [(0, 0)] * (lines.ndim - 1) + [(0, fill)])
        return lines.reshape(-1, block_size)
    moved = np.moveaxis(array, axis, 0)
    return (
        moved.reshape(moved.shape[0], -1)
        if moved.size
        else np.zeros((moved.shape[0], 0), array.dtype)
    )


def turned(matrix: NDArray[Any]) -> NDArray[Any]:
    """The transpose as an array of its own, a tile at a time: twice as fast where a row is longer
    than a cache.

    >>> turned(np.arange(6).reshape(2, 3))
    array([[0, 3],
           [1, 4],
           [2, 5]])
    """
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    for left, top in product(
        range(0, matrix.shape[1], _TILE),
        range(0, matrix.shape[0], _TILE),
    ):
        result[left : left + _TILE, top : top + _TILE] = matrix[
            top : top + _TILE,
            left : left + _TILE,
        ].T
    return result
