"""Sample vectors of a stream with bounded memory, independent of their order and split.

The vectors whose bits have the least hashes are kept (bottom-k sampling, Cohen & Kaplan 2007).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from calibrators.extremes import Extremes
from calibrators.grid import Grid, Range

#: Most values that are kept of one tensor.
_MAX_VALUES = 1 << 18


@dataclass
class Sampled(Extremes):
    """Extremes per channel, and a sample of vectors over the channels.

    Attributes:
        limit: number of vectors that are kept at most.
        vectors: shape (kept, channels), in the order of their hashes.
        marks: hashes of the vectors.
    """

    limit: int = 256
    vectors: NDArray[np.float32] = field(
        default_factory=lambda: np.zeros((0, 0), np.float32),
    )
    marks: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in vectors as the columns of an array of shape (channels, n)."""
        super().observe(rows)
        # Equal vectors have equal hashes: a vector that comes twice is kept once, in whichever
        # order.
        marks = _hashes(rows)
        if len(self.marks) == self._most(len(rows)):
            # Later hashes are mostly too great: only the others are sorted and copied.
            indices = np.flatnonzero(marks < self.marks[-1])
            rows = rows[:, indices]
            marks = marks[indices]
        self._take(np.ascontiguousarray(rows.T), marks)

    def merge(self, other: Extremes) -> None:
        """Take in the values of another statistic."""
        super().merge(other)
        if isinstance(other, Sampled):
            self._take(other.vectors, other.marks)

    def _most(self, channels: int) -> int:
        """Return the number of vectors of this length that are kept."""
        return max(1, min(self.limit, _MAX_VALUES // max(1, channels)))

    def _take(self, vectors: NDArray[np.float32], marks: NDArray[np.uint64]) -> None:
        """Merge vectors into the sample, and keep those with the least hashes."""
        if not vectors.size:
            return
        limit = self._most(vectors.shape[1])
        # np.unique sorts the hashes and drops repeated vectors.
        hashes, indices = np.unique(marks, return_index=True)
        indices = indices[:limit]
        kept = len(self.marks)
        if not kept:
            # A view would keep the hashes of all vectors in memory.
            self.marks, self.vectors = hashes[:limit].copy(), vectors[indices]
            return
        joined = np.concatenate([self.marks, hashes[:limit]])
        # Of two equal hashes the first place wins, which is the vector that is kept already.
        hashes, order = np.unique(joined, return_index=True)
        self.marks, order = hashes[:limit], order[:limit]
        is_new = order >= kept
        # The kept vectors are copied once.
        chosen = self.vectors[np.where(is_new, 0, order)]
        chosen[is_new] = vectors[indices[order[is_new] - kept]]
        self.vectors = chosen


def _hashes(rows: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return hashes of the bits of vectors, the columns of an array of shape (channels, n)."""
    marks: NDArray[np.uint64] = np.einsum(
        "ci,c->i",
        rows.view(np.uint32),
        _factors(len(rows)),
        dtype=np.uint64,
        casting="unsafe",
    )
    # Shifts and a multiplication by 2**64 divided by the golden ratio, as in SplitMix64: high bits
    # of the sum reach low bits of the hash, and low bits reach high ones.
    marks ^= marks >> np.uint64(31)
    marks *= np.uint64(0x9E3779B97F4A7C15)
    marks ^= marks >> np.uint64(29)
    return marks


@lru_cache(maxsize=64)
def _factors(channels: int) -> NDArray[np.uint64]:
    """Return the factors of the channels in a hash."""
    # The seed depends on the length alone, so that hashes of several processes can be merged.
    generator = np.random.default_rng(channels)
    # Odd factors keep all bits of a value in the sum modulo 2**64.
    return generator.integers(0, 1 << 63, channels, np.uint64) * 2 + 1


@dataclass(frozen=True)
class Samples:
    """Calibrator that requests a sample of vectors of a tensor."""

    limit: int = 256

    def statistic(self) -> Sampled:
        """Return an empty statistic of the kind that ``range`` reads."""
        return Sampled(limit=self.limit)

    def range(self, statistic: Sampled, grid: Grid) -> Range:
        """Return the full range."""
        return Range(statistic.lo, statistic.hi)
