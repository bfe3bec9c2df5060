"""Histograms of samples in groups: those that reach about equally far are counted together.

A sample belongs to the octave of its greatest magnitude. The octaves below the greatest have a
histogram each, whose bins are the finer the smaller its samples are; so a few samples with outliers
can be told from all others at the price of a few histograms. What was seen as a whole is their sum,
exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrators.extremes import MeanExtremes
from calibrators.histogram import BINS, LEAST_EXPONENT, Counts, Histogram, coarser

#: Octaves that are told apart; what is smaller belongs to the last one.
GROUPS = 4


@dataclass
class GroupedHistogram(MeanExtremes):
    """Histograms of samples by the octave of their greatest magnitude.

    Merging is exact, whatever the order.

    Attributes:
        exponent: log2 of the bin width of the first group, shape (rows,); that of group g is g
        less. positive, negative: counts as in ``Histogram``, (rows, BINS) for each group; None for
        one without samples. samples: with a value other than zero, shape (GROUPS, rows).
    """

    exponent: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    positive: list[Counts | None] = field(default_factory=lambda: [None] * GROUPS)
    negative: list[Counts | None] = field(default_factory=lambda: [None] * GROUPS)
    samples: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros((GROUPS, 0), np.int64),
    )

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in one sample."""
        super().observe(rows)
        if not rows.shape[1]:
            return
        sample = Histogram()
        sample.observe(rows)
        occupied = ((sample.lo < 0) | (sample.hi > 0)).astype(np.int64)
        self._widen(sample.exponent)
        self._add(
            self.exponent - sample.exponent,
            sample.positive,
            sample.negative,
            occupied,
        )

    def merge(self, other: MeanExtremes) -> None:  # type: ignore[override]
        super().merge(other)
        if not isinstance(other, GroupedHistogram) or not other.exponent.size:
            return
        self._widen(other.exponent)
        for place, (positive, negative) in enumerate(
            zip(other.positive, other.negative, strict=True),
        ):
            if positive is not None and negative is not None:
                below = self.exponent - other.exponent + place
                self._add(below, positive, negative, other.samples[place])

    def group(self, place: int, row: int) -> Histogram | None:
        """The values of one row in the samples of one group; None if there are none."""
        positive, negative = self.positive[place], self.negative[place]
        if positive is None or negative is None or not self.samples[place, row]:
            return None
        part = slice(row, row + 1)
        exponent = self.exponent[part] - place
        return Histogram(
            self.lo[part],
            self.hi[part],
            exponent,
            positive[part],
            negative[part],
        )

    def whole(self) -> Histogram:
        """All values, as if they had been counted together."""
        result = Histogram(self.lo, self.hi, self.exponent, nonfinite=self.nonfinite)
        result.positive, result.negative = (
            np.zeros((len(self.lo), BINS), np.int64) for _ in range(2)
        )
        for place, (positive, negative) in enumerate(
            zip(self.positive, self.negative, strict=True),
        ):
            if positive is not None and negative is not None:
                by = np.full(len(self.lo), place)
                result.positive += coarser(positive, by)
                result.negative += coarser(negative, by)
        result.tidy()
        return result

    def _widen(self, exponent: NDArray[np.int64]) -> None:
        """Move the groups, if need be, until the first one holds values of this exponent."""
        if not self.exponent.size:
            self.exponent = np.full(exponent.shape, LEAST_EXPONENT)
            self.samples = np.zeros((GROUPS, len(exponent)), np.int64)
        by = np.maximum(exponent - self.exponent, 0)
        if not by.any():
            return
        before = list(zip(self.positive, self.negative, self.samples, strict=True))
        self.positive, self.negative = [None] * GROUPS, [None] * GROUPS
        self.samples = np.zeros_like(self.samples)
        self.exponent = self.exponent + by
        for place, (positive, negative, samples) in enumerate(before):
            if positive is not None and negative is not None:
                self._add(by + place, positive, negative, samples)

    def _add(
        self,
        below: NDArray[np.int64],
        positive: Counts,
        negative: Counts,
        samples: NDArray[np.int64],
    ) -> None:
        """Count in samples of a group so many octaves ``below`` the first one, for each row."""
        last = GROUPS - 1
        by = np.maximum(below - last, 0)
        found = Histogram(
            positive=coarser(positive, by),
            negative=coarser(negative, by),
        )
        found.tidy()
        groups = np.minimum(below, last)
        for place in np.unique(groups):
            rows = groups == place
            for counts, more in (
                (self.positive, found.positive),
                (self.negative, found.negative),
            ):
                total = counts[place]
                if total is None:
                    total = counts[place] = np.zeros_like(more)
                total[rows] += more[rows]
            self.samples[place, rows] += samples[rows]
