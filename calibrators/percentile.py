"""Percentile: clip the rarest values, so that the grid serves the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibrators.base import is_number, register, require
from calibrators.grid import Floats, Grid, Range
from calibrators.histogram import Counts, Histogram


@register("percentile")
@dataclass(frozen=True)
class Percentile:
    """The interval that holds ``percentile`` percent of the values.

    On a symmetric grid the percentile is of the magnitudes; otherwise half of the rest is cut off
    at each end. Thresholds lie on bin edges, within the values seen.

    Attributes:
        percentile: share of the values that is kept, in percent, in (0, 100].
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
        return Histogram()

    def range(self, statistic: Histogram, grid: Grid) -> Range:
        tail = 1 - self.percentile / 100
        total = statistic.magnitude().sum(axis=1)
        width = statistic.width
        if grid.symmetric:
            above = below = _threshold(statistic.magnitude(), tail * total) * width
        else:
            negative = statistic.negative.copy()
            negative[:, 0] = statistic.positive[
                :,
                0,
            ]  # the bin around zero belongs to both sides
            above = _threshold(statistic.positive, tail / 2 * total) * width
            below = _threshold(negative, tail / 2 * total) * width
        return Range(np.maximum(statistic.lo, -below), np.minimum(statistic.hi, above))


def _threshold(counts: Counts, allowed: Floats) -> Floats:
    """Edge, in bins from zero, beyond which at most ``allowed`` values lie; one per row."""
    beyond = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
    edge: Floats = (beyond > allowed[:, None]).sum(axis=1, dtype=np.float64)
    return edge
