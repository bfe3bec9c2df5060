"""NonOverflow: the smallest power-of-two scale without clipping."""

from __future__ import annotations

from dataclasses import dataclass, replace

from calibrators.affine import covered, params_for
from calibrators.base import register
from calibrators.extremes import Extremes
from calibrators.grid import Grid, Range


@register("nonoverflow")
@dataclass(frozen=True)
class NonOverflow:
    """The range of the smallest power-of-two scale without clipping.

    The range is the same on a grid with float scales.
    """

    def statistic(self) -> Extremes:
        """Return an empty statistic of the kind that ``range`` reads."""
        return Extremes()

    def range(self, statistic: Extremes, grid: Grid) -> Range:
        """Return the interval for ``grid`` to cover, per row."""
        seen = Range(statistic.lo, statistic.hi)
        # The interval is widened to what the codes reach, so that ``params_for`` finds the same
        # scale again.
        return covered(params_for(seen, replace(grid, pow2=True), axis=0), grid)
