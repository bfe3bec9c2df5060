"""Least and greatest value of a stream, as they are, or averaged over batches, all alike or the
newest most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrators.grid import Floats


def _nothing() -> Floats:
    return np.zeros(0)


def bounds(rows: NDArray[np.float32]) -> tuple[Floats, Floats, int]:
    """Finite minimum and maximum of each row, and how many values were not finite."""
    if rows.shape[1] == 0:
        return np.zeros(len(rows)), np.zeros(len(rows)), 0
    lo, hi = rows.min(axis=1).astype(np.float64), rows.max(axis=1).astype(np.float64)
    if np.isfinite(lo).all() and np.isfinite(hi).all():
        return lo, hi, 0
    finite = np.isfinite(rows)
    lo = np.where(finite, rows, np.inf).min(axis=1).astype(np.float64)
    hi = np.where(finite, rows, -np.inf).max(axis=1).astype(np.float64)
    empty = ~finite.any(axis=1)
    lo[empty] = hi[empty] = 0.0
    return lo, hi, int(finite.size - finite.sum())


@dataclass
class Extremes:
    """Exact minimum and maximum of everything seen.

    Merging is exact, whatever the order or the split.
    """

    lo: Floats = field(default_factory=_nothing)
    hi: Floats = field(default_factory=_nothing)
    nonfinite: int = 0

    def observe(self, rows: NDArray[np.float32]) -> None:
        if rows.shape[1]:
            self.observe_bounds(*bounds(rows))

    def observe_bounds(self, lo: Floats, hi: Floats, nonfinite: int = 0) -> None:
        """Take in a batch of which only the least and greatest values, shape (rows,), are known."""
        if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
            bad = ~(np.isfinite(lo) & np.isfinite(hi))
            nonfinite += int(bad.sum())
            lo, hi = np.where(bad, 0.0, lo), np.where(bad, 0.0, hi)
        self.merge(
            Extremes(np.asarray(lo, np.float64), np.asarray(hi, np.float64), nonfinite),
        )

    def merge(self, other: Extremes) -> None:
        self.nonfinite += other.nonfinite
        if not self.lo.size:
            self.lo, self.hi = other.lo, other.hi
        elif other.lo.size:
            self.lo, self.hi = (
                np.minimum(self.lo, other.lo),
                np.maximum(self.hi, other.hi),
            )


def _none() -> NDArray[np.object_]:
    return np.zeros((2, 0), np.object_)


#: Multiplied by this, any float32 is a whole number.
_WHOLE = 2.0**149


@dataclass
class MeanExtremes(Extremes):
    """Minimum and maximum of everything seen, and sums over batches of those of each batch.

    Sums are whole numbers of 2**-149, the least float32, so that they are exact: the mean is the
    same number whatever the order.

    Attributes:
        sums: of the minima and of the maxima, shape (2, rows).
        batches: with a finite value, for each row.
    """

    sums: NDArray[np.object_] = field(default_factory=_none)
    batches: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def observe(self, rows: NDArray[np.float32]) -> None:
        if not rows.shape[1]:
            return
        lo, hi, nonfinite = bounds(rows)
        seen = np.ones(len(rows), np.bool_)
        if nonfinite:
            seen &= np.isfinite(rows).any(axis=1)
        sums = np.array(
            [[int(value * _WHOLE) for value in end] for end in (lo, hi)],
            np.object_,
        )
        batches: NDArray[np.int64] = seen.astype(np.int64)
        self.merge(MeanExtremes(lo, hi, nonfinite, sums, batches))

    def merge(self, other: Extremes) -> None:
        super().merge(other)
        if isinstance(other, MeanExtremes) and other.batches.size:
            first = not self.batches.size
            self.sums = other.sums if first else self.sums + other.sums
            self.batches = other.batches if first else self.batches + other.batches

    def means(self) -> tuple[Floats, Floats]:
        """Mean minimum and mean maximum of each row; zeros for a row without a finite value."""
        counts = [max(1, int(count)) for count in self.batches]
        # of two whole numbers Python rounds the quotient correctly
        lo, hi = (
            [whole / count / _WHOLE for whole, count in zip(end, counts, strict=True)]
            for end in self.sums
        )
        return np.array(lo, np.float64), np.array(hi, np.float64)


@dataclass
class MovingExtremes:
    """Exponential moving average of the minimum and maximum of each batch, in the order of the
    batches.

    ``average = (1 - constant) * average + constant * batch``, started at the first batch. A later
    stretch of batches is merged exactly: its own average is corrected for having been started at
    its first batch.
    """

    constant: float
    lo: Floats = field(default_factory=_nothing)
    hi: Floats = field(default_factory=_nothing)
    nonfinite: int = 0
    first: tuple[Floats, Floats] = field(
        default_factory=lambda: (_nothing(), _nothing()),
    )
    batches: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(0, np.int64),
    )  # of each row

    def observe(self, rows: NDArray[np.float32]) -> None:
        if rows.shape[1]:
            lo, hi, nonfinite = bounds(rows)
            seen = np.ones(len(rows), np.bool_)
            if nonfinite:
                seen &= np.isfinite(rows).any(axis=1)
            self._follow(lo, hi, seen, nonfinite)

    def observe_bounds(self, lo: Floats, hi: Floats, nonfinite: int = 0) -> None:
        """Take in a batch of which only the least and greatest values, shape (rows,), are known."""
        seen = np.isfinite(lo) & np.isfinite(hi)
        self._follow(
            np.where(seen, lo, 0.0),
            np.where(seen, hi, 0.0),
            seen,
            nonfinite + int((~seen).sum()),
        )

    def _follow(
        self,
        lo: Floats,
        hi: Floats,
        seen: NDArray[np.bool_],
        nonfinite: int,
    ) -> None:
        """Take in a batch; a row without a finite value, not ``seen``, keeps its average."""
        self.merge(
            MovingExtremes(
                self.constant,
                lo,
                hi,
                nonfinite,
                (lo, hi),
                seen.astype(np.int64),
            ),
        )

    def merge(self, other: MovingExtremes) -> None:
        self.nonfinite += other.nonfinite
        if not other.lo.size:
            return
        if not self.lo.size:
            self.lo, self.hi, self.first, self.batches = (
                other.lo,
                other.hi,
                other.first,
                other.batches,
            )
            return
        # alone, other starts at its first batch with weight (1 - c)^(n-1); here that batch weighs c
        # (1 - c)^(n-1), and the difference, (1 - c)^n, is exactly the weight that is left for what
        # came before
        kept, new = (1 - self.constant) ** other.batches, self.batches == 0
        self.lo = np.where(new, other.lo, kept * (self.lo - other.first[0]) + other.lo)
        self.hi = np.where(new, other.hi, kept * (self.hi - other.first[1]) + other.hi)
        self.first = (
            np.where(new, other.first[0], self.first[0]),
            np.where(new, other.first[1], self.first[1]),
        )
        self.batches = self.batches + other.batches
