"""A bounded sample of the vectors of a stream, the same in whatever order and split they come.

Of all vectors those are kept whose bits have the least hashes (bottom-k sampling, Cohen & Kaplan
2007).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrators.extremes import Extremes
from calibrators.grid import Grid, Range

#: Values that are kept of one tensor, at most.
_VALUES = 1 << 18


@dataclass
class Sampled(Extremes):
    """Extremes of each channel, and some of the vectors of one value for each channel.

    Attributes:
        limit: how many vectors are kept.
        vectors: shape (kept, channels), in the order of their hashes.
        marks: the hashes.
    """

    limit: int = 256
    vectors: NDArray[np.float32] = field(
        default_factory=lambda: np.zeros((0, 0), np.float32),
    )
    marks: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in vectors as the columns of an array of shape (channels, n)."""
        super().observe(rows)
        vectors = np.ascontiguousarray(rows.T)
        self._take(vectors, _hashes(vectors))

    def merge(self, other: Extremes) -> None:
        super().merge(other)
        if isinstance(other, Sampled):
            self._take(other.vectors, other.marks)

    def _take(self, vectors: NDArray[np.float32], marks: NDArray[np.uint64]) -> None:
        if not vectors.size:
            return
        limit = max(1, min(self.limit, _VALUES // vectors.shape[1]))
        least, places = np.unique(marks, return_index=True)
        places = places[:limit]
        joined = np.concatenate([self.marks, least[:limit]])
        chosen = (
            np.concatenate([self.vectors, vectors[places]])
            if len(self.marks)
            else vectors[places]
        )
        least, order = np.unique(joined, return_index=True)
        self.marks, self.vectors = least[:limit], chosen[order[:limit]]


def _hashes(vectors: NDArray[np.float32]) -> NDArray[np.uint64]:
    """A hash of the bits of each vector."""
    factors = (
        np.random.default_rng(vectors.shape[1]).integers(
            0,
            1 << 63,
            vectors.shape[1],
            np.uint64,
        )
        * 2
        + 1
    )
    marks: NDArray[np.uint64] = np.einsum(
        "ij,j->i",
        vectors.view(np.uint32),
        factors,
        dtype=np.uint64,
        casting="unsafe",
    )
    marks ^= marks >> np.uint64(31)
    marks *= np.uint64(0x9E3779B97F4A7C15)
    marks ^= marks >> np.uint64(29)
    return marks


@dataclass(frozen=True)
class Samples:
    """What an observation asks for to have its tensor sampled; there is no range to read off."""

    limit: int = 256

    def statistic(self) -> Sampled:
        return Sampled(limit=self.limit)

    def range(self, statistic: Sampled, grid: Grid) -> Range:
        """All that was seen."""
        return Range(statistic.lo, statistic.hi)
