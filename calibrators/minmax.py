"""MinMax: the range from the least to the greatest value."""

from __future__ import annotations

from dataclasses import dataclass

from calibrators.base import is_number, register, require
from calibrators.extremes import Extremes, MovingExtremes
from calibrators.grid import Grid, Range


@register("minmax")
@dataclass(frozen=True)
class MinMax:
    """Least and greatest value, or their moving average over batches.

    Attributes:
        moving_average: average the extremes of the batches instead of taking the extreme of all.
        constant: weight of the newest batch in the moving average.
    """

    moving_average: bool = False
    constant: float = 0.01

    def __post_init__(self) -> None:
        require(
            isinstance(self.moving_average, bool),
            "moving_average",
            self.moving_average,
            "true or false",
        )
        fits = is_number(self.constant) and 0 <= self.constant <= 1
        require(fits, "constant", self.constant, "a weight from 0 to 1")

    def statistic(self) -> Extremes | MovingExtremes:
        """Return an empty statistic of the kind that ``range`` reads."""
        if self.moving_average:
            return MovingExtremes(self.constant)
        return Extremes()

    def range(self, statistic: Extremes | MovingExtremes, grid: Grid) -> Range:
        """Return the interval for ``grid`` to cover, per row."""
        return Range(statistic.lo, statistic.hi)
