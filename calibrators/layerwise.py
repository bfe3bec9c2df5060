"""LayerwisePercentile: each tensor gets the percentile that its own quantization error asks for.

How rare a value has to be to be clipped differs from layer to layer: one percentile for all is too
much for one layer and too little for another. Here several are tried on the histogram of each
tensor, and the one with the least mean squared error is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibrators.base import is_number, register, require
from calibrators.grid import Floats, Grid, Range
from calibrators.histogram import Histogram
from calibrators.histogram_row import HistogramRow
from calibrators.percentile import Percentile

#: The least share that is cut off, in percent, unless it is nothing at all.
_FINEST = 1e-5
#: More percentiles than this differ by less than a bin.
_MOST = 1000


@register("layerwise_percentile")
@dataclass(frozen=True)
class LayerwisePercentile:
    """The interval of the percentile, among several, with the least mean squared error.

    The shares that are cut off form a geometric series, as what matters is how rare the rarest
    values are.

    Attributes:
        least, greatest: the percentiles at both ends of the series, in (0, 100].
        count: how many are tried, these two among them.

    >>> [round(each, 3) for each in LayerwisePercentile(least=99, greatest=99.99, count=3).percentiles]
    [99.99, 99.9, 99.0]
    """  # noqa: E501

    least: float = 99.0
    greatest: float = 100.0
    count: int = 11

    def __post_init__(self) -> None:
        for name in ("least", "greatest"):
            value = getattr(self, name)
            fits = is_number(value) and 0 < value <= 100
            require(fits, name, value, "a number greater than 0 and at most 100")
        require(
            self.least <= self.greatest,
            "least",
            self.least,
            f"at most greatest, which is {self.greatest!r}",
        )
        fits = is_number(self.count, int) and 2 <= self.count <= _MOST
        require(fits, "count", self.count, f"2 to {_MOST} percentiles")

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Those that are tried, in falling order: of two that are equally good, the one that clips
        less wins.
        """
        first, last = (max(100 - end, _FINEST) for end in (self.greatest, self.least))
        between = 100 - np.geomspace(first, last, self.count)[1:-1]
        return (float(self.greatest), *map(float, between), float(self.least))

    def statistic(self) -> Histogram:
        return Histogram()

    def range(self, statistic: Histogram, grid: Grid) -> Range:
        tried = [
            _extended(Percentile(each).range(statistic, grid), statistic)
            for each in self.percentiles
        ]
        lo, hi = (
            np.stack([getattr(each, end) for each in tried], axis=1)
            for end in ("lo", "hi")
        )
        rows = range(len(statistic.lo))
        best = np.array(
            [HistogramRow(statistic, row, grid).best(lo[row], hi[row]) for row in rows],
            np.int64,
        )
        return Range(lo[rows, best], hi[rows, best])


def _extended(found: Range, statistic: Histogram) -> Range:
    """Everything seen, for rows where a percentile left nothing but zero."""
    nothing = found.lo == found.hi
    lo: Floats = np.where(nothing, statistic.lo, found.lo)
    return Range(lo, np.where(nothing, statistic.hi, found.hi))
