"""Shapes that align a vector with an axis of an array."""

from __future__ import annotations


def along(axis: int, rank: int) -> list[int]:
    """Return the shape to which a vector is reshaped to run along an axis.

    >>> along(1, 4), along(-1, 2)
    ([1, -1, 1, 1], [1, -1])
    """
    shape = [1] * rank
    shape[axis] = -1
    return shape
