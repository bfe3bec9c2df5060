"""Histograms of samples grouped by magnitude.

A sample belongs to the octave of its greatest magnitude. The octaves below the greatest have a
histogram each, whose bins are finer for smaller samples; so a few samples with outliers can be told
from all others at the price of a few histograms. The histogram of all values is their exact sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrators.extremes import MeanExtremes, no_counts
from calibrators.histogram import BINS, LEAST_EXPONENT, Counts, Histogram, coarser

#: Octaves with a histogram of their own; smaller samples belong to the last one.
GROUPS = 4


@dataclass
class GroupedHistogram(MeanExtremes):
    """Histograms of samples by the octave of their greatest magnitude.

    Merging is exact, whatever the order.

    Attributes:
        exponent: log2 of the bin width of the first group, shape (rows,); g less for group g.
        positive: counts as in ``Histogram``, (rows, BINS) for each group; None for an empty group.
        negative: counts of negative values, likewise.
        samples: number of samples with a nonzero value, shape (GROUPS, rows).
    """

    exponent: NDArray[np.int64] = field(default_factory=no_counts)
    positive: list[Counts | None] = field(default_factory=lambda: [None] * GROUPS)
    negative: list[Counts | None] = field(default_factory=lambda: [None] * GROUPS)
    samples: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros((GROUPS, 0), np.int64),
    )

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in one sample."""
        if not rows.shape[1]:
            return
        sample = Histogram()
        sample.observe(rows)
        # Only the slower path finds the rows that have no finite value.
        if sample.nonfinite:
            super().observe(rows)
        else:
            seen = np.ones(len(rows), np.bool_)
            self._follow(sample.lo, sample.hi, seen, nonfinite=0)
        # A sample of zeros has no error relative to itself, and is not counted.
        occupied = ((sample.lo < 0) | (sample.hi > 0)).astype(np.int64)
        self._widen(sample.exponent)
        self._add(
            self.exponent - sample.exponent, sample.positive, sample.negative, occupied
        )

    def merge(self, other: MeanExtremes) -> None:  # type: ignore[override]
        """Take in the values of another statistic."""
        super().merge(other)
        if not isinstance(other, GroupedHistogram) or not other.exponent.size:
            return
        self._widen(other.exponent)
        for index, (positive, negative) in enumerate(
            zip(other.positive, other.negative, strict=True),
        ):
            if positive is not None and negative is not None:
                # Octaves from the first group of this statistic down to the group ``index`` of the
                # other one.
                below = self.exponent - other.exponent + index
                self._add(below, positive, negative, other.samples[index])

    def group(self, index: int, row: int) -> Histogram | None:
        """Return the histogram of a row in a group of samples; None if empty."""
        positive = self.positive[index]
        negative = self.negative[index]
        if positive is None or negative is None or not self.samples[index, row]:
            return None
        part = slice(row, row + 1)
        # Each group has bins half as wide as the group before.
        exponent = self.exponent[part] - index
        return Histogram(
            self.lo[part], self.hi[part], exponent, positive[part], negative[part]
        )

    def whole(self) -> Histogram:
        """Return the histogram of the full stream."""
        result = Histogram(self.lo, self.hi, self.exponent, nonfinite=self.nonfinite)
        result.positive = np.zeros((len(self.lo), BINS), np.int64)
        result.negative = np.zeros((len(self.lo), BINS), np.int64)
        for index, (positive, negative) in enumerate(
            zip(self.positive, self.negative, strict=True),
        ):
            if positive is not None and negative is not None:
                by = np.full(len(self.lo), index)
                result.positive += coarser(positive, by)
                result.negative += coarser(negative, by)
        # Coarser bins move small negative values into negative[:, 0], which has to stay empty.
        result.tidy()
        return result

    def _widen(self, exponent: NDArray[np.int64]) -> None:
        """Shift the groups, if need be, until the first group holds the exponent."""
        if not self.exponent.size:
            self.exponent = np.full(exponent.shape, LEAST_EXPONENT)
            self.samples = np.zeros((GROUPS, len(exponent)), np.int64)
        # A louder sample than all before moves every group down by whole octaves, so that merging
        # in another order ends with the same groups.
        by = np.maximum(exponent - self.exponent, 0)
        if not by.any():
            return
        before = list(zip(self.positive, self.negative, self.samples, strict=True))
        self.positive = [None] * GROUPS
        self.negative = [None] * GROUPS
        self.samples = np.zeros_like(self.samples)
        self.exponent = self.exponent + by
        for index, (positive, negative, samples) in enumerate(before):
            if positive is not None and negative is not None:
                self._add(by + index, positive, negative, samples)

    def _add(
        self,
        below: NDArray[np.int64],
        positive: Counts,
        negative: Counts,
        samples: NDArray[np.int64],
    ) -> None:
        """Add the samples of a group.

        Args:
            below: octaves of the group below the first one, at least 0, shape (rows,).
            positive: counts of the group, shape (rows, BINS).
            negative: counts of negative values, shape (rows, BINS).
            samples: number of samples, shape (rows,).
        """
        last = GROUPS - 1
        # Samples below the last group share its bins, coarsened by the missing octaves.
        if (below > last).any():
            by = np.maximum(below - last, 0)
            merged = Histogram(
                positive=coarser(positive, by), negative=coarser(negative, by)
            )
            merged.tidy()
            positive, negative = merged.positive, merged.negative
        groups = np.minimum(below, last)
        # Rows belong to different groups: a sample may be loud in one channel, quiet in another.
        for index in sorted(set(groups.tolist())):
            rows = groups == index
            # A sum without a mask is three times as fast.
            where = True if rows.all() else rows[:, None]
            for counts, more in (
                (self.positive, positive),
                (self.negative, negative),
            ):
                total = counts[index]
                if total is None:
                    total = counts[index] = np.zeros_like(more)
                np.add(total, more, out=total, where=where)
            self.samples[index, rows] += samples[rows]
