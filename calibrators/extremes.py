"""Track the least and greatest value of a stream, exactly or averaged over batches.

Averages weigh all batches alike, or the newest most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrators.grid import Floats


def nothing() -> Floats:
    """Return the values of no rows."""
    return np.zeros(0)


def no_counts() -> NDArray[np.int64]:
    """Return the counts of no rows."""
    return np.zeros(0, np.int64)


def bounds(rows: NDArray[np.float32]) -> tuple[Floats, Floats, int]:
    """Return the finite minimum and maximum of each row, and the number of non-finite values.

    Args:
        rows: shape (rows, n); a row without a finite value has both at 0.
    """
    if rows.shape[1] == 0:
        return np.zeros(len(rows)), np.zeros(len(rows)), 0
    lo = rows.min(axis=1).astype(np.float64)
    hi = rows.max(axis=1).astype(np.float64)
    # The minimum of values with a NaN is NaN: two reductions tell whether all values are finite,
    # without a mask as large as the data.
    if np.isfinite(lo).all() and np.isfinite(hi).all():
        return lo, hi, 0
    finite = np.isfinite(rows)
    lo = np.where(finite, rows, np.inf).min(axis=1).astype(np.float64)
    hi = np.where(finite, rows, -np.inf).max(axis=1).astype(np.float64)
    empty = ~finite.any(axis=1)
    # A row without a finite value gets the interval of zero, which every range contains anyway.
    lo[empty] = hi[empty] = 0.0
    return lo, hi, int(finite.size - finite.sum())


def _seen(
    rows: NDArray[np.float32],
) -> tuple[Floats, Floats, NDArray[np.bool_], int]:
    """Return the results of ``bounds``, and a mask of the rows with a finite value.

    The extremes of the others, zeros, are no part of a mean.

    Returns:
        Minimum, maximum, mask, and the number of non-finite values.
    """
    lo, hi, nonfinite = bounds(rows)
    seen = np.ones(len(rows), np.bool_)
    if nonfinite:
        seen &= np.isfinite(rows).any(axis=1)
    return lo, hi, seen, nonfinite


@dataclass
class Extremes:
    """Exact minimum and maximum of a stream.

    Merging is exact, whatever the order or the split.
    """

    lo: Floats = field(default_factory=nothing)
    hi: Floats = field(default_factory=nothing)
    nonfinite: int = 0

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in values of shape (rows, n)."""
        if rows.shape[1]:
            self.observe_bounds(*bounds(rows))

    def observe_bounds(self, lo: Floats, hi: Floats, nonfinite: int = 0) -> None:
        """Take in the extremes of a batch.

        Args:
            lo: least values, shape (rows,).
            hi: greatest values, shape (rows,).
            nonfinite: number of non-finite values in the batch.
        """
        if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
            # Extremes that another program has computed, with ReduceMin and ReduceMax for instance,
            # pass NaN and infinity on.
            bad = ~(np.isfinite(lo) & np.isfinite(hi))
            nonfinite += int(bad.sum())
            lo = np.where(bad, 0.0, lo)
            hi = np.where(bad, 0.0, hi)
        self.merge(
            Extremes(np.asarray(lo, np.float64), np.asarray(hi, np.float64), nonfinite)
        )

    def merge(self, other: Extremes) -> None:
        """Take in the values of another statistic."""
        self.nonfinite += other.nonfinite
        if not self.lo.size:
            self.lo = other.lo
            self.hi = other.hi
        elif other.lo.size:
            self.lo = np.minimum(self.lo, other.lo)
            self.hi = np.maximum(self.hi, other.hi)


def _no_sums() -> NDArray[np.object_]:
    return np.zeros((2, 0), np.object_)


#: Any float32 multiplied by this factor is an integer.
_TO_INTEGER = 2.0**149


def _as_integers(values: Floats) -> list[int]:
    # Exact: the greatest float32 times 2**149 is below 2**277, and float64 reaches 2**1023.
    return [int(value * _TO_INTEGER) for value in values]


def _averages(sums: NDArray[np.object_], counts: list[int]) -> Floats:
    # The division by a power of two, which comes second, rounds nothing.
    # Python rounds the quotient of two integers correctly, whatever their size.
    means = [
        total / count / _TO_INTEGER for total, count in zip(sums, counts, strict=True)
    ]
    return np.array(means, np.float64)


