"""NonOverflow: the smallest power-of-two scale that clips nothing that was seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from calibrators.affine import covered, params_for
from calibrators.base import register
from calibrators.extremes import Extremes
from calibrators.grid import Grid, Range


@register("nonoverflow")
@dataclass(frozen=True)
class NonOverflow:
    """The range that a power-of-two scale spans when it just covers all values, also on a grid with
    float scales.
    """

    def statistic(self) -> Extremes:
        return Extremes()

    def range(self, statistic: Extremes, grid: Grid) -> Range:
        seen = Range(statistic.lo, statistic.hi)
        return covered(params_for(seen, replace(grid, pow2=True), axis=0), grid)
