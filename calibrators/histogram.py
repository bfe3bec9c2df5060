"""A streaming histogram with a growing range and exact merging.

Bins are ``2**exponent`` wide and start at zero: value x falls into bin ``trunc(x / 2**exponent)``.
A larger value raises the exponent, and neighbouring bins are added up, which is exactly the result
of counting with the wider bins from the start. The result depends on neither the order nor the
batching of the data.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrators.extremes import bounds, no_counts, nothing
from calibrators.grid import Floats

#: Bins on each side of zero. The side of the largest magnitude uses BINS/2 to BINS of them.
BINS = 2048
_LOG2_BINS = BINS.bit_length() - 1
#: Least exponent of bins. 2**120 is still a float32: finer bins than 2**-120 are never needed.
LEAST_EXPONENT = -120
#: Values of a row that are taken in at a time, and that are counted at a time: they and the scratch
#: arrays stay in the cache.
_PART, _CHUNK = 1 << 18, 1 << 16
#: Counters of a row: two sets of bins for both signs, or four sets for one sign.
_COUNTERS = 4 * BINS
#: Offsets added to the bins of a row, so that neighbouring values use different sets of counters.
_SIGNED = np.resize(np.arange(BINS, _COUNTERS, 2 * BINS, dtype=np.int32), _CHUNK)
_UNSIGNED = np.resize(np.arange(0, _COUNTERS, BINS, dtype=np.int32), _CHUNK)

Counts = NDArray[np.int64]


def _counts() -> Counts:
    return np.zeros((0, BINS), np.int64)


@dataclass
class Histogram:
    """Counts of values by magnitude and sign, one histogram per row.

    Attributes:
        lo: exact finite minimum, shape (rows,).
        hi: exact finite maximum, shape (rows,).
        exponent: log2 of the bin width, shape (rows,).
        positive: counts of values in ``[i, i + 1) * width``, shape (rows, BINS). Bin 0 holds
            ``(-width, width)``.
        negative: counts of values in ``(-i - 1, -i] * width``, shape (rows, BINS); bin 0 is empty.
        nonfinite: number of NaN and infinite values, which are not counted.
    """

    lo: Floats = field(default_factory=nothing)
    hi: Floats = field(default_factory=nothing)
    exponent: NDArray[np.int64] = field(default_factory=no_counts)
    positive: Counts = field(default_factory=_counts)
    negative: Counts = field(default_factory=_counts)
    nonfinite: int = 0

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in a batch, shape (rows, n)."""
        # Of a single long row with a non-finite value, a part is copied at a time.
        step = _PART if len(rows) == 1 else max(1, rows.shape[1])
        for start in range(0, rows.shape[1], step):
            self._take(rows[:, start : start + step])

    def _take(self, rows: NDArray[np.float32]) -> None:
        lo, hi, nonfinite = bounds(rows)
        self._reserve(lo, hi)
        self.nonfinite += nonfinite
        # For shorter rows, clearing the counters would take longer than the counting.
        if rows.shape[1] >= _COUNTERS:
            for index, row in enumerate(rows):
                if nonfinite:
                    row = row[np.isfinite(row)]
                self._count_row(index, row, signed=lo[index] < 0)
        else:
            # Non-finite values are counted as zeros, and subtracted again below.
            if nonfinite:
                gone = np.count_nonzero(~np.isfinite(rows), axis=1)
                rows = np.where(np.isfinite(rows), rows, np.float32(0))
            step = max(1, _CHUNK // rows.shape[1])
            for start in range(0, len(rows), step):
                self._count(slice(start, start + step), rows[start : start + step])
            if nonfinite:
                self.positive[:, 0] -= gone

    def _count_row(
        self, row: int, values: NDArray[np.float32], *, signed: bool
    ) -> None:
        """Count neighbouring values in different counters.

        After a ReLU many neighbours are zero. A processor that increments one counter again and
        again waits each time for the previous store.
        """
        # One-sided rows, as after a ReLU, have room for four sets instead of two.
        offsets = _SIGNED if signed else _UNSIGNED
        bins = 2 * BINS if signed else BINS
        scale = np.ldexp(np.float32(1), -self.exponent[row])
        counters = np.zeros(_COUNTERS, np.int64)
        for start in range(0, values.size, _CHUNK):
            # A product with a power of two is exact outside of bin 0.
            scaled = values[start : start + _CHUNK] * scale
            # Truncates towards zero. Processors convert float32 to int32 several values at a time.
            index = scaled.astype(np.int32)
            index += offsets[: len(index)]
            counters += np.bincount(index, minlength=_COUNTERS)
        # The sets are added up: shape (bins,), with zero in the middle of a signed row.
        counts = counters.reshape(-1, bins).sum(axis=0)
        self.positive[row] += counts[-BINS:]
        if signed:
            # From -1 downwards: negative counts are stored from zero outwards.
            self.negative[row, 1:] += counts[BINS - 1 : 0 : -1]

    def _count(self, span: slice, rows: NDArray[np.float32]) -> None:
        """Count the finite values of several short rows at once.

        Args:
            span: indices of the rows in the statistic.
            rows: their values, shape (rows, n).
        """
        scaled = np.multiply(
            rows, np.ldexp(np.float32(1), -self.exponent[span, None]), dtype=np.float32
        )
        # One bincount for all rows: each has a stretch of 2 * BINS counters, with zero in its
        # middle. The conversion truncates towards zero.
        middles = np.arange(BINS, len(rows) * 2 * BINS, 2 * BINS, dtype=np.int32)
        index = scaled.astype(np.int32) + middles[:, None]
        counts = np.bincount(index.reshape(-1), minlength=len(rows) * 2 * BINS)
        counts = counts.reshape(-1, 2 * BINS)
        self.positive[span] += counts[:, BINS:]
        self.negative[span, 1:] += counts[:, BINS - 1 : 0 : -1]

    def merge(self, other: Histogram) -> None:
        """Take in the values of another statistic."""
        self.nonfinite += other.nonfinite
        if not other.lo.size:
            return
        self._reserve(other.lo, other.hi)
        shift = self.exponent - other.exponent
        # After ``_reserve`` the own bins are at least as wide as the other ones: shift >= 0.
        self.positive += coarser(other.positive, shift)
        self.negative += coarser(other.negative, shift)
        self.tidy()

    def _reserve(self, lo: Floats, hi: Floats) -> None:
        """Widen the bins, if need be, until they hold ``lo`` and ``hi``.

        The counts move to the wider bins.
        """
        # Most batches change nothing after the first few.
        if self.lo.size and (self.lo <= lo).all() and (hi <= self.hi).all():
            return
        exponent = np.frexp(np.maximum(-lo, hi))[1].astype(np.int64) - _LOG2_BINS
        exponent = np.maximum(exponent, LEAST_EXPONENT)
        # frexp(0) has exponent 0, which would make the bins of an all-zero row too wide for later
        # values.
        exponent[(lo == 0) & (hi == 0)] = LEAST_EXPONENT
        if not self.lo.size:
            self.lo = lo
            self.hi = hi
            self.exponent = exponent
            self.positive = np.zeros((len(lo), BINS), np.int64)
            self.negative = np.zeros((len(lo), BINS), np.int64)
            return
        self.lo = np.minimum(self.lo, lo)
        self.hi = np.maximum(self.hi, hi)
        wider = np.maximum(self.exponent, exponent)
        if (wider > self.exponent).any():
            shift = wider - self.exponent
            self.positive = coarser(self.positive, shift)
            self.negative = coarser(self.negative, shift)
            self.exponent = wider
            self.tidy()

    def tidy(self) -> None:
        """Move small negative values to the bin around zero."""
        self.positive[:, 0] += self.negative[:, 0]
        self.negative[:, 0] = 0

    @property
    def width(self) -> Floats:
        """Bin width per row."""
        return np.ldexp(1.0, self.exponent)

    def magnitude(self) -> Counts:
        """Return counts by absolute value, shape (rows, BINS)."""
        return self.positive + self.negative

    def signed(self, row: int) -> tuple[Floats, NDArray[np.float64]]:
        """Return centres and counts of the occupied bins of one row, in rising order."""
        # Shape (2 * BINS - 1,): bins -(BINS - 1) to BINS - 1.
        counts = np.concatenate([self.negative[row, :0:-1], self.positive[row]]).astype(
            np.float64,
        )
        index = np.arange(1 - BINS, BINS)
        # The bin around zero is two widths wide, and has its centre at zero.
        centres = (index + 0.5 * np.sign(index)) * self.width[row]
        occupied = counts > 0
        # The centre of an outermost bin may lie beyond the extreme value.
        return centres[occupied].clip(self.lo[row], self.hi[row]), counts[occupied]


def coarser(counts: Counts, shift: NDArray[np.int64]) -> Counts:
    """Add up groups of ``2**shift`` bins, counted from zero outwards, row by row.

    Args:
        counts: shape (rows, BINS).
        shift: octaves by which the bins get wider, at least 0, shape (rows,).

    Returns:
        Counts of shape (rows, BINS), with zeros behind the last bin that is used; the array itself
        if no bin gets wider.
    """
    if not shift.any():
        return counts
    result = np.zeros_like(counts)
    # From log2(BINS) octaves on, all values lie in bin 0.
    for row, by in enumerate(np.minimum(shift, _LOG2_BINS)):
        result[row, : BINS >> by] = counts[row].reshape(BINS >> by, 1 << by).sum(axis=1)
    return result