@dataclass
class MeanExtremes(Extremes):
    """Minimum and maximum of all values, and the sums over batches of the batches' extremes.

    Sums are integer multiples of 2**-149, the least float32. They are exact, so that the mean does
    not depend on the order of the batches.

    Attributes:
        sums: sums of the minima and of the maxima, shape (2, rows).
        batches: number of batches with a finite value, shape (rows,).
    """

    sums: NDArray[np.object_] = field(default_factory=_no_sums)
    batches: NDArray[np.int64] = field(default_factory=no_counts)

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in values of shape (rows, n)."""
        if rows.shape[1]:
            self._follow(*_seen(rows))

    def _follow(
        self, lo: Floats, hi: Floats, seen: NDArray[np.bool_], nonfinite: int
    ) -> None:
        """Take in the extremes of a batch.

        Args:
            lo: least values, shape (rows,).
            hi: greatest values, shape (rows,).
            seen: rows with a finite value, shape (rows,); the others have no mean.
            nonfinite: number of non-finite values in the batch.
        """
        sums = np.array([_as_integers(lo), _as_integers(hi)], np.object_)
        batches: NDArray[np.int64] = seen.astype(np.int64)
        # the merge of this class: classes with more than extremes add those on their own
        MeanExtremes.merge(self, MeanExtremes(lo, hi, nonfinite, sums, batches))

    def merge(self, other: Extremes) -> None:
        """Take in the values of another statistic."""
        super().merge(other)
        if not isinstance(other, MeanExtremes) or not other.batches.size:
            return
        if self.batches.size:
            self.sums = self.sums + other.sums
            self.batches = self.batches + other.batches
        else:
            self.sums = other.sums
            self.batches = other.batches

    def means(self) -> tuple[Floats, Floats]:
        """Return the mean minimum and maximum of each row; zeros without a finite value."""
        counts = [max(1, int(count)) for count in self.batches]
        lo, hi = self.sums
        return _averages(lo, counts), _averages(hi, counts)


@dataclass
class MovingExtremes:
    """Exponential moving average of the minimum and maximum of each batch, in batch order.

    ``average = (1 - constant) * average + constant * batch``, started at the first batch. A later
    stretch of batches is merged exactly, by correcting its average for the start at its first
    batch.
    """

    constant: float
    lo: Floats = field(default_factory=nothing)
    hi: Floats = field(default_factory=nothing)
    nonfinite: int = 0
    first: tuple[Floats, Floats] = field(
        default_factory=lambda: (nothing(), nothing()),
    )
    # number of batches with a finite value, shape (rows,)
    batches: NDArray[np.int64] = field(default_factory=no_counts)

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in values of shape (rows, n)."""
        if rows.shape[1]:
            self._follow(*_seen(rows))

    def observe_bounds(self, lo: Floats, hi: Floats, nonfinite: int = 0) -> None:
        """Take in the extremes of a batch, of shape (rows,)."""
        seen = np.isfinite(lo) & np.isfinite(hi)
        self._follow(
            np.where(seen, lo, 0.0),
            np.where(seen, hi, 0.0),
            seen,
            nonfinite + int((~seen).sum()),
        )

    def _follow(
        self, lo: Floats, hi: Floats, seen: NDArray[np.bool_], nonfinite: int
    ) -> None:
        """Take in the extremes of a batch.

        Args:
            lo: least values, shape (rows,).
            hi: greatest values, shape (rows,).
            seen: rows with a finite value, shape (rows,); the others stay unchanged.
            nonfinite: number of non-finite values in the batch.
        """
        self.merge(
            MovingExtremes(
                self.constant, lo, hi, nonfinite, (lo, hi), seen.astype(np.int64)
            )
        )

    def merge(self, other: MovingExtremes) -> None:
        """Take in the values of another statistic."""
        self.nonfinite += other.nonfinite
        if not other.lo.size:
            return
        if not self.lo.size:
            self.lo = other.lo
            self.hi = other.hi
            self.first = other.first
            self.batches = other.batches
            return
        # On its own, ``other`` starts at its first batch with weight (1 - c)^(n-1). In the merged
        # average this batch has weight c (1 - c)^(n-1), and the difference, (1 - c)^n, is exactly
        # the weight of the average before.
        decay = (1 - self.constant) ** other.batches
        # Rows without a finite value so far start at the first batch of ``other``.
        unseen = self.batches == 0
        self.lo = np.where(
            unseen, other.lo, decay * (self.lo - other.first[0]) + other.lo
        )
        self.hi = np.where(
            unseen, other.hi, decay * (self.hi - other.first[1]) + other.hi
        )
        self.first = (
            np.where(unseen, other.first[0], self.first[0]),
            np.where(unseen, other.first[1], self.first[1]),
        )
        self.batches = self.batches + other.batches
