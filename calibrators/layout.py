"""View every tensor as a matrix of rows that share a scale.

Per-tensor, per-channel and per-block quantization become one case.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Values of a part of the rows, and the least number of its columns: of a cache line.
PART, LEAST_STEP = 1 << 19, 16
#: Rows and columns of the tiles that are transposed at a time.
_TILE = 128


def rows(
    array: NDArray[Any], axis: int | None = None, block_size: int = 0
) -> NDArray[Any]:
    """Reshape an array to (rows, n), with a scale per row.

    One row per tensor, one per index of ``axis``, or one per block of values along ``axis``. The
    last block of a line is padded with zeros, which every range contains anyway.

    Args:
        array: any shape.
        axis: channel axis, or axis of the blocks; None for one row.
        block_size: values in a block, 0 for no blocks.

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
        if array.ndim == 2 and axis % 2 == 0:
            # The usual weight matrix with blocks along its first axis, (inputs, outputs), is
            # transposed.
            lines = turned(array)
        else:
            lines = np.moveaxis(array, axis, -1)
        # Up to the next multiple of the block size.
        fill = -lines.shape[-1] % block_size
        if fill:
            lines = np.pad(lines, [(0, 0)] * (lines.ndim - 1) + [(0, fill)])
        return lines.reshape(-1, block_size)
    moved = np.moveaxis(array, axis, 0)
    # reshape cannot infer -1 for an array without values.
    if moved.size:
        return moved.reshape(moved.shape[0], -1)
    return np.zeros((moved.shape[0], 0), array.dtype)


def parts_of_rows(
    array: NDArray[Any], axis: int, block_size: int
) -> list[NDArray[Any]]:
    """Cut an array into views whose rows, joined in order, are the rows of the array.

    >>> array = np.arange(24).reshape(8, 3)
    >>> parts = parts_of_rows(array, 0, 4)
    >>> all_rows = np.concatenate([rows(part, 0, 4) for part in parts])
    >>> bool((all_rows == rows(array, 0, 4)).all())
    True
    """
    if array.ndim < 2:
        return [array]
    # The first of the axes that ``rows`` leaves in front of the blocks.
    other = 1 if axis % array.ndim == 0 else 0
    count = array.shape[other]
    step = max(LEAST_STEP, count * PART // max(1, array.size))
    return np.split(array, range(step, count, step), axis=other)


def turned(matrix: NDArray[Any]) -> NDArray[Any]:
    """Return the transpose as a contiguous array, copied tile by tile.

    Twice as fast as a plain copy where a row is longer than a cache.

    >>> turned(np.arange(6).reshape(2, 3))
    array([[0, 3],
           [1, 4],
           [2, 5]])
    """
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    for left, top in product(
        range(0, matrix.shape[1], _TILE), range(0, matrix.shape[0], _TILE)
    ):
        result[left : left + _TILE, top : top + _TILE] = matrix[
            top : top + _TILE, left : left + _TILE
        ].T
    return result
