"""One row of a histogram, and the squared error that quantization with a candidate range causes on
it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrators.affine import params_for
from calibrators.grid import Floats, Grid, Range
from calibrators.histogram import Histogram


class HistogramRow:
    """The values of one row as weighted bin centres, and the error of candidate intervals on them."""  # noqa: E501

    def __init__(self, statistic: Histogram, row: int, grid: Grid) -> None:
        self.grid = grid
        self.lo, self.hi = float(statistic.lo[row]), float(statistic.hi[row])
        self.lo, self.hi = min(self.lo, 0.0), max(self.hi, 0.0)
        self.width = float(statistic.width[row])
        self.centres, self.counts = statistic.signed(row)

    def best(self, lo: Floats, hi: Floats) -> int:
        """Index of the interval with the least error."""
        params = params_for(Range(lo, hi), self.grid, axis=0)
        return self.best_params(
            params.scale.astype(np.float64),
            params.zero_point.astype(np.float64),
        )

    def best_params(self, scale: Floats, zero: NDArray[np.float64]) -> int:
        """Index of the scale and zero point, shape (candidates,), with the least error."""
        return int(np.argmin(self.errors(scale, zero)))

    def errors(self, scale: Floats, zero: NDArray[np.float64]) -> Floats:
        """Squared errors, summed over all values, of scales and zero points of shape (candidates,)."""  # noqa: E501
        scale, zero = scale[:, None], zero[:, None]
        centres = self.centres[None, :]
        lo, hi = (self.grid.qmin - zero) * scale, (self.grid.qmax - zero) * scale
        rounded = np.rint(centres / scale) * scale
        # steps finer than the bins: where in its bin a value lies is unknown, so its rounding error
        # is the average one
        within = np.where(
            scale > self.width,
            np.square(rounded - centres),
            np.square(scale) / 12,
        )
        clipped = np.square(centres - centres.clip(lo, hi))
        total: Floats = np.maximum(clipped, within * (clipped == 0)) @ self.counts
        return total

    @property
    def energy(self) -> float:
        """Squares of all values, summed."""
        return float(np.square(self.centres) @ self.counts)
