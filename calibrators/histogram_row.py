"""Compute the squared error of candidate ranges on a row of a histogram."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrators.affine import params_for
from calibrators.grid import Floats, Grid, Range
from calibrators.histogram import Histogram


class HistogramRow:
    """The values of a row as weighted bin centres."""

    def __init__(self, statistic: Histogram, row: int, grid: Grid) -> None:
        self.grid = grid
        self.lo = float(statistic.lo[row])
        self.hi = float(statistic.hi[row])
        # Every range includes zero.
        self.lo = min(self.lo, 0.0)
        self.hi = max(self.hi, 0.0)
        self.width = float(statistic.width[row])
        self.centres, self.counts = statistic.signed(row)

    def best(self, lo: Floats, hi: Floats) -> int:
        """Return the index of the interval with the least error."""
        params = params_for(Range(lo, hi), self.grid, axis=0)
        return self.best_params(
            params.scale.astype(np.float64), params.zero_point.astype(np.float64)
        )

    def best_params(self, scale: Floats, zero: NDArray[np.float64]) -> int:
        """Return the index of the candidate with the least error.

        Args:
            scale: shape (candidates,).
            zero: zero points, shape (candidates,).
        """
        return int(np.argmin(self.errors(scale, zero)))

    def errors(self, scale: Floats, zero: NDArray[np.float64]) -> Floats:
        """Return the squared errors of scales and zero points, summed over all values.

        Args:
            scale: shape (candidates,).
            zero: zero points, shape (candidates,).
        """
        # Against centres of shape (1, bins): errors have the shape (candidates, bins).
        scale = scale[:, None]
        zero = zero[:, None]
        centres = self.centres[None, :]
        lo = (self.grid.qmin - zero) * scale
        hi = (self.grid.qmax - zero) * scale
        rounded = np.rint(centres / scale) * scale
        # With steps finer than the bins, the position of a value within its bin is unknown: the
        # rounding error is the expected one of a uniform distribution, scale^2 / 12.
        within = np.where(
            scale > self.width, np.square(rounded - centres), np.square(scale) / 12
        )
        # A clipped value has the error of clipping alone, not that of rounding as well.
        clipped = np.square(centres - centres.clip(lo, hi))
        total: Floats = np.maximum(clipped, within * (clipped == 0)) @ self.counts
        return total

    @property
    def energy(self) -> float:
        """Sum of the squares of the values."""
        return float(np.square(self.centres) @ self.counts)
