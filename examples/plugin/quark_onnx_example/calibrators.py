"""Sigma: the range is the mean plus and minus some standard deviations, within what was seen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrators import Extremes, Grid, Range, register
from calibrators.base import is_number, require


@dataclass
class Moments(Extremes):
    """Extremes, and the number, the sum and the sum of squares of the values of each row."""

    count: int = 0
    total: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in values of shape (rows, n)."""
        super().observe(rows)
        values = rows.astype(np.float64)
        self.count += values.shape[1]
        self.total = self.total + values.sum(axis=1)
        self.squares = self.squares + np.square(values).sum(axis=1)

    def merge(self, other: Extremes) -> None:
        """Take in what another statistic has seen after this one."""
        super().merge(other)
        if isinstance(other, Moments):
            self.count += other.count
            self.total = self.total + other.total
            self.squares = self.squares + other.squares


@register("sigma")
@dataclass(frozen=True)
class Sigma:
    """Mean plus and minus some standard deviations.

    Attributes:
        width: of the range on each side of the mean, in standard deviations.
    """

    width: float = 4.0

    def __post_init__(self) -> None:
        fits = is_number(self.width) and self.width > 0
        require(fits, "width", self.width, "a number above 0")

    def statistic(self) -> Moments:
        """Return an empty statistic."""
        return Moments()

    def range(self, statistic: Moments, grid: Grid) -> Range:
        """Return the range of each row."""
        count = max(statistic.count, 1)
        mean = statistic.total / count
        variance = np.maximum(statistic.squares / count - np.square(mean), 0)
        reach = self.width * np.sqrt(variance)
        least = np.maximum(statistic.lo, mean - reach)
        greatest = np.minimum(statistic.hi, mean + reach)
        return Range(least, greatest)
