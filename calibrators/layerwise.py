"""LayerwisePercentile: choose the percentile per tensor, by its quantization error.

The rarity of the values to clip differs from layer to layer: one percentile for all is too much for
one layer and too little for another. Here several are tried on the histogram of each tensor, and
the percentile with the least mean squared error is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibrators.base import is_number, register, require
from calibrators.grid import Grid, Range, chosen
from calibrators.histogram import Histogram
from calibrators.histogram_row import HistogramRow
from calibrators.percentile import Percentile

#: Least share that is clipped, in percent, apart from none.
_FINEST = 1e-5
#: Most percentiles that are tried: more would differ by less than a bin.
_MAX_COUNT = 1000


@register("layerwise_percentile")
@dataclass(frozen=True)
class LayerwisePercentile:
    """The interval of the percentile, among several, with the least mean squared error.

    The clipped shares form a geometric series, as the order of magnitude of rarity counts.

    Attributes:
        least: lowest percentile of the series, in (0, 100].
        greatest: highest percentile of the series, in (0, 100].
        count: number of percentiles, including both ends.

    >>> method = LayerwisePercentile(least=99, greatest=99.99, count=3)
    >>> [round(percentile, 3) for percentile in method.percentiles]
    [99.99, 99.9, 99.0]
    """

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
        fits = is_number(self.count, int) and 2 <= self.count <= _MAX_COUNT
        require(fits, "count", self.count, f"2 to {_MAX_COUNT} percentiles")

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Percentiles to try, in falling order: of two equally good ones, the wider range wins."""
        # A geometric series cannot start at 0, the clipped share of the percentile 100.
        first = max(100 - self.greatest, _FINEST)
        last = max(100 - self.least, _FINEST)
        between = 100 - np.geomspace(first, last, self.count)[1:-1]
        # The ends are returned as given: 100 - geomspace would round them.
        return (float(self.greatest), *between.tolist(), float(self.least))

    def statistic(self) -> Histogram:
        """Return an empty statistic of the kind that ``range`` reads."""
        return Histogram()

    def range(self, statistic: Histogram, grid: Grid) -> Range:
        """Return the interval of the percentile with the least error, for each row."""
        return chosen(
            Range(statistic.lo, statistic.hi),
            [
                Percentile(percentile).range(statistic, grid)
                for percentile in self.percentiles
            ],
            lambda row, candidates: HistogramRow(statistic, row, grid).best(
                candidates.lo, candidates.hi
            ),
        )
