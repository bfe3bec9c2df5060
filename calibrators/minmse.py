"""MinMSE: the range whose quantization error, squared and summed over everything seen, is least.

Clipping a few large values makes the steps finer for all others; this calibrator weighs the one
against the other on the histogram of the values.
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
#: More intervals than this only cost memory: they are closer to each other than the bins.
_MOST = 1 << 14


@register("minmse")
@dataclass(frozen=True)
class MinMSE:
    """The interval of least mean squared error.

    Float scales are searched over shrinking intervals, each end on its own if the grid is
    asymmetric. Power-of-two scales are all tried, from the one that clips nothing downwards, with
    several zero points if the grid is asymmetric.

    Attributes:
        steps: how many shrunk intervals are tried for each end.
        least: the smallest interval tried, as a share of the whole.
    """

    steps: int = 96
    least: float = 0.05

    def __post_init__(self) -> None:
        require(
            is_number(self.steps, int) and 1 <= self.steps <= _MOST,
            "steps",
            self.steps,
            f"1 to {_MOST} intervals",
        )
        require(
            is_number(self.least) and 0 < self.least <= 1,
            "least",
            self.least,
            "a share greater than 0, at most 1",
        )

    def statistic(self) -> Histogram:
        return Histogram()

    def range(self, statistic: Histogram, grid: Grid) -> Range:
        search = (
            self._pow2
            if grid.pow2
            else self._symmetric
            if grid.symmetric
            else self._asymmetric
        )
        found = np.array(
            [
                search(HistogramRow(statistic, row, grid))
                for row in range(len(statistic.lo))
            ],
        ).reshape(-1, 2)
        return Range(found[:, 0], found[:, 1])

    def _shares(self) -> Floats:
        return np.linspace(
            1.0,
            self.least,
            self.steps,
        )  # the whole interval first: it wins a tie

    def _symmetric(self, row: HistogramRow) -> tuple[float, float]:
        bound = max(-row.lo, row.hi)
        lo, hi = (
            np.maximum(row.lo, -bound * self._shares()),
            np.minimum(row.hi, bound * self._shares()),
        )
        best = row.best(lo, hi)
        return lo[best], hi[best]

    def _asymmetric(self, row: HistogramRow) -> tuple[float, float]:
        lo, hi = row.lo, row.hi
        for _ in range(
            2,
        ):  # each end in turn; a second round lets the first end answer to the second
            # within the bin around zero values are not told apart, so no end is drawn into it
            tried = np.maximum(row.hi * self._shares(), min(row.hi, row.width))
            hi = tried[row.best(np.full(self.steps, lo), tried)]
            tried = np.minimum(row.lo * self._shares(), max(row.lo, -row.width))
            lo = tried[row.best(tried, np.full(self.steps, hi))]
        return lo, hi

    def _pow2(self, row: HistogramRow) -> tuple[float, float]:
        grid = row.grid
        widest = float(
            params_for(Range(np.array([row.lo]), np.array([row.hi])), grid).scale,
        )
        scales = np.maximum(widest * 0.5 ** np.arange(_OCTAVES), grid.scales[0])
        if grid.symmetric:
            zeros = np.full((_OCTAVES, 1), grid.zero, np.float64)
        else:  # from "the low end is reached" to "the high end is reached"
            low_end, high_end = (
                grid.qmin + np.ceil(-row.lo / scales),
                grid.qmax - np.ceil(row.hi / scales),
            )
            zeros = np.rint(np.linspace(low_end, high_end, 9, axis=1)).clip(
                grid.qmin,
                grid.qmax,
            )
        scale = np.broadcast_to(scales[:, None], zeros.shape).reshape(-1)
        reach = covered(
            QParams(scale.astype(np.float32), zeros.reshape(-1).astype(np.int64), 0),
            grid,
        )
        best = row.best_params(scale, zeros.reshape(-1))
        lo, hi = float(reach.lo[best]), float(reach.hi[best])
        if grid.symmetric and lo < -float(
            np.finfo(np.float32).max,
        ):  # an end that no float32 has would lower the scale
            lo = row.lo
        return lo, hi
