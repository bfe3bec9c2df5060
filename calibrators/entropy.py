"""Entropy: choose the range with the least divergence of the quantized distribution.

Follows the calibration published with TensorRT (S. Migacz, "8-bit inference with TensorRT", 2017):
for each threshold the clipped histogram is the reference P, Q is P merged into as many groups as
the grid has levels, and the threshold with the least Kullback-Leibler divergence KL(P || Q) wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.base import is_number, register, require
from calibrators.grid import Floats, Grid, Range
from calibrators.histogram import Histogram

#: Greatest number of thresholds: more would lie closer to each other than the bins.
_MAX_CANDIDATES = 1 << 14


@register("entropy")
@dataclass(frozen=True)
class Entropy:
    """The clipping threshold on the magnitude that keeps the most information.

    Both ends are clipped at the same magnitude. The number of groups follows from the grid: the
    number of levels between zero and the threshold.

    Attributes:
        candidates: number of thresholds that are tried at most.
    """

    candidates: int = 128

    def __post_init__(self) -> None:
        fits = (
            is_number(self.candidates, int) and 1 <= self.candidates <= _MAX_CANDIDATES
        )
        require(
            fits, "candidates", self.candidates, f"1 to {_MAX_CANDIDATES} thresholds"
        )

    def statistic(self) -> Histogram:
        """Return an empty statistic of the kind that ``range`` reads."""
        return Histogram()

    def range(self, statistic: Histogram, grid: Grid) -> Range:
        """Return the interval for ``grid`` to cover, per row."""
        counts = statistic.magnitude()
        bound = np.zeros(len(counts))
        for row, (lo, hi, width) in enumerate(
            zip(statistic.lo, statistic.hi, statistic.width, strict=True)
        ):
            magnitude = counts[row].astype(np.float64)
            bound[row] = self._threshold(magnitude, lo, hi, width, grid)
        return Range(np.maximum(statistic.lo, -bound), np.minimum(statistic.hi, bound))

    def _threshold(
        self, counts: Floats, lo: float, hi: float, width: float, grid: Grid
    ) -> float:
        """Return the threshold of one row with the least divergence.

        Args:
            counts: counts by magnitude, shape (BINS,).
            lo: least value.
            hi: greatest value.
            width: width of a bin.
            grid: integer codes, whose number of levels is that of the groups.
        """
        largest = max(-lo, hi)
        if largest > 0:
            # A value on the edge of a bin, such as the 6 of a ReLU6, lies in the bin beyond.
            bins = int(largest / width) + 1
        else:
            bins = 0
        # The histogram counts magnitudes: with values of both signs, each sign has half of the
        # levels.
        if not grid.symmetric and (lo >= 0 or hi <= 0):
            levels = grid.levels
        else:
            levels = grid.levels // 2
        # Each bin has a level of its own: clipping would bring nothing.
        if bins <= levels:
            return largest
        counts = counts.copy()
        # Zero has a code of its own: merging its bin loses nothing, so a peak there must not count.
        counts[0] = min(counts[0], counts[1])
        ends = np.unique(np.linspace(levels, bins, self.candidates).astype(np.int64))
        # Widest threshold first: argmin returns the first of equally good ones.
        ends = ends[::-1]
        divergences = [_divergence(counts[:bins], int(end), levels) for end in ends]
        return min(largest, float(ends[int(np.argmin(divergences))]) * width)


def _divergence(counts: Floats, end: int, levels: int) -> float:
    """Return the KL divergence of the histogram clipped at ``end`` from its quantization.

    The quantization merges the bins into ``levels`` groups of equal width.

    Args:
        counts: counts by magnitude, shape (bins,).
        end: number of bins below the threshold, at least ``levels``.
        levels: number of groups.
    """
    # P contains the clipped values and Q does not; otherwise clipping would cost nothing.
    kept = counts[:end]
    reference = kept.copy()
    # Clipped values pile up at the threshold.
    reference[-1] += counts[end:].sum()
    # Group of each bin, shape (end,).
    group = np.arange(end) * levels // end
    occupied = (reference > 0).astype(np.float64)
    # The mass of a group is spread evenly over the bins that P occupies, as in the paper.
    mass = np.bincount(group, weights=kept, minlength=levels)
    share = mass / np.maximum(
        np.bincount(group, weights=occupied, minlength=levels), 1.0
    )
    return _kl(reference, share[group] * occupied)


def _kl(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Return KL(p || q) of two histograms after normalization."""
    total_p = p.sum()
    total_q = q.sum()
    if not total_p or not total_q:
        return float("inf")
    p = p / total_p
    q = q / total_q
    mask = p > 0
    # A bin that is empty in Q alone would make the divergence infinite: it counts as very unlikely.
    return float(np.sum(p[mask] * np.log(p[mask] / np.maximum(q[mask], 1e-12))))
