"""Rank correlation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def ranks(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return ranks from 1; equal values share the mean of their ranks.

    >>> ranks([30, 10, 20, 10]).tolist()
    [4.0, 1.5, 3.0, 1.5]
    """
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[places])


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two measures of the same things.

    NaN where one of them is constant.

    >>> spearman([1, 2, 3], [10, 20, 15])
    0.5
    """
    one, two = (ranks(values) - (len(values) + 1) / 2 for values in (first, second))
    norm = float(np.sqrt((one @ one) * (two @ two)))
    return float(one @ two) / norm if norm else float("nan")
