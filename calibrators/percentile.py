"""Percentile: clip the largest magnitudes, so that the codes resolve the other values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibrators.base import is_number, register, require
from calibrators.grid import Floats, Grid, Range
from calibrators.histogram import Counts, Histogram


@register("percentile")
@dataclass(frozen=True)
class Percentile:
    """The interval that contains ``percentile`` percent of the values.

    On a symmetric grid the percentile applies to the magnitudes; otherwise half of the remainder is
    clipped at each end. Thresholds lie on bin edges, within the range of the values.

    Attributes:
        percentile: share of the values that is not clipped, in percent, in (0, 100].
    """

    percentile: float = 99.999

    def __post_init__(self) -> None:
        fits = is_number(self.percentile) and 0 < self.percentile <= 100
        require(
            fits,
            "percentile",
            self.percentile,
            "a number greater than 0 and at most 100",
        )

    def statistic(self) -> Histogram:
        """Return an empty statistic of the kind that ``range`` reads."""
        return Histogram()

    def range(self, statistic: Histogram, grid: Grid) -> Range:
        """Return the interval for ``grid`` to cover, per row."""
        tail = 1 - self.percentile / 100
        total = statistic.magnitude().sum(axis=1)
        width = statistic.width
        if grid.symmetric:
            above = below = _threshold(statistic.magnitude(), tail * total) * width
        else:
            negative = statistic.negative.copy()
            # The bin around zero belongs to both signs.
            negative[:, 0] = statistic.positive[:, 0]
            above = _threshold(statistic.positive, tail / 2 * total) * width
            below = _threshold(negative, tail / 2 * total) * width
        # A bin edge may lie beyond the extreme value, where the grid would waste codes.
        return Range(np.maximum(statistic.lo, -below), np.minimum(statistic.hi, above))


def _threshold(counts: Counts, allowed: Floats) -> Floats:
    """Return the edge, in bins from zero, beyond which at most ``allowed`` values lie.

    Args:
        counts: shape (rows, BINS).
        allowed: shape (rows,).
    """
    # beyond[i] counts the values in bin i and outwards. It falls with i, so the number of bins with
    # more than the allowed values is the index of the edge.
    beyond = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
    edge: Floats = (beyond > allowed[:, None]).sum(axis=1, dtype=np.float64)
    return edge
