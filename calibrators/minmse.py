"""MinMSE: the range with the least squared quantization error, summed over all values.

Clipping a few large values makes the steps finer for all others; MinMSE weighs both errors on the
histogram of the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibrators.affine import covered, params_for
from calibrators.base import is_number, register, require
from calibrators.grid import Floats, Grid, QParams, Range
from calibrators.histogram import Histogram
from calibrators.histogram_row import HistogramRow

#: Octaves below the clip-free power-of-two scale that are tried.
_OCTAVES = 8
#: Most intervals that are tried: more would lie closer to each other than the bins.
_MAX_STEPS = 1 << 14


@register("minmse")
@dataclass(frozen=True)
class MinMSE:
    """The interval of least mean squared error.

    Float scales are searched over shrinking intervals, each end on its own if the grid is
    asymmetric. Power-of-two scales are all tried, from the largest useful one downwards, with
    several zero points if the grid is asymmetric.

    Attributes:
        steps: number of shrunk intervals that are tried for each end.
        least: smallest interval that is tried, as a share of the full range.
    """

    steps: int = 96
    least: float = 0.05

    def __post_init__(self) -> None:
        require(
            is_number(self.steps, int) and 1 <= self.steps <= _MAX_STEPS,
            "steps",
            self.steps,
            f"1 to {_MAX_STEPS} intervals",
        )
        require(
            is_number(self.least) and 0 < self.least <= 1,
            "least",
            self.least,
            "a share greater than 0, at most 1",
        )

    def statistic(self) -> Histogram:
        """Return an empty statistic of the kind that ``range`` reads."""
        return Histogram()

    def range(self, statistic: Histogram, grid: Grid) -> Range:
        """Return the interval with the least error, for each row."""
        if grid.pow2:
            search = self._pow2
        elif grid.symmetric:
            search = self._symmetric
        else:
            search = self._asymmetric
        # Row by row: the candidates depend on the range of the row.
        ends = [
            search(HistogramRow(statistic, row, grid))
            for row in range(len(statistic.lo))
        ]
        # The reshape keeps two columns for a statistic without rows.
        intervals = np.array(ends).reshape(-1, 2)
        return Range(intervals[:, 0], intervals[:, 1])

    def _shares(self) -> Floats:
        # In falling order, so that the full interval wins a tie.
        return np.linspace(1.0, self.least, self.steps)

    def _symmetric(self, row: HistogramRow) -> tuple[float, float]:
        """Return the best interval that is symmetric around zero, within the range of the row."""
        bound = max(-row.lo, row.hi)
        lo = np.maximum(row.lo, -bound * self._shares())
        hi = np.minimum(row.hi, bound * self._shares())
        best = row.best(lo, hi)
        return lo[best], hi[best]

    def _asymmetric(self, row: HistogramRow) -> tuple[float, float]:
        """Return the best interval; its ends are searched separately."""
        lo = row.lo
        hi = row.hi
        # The ends are searched in turn; in the second round the first end adapts to the second one.
        for _ in range(2):
            # Values within the bin around zero cannot be distinguished: no end lies inside.
            candidates = np.maximum(row.hi * self._shares(), min(row.hi, row.width))
            hi = candidates[row.best(np.full(self.steps, lo), candidates)]
            candidates = np.minimum(row.lo * self._shares(), max(row.lo, -row.width))
            lo = candidates[row.best(candidates, np.full(self.steps, hi))]
        return lo, hi

    def _pow2(self, row: HistogramRow) -> tuple[float, float]:
        """Return the interval that the best power-of-two scale and zero point cover."""
        grid = row.grid
        # The largest useful scale clips nothing.
        widest = float(
            params_for(Range(np.array([row.lo]), np.array([row.hi])), grid).scale
        )
        scales = np.maximum(widest * 0.5 ** np.arange(_OCTAVES), grid.scales[0])
        if grid.symmetric:
            zeros = np.full((_OCTAVES, 1), grid.zero, np.float64)
        else:
            # From the zero point that reaches the low end to the one that reaches the high end.
            # Shape (octaves,); nine zero points between the ends make (octaves, 9).
            low_end = grid.qmin + np.ceil(-row.lo / scales)
            high_end = grid.qmax - np.ceil(row.hi / scales)
            zeros = np.rint(np.linspace(low_end, high_end, 9, axis=1))
            zeros = zeros.clip(grid.qmin, grid.qmax)
        # All pairs of a scale and a zero point, flat, as candidates of one search.
        scale = np.broadcast_to(scales[:, None], zeros.shape).reshape(-1)
        reach = covered(
            QParams(scale.astype(np.float32), zeros.reshape(-1).astype(np.int64), 0),
            grid,
        )
        best = row.best_params(scale, zeros.reshape(-1))
        lo = float(reach.lo[best])
        hi = float(reach.hi[best])
        # An end beyond float32 would lower the scale later on.
        if grid.symmetric and lo < -float(np.finfo(np.float32).max):
            lo = row.lo
        return lo, hi
