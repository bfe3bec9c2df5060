"""Entropy: the range whose quantized distribution diverges least from the float one
(Kullback-Leibler).

Follows the calibration published with TensorRT (S. Migacz, "8-bit inference with TensorRT", 2017):
for each threshold the clipped histogram is the reference P, its merger into as many groups as the
grid has levels is Q, and the threshold
with the least KL(P || Q) wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.base import is_number, register, require
from calibrators.grid import Floats, Grid, Range
from calibrators.histogram import BINS, Histogram

#: More thresholds than this only cost time: they are closer to each other than the bins.
_MOST = 1 << 14


@register("entropy")
@dataclass(frozen=True)
class Entropy:
    """The threshold on the magnitude that keeps the most information.

    Both ends are clipped at the same magnitude, where they reach it. The number of groups follows
    from the grid: as many levels as it has between zero and the threshold.

    Attributes:
        candidates: how many thresholds are tried at most.
    """

    candidates: int = 128

    def __post_init__(self) -> None:
        fits = is_number(self.candidates, int) and 1 <= self.candidates <= _MOST
        require(fits, "candidates", self.candidates, f"1 to {_MOST} thresholds")

    def statistic(self) -> Histogram:
        return Histogram()

    def range(self, statistic: Histogram, grid: Grid) -> Range:
        bound = np.array(
            [
                self._threshold(magnitude.astype(np.float64), lo, hi, width, grid)
                for magnitude, lo, hi, width in zip(
                    statistic.magnitude(),
                    statistic.lo,
                    statistic.hi,
                    statistic.width,
                    strict=True,
                )
            ],
        )
        return Range(np.maximum(statistic.lo, -bound), np.minimum(statistic.hi, bound))

    def _threshold(
        self,
        counts: Floats,
        lo: float,
        hi: float,
        width: float,
        grid: Grid,
    ) -> float:
        largest = max(-lo, hi)
        used = min(BINS, int(np.ceil(largest / width))) if largest > 0 else 0
        # with both signs present the levels are shared between them
        levels = (
            grid.levels
            if not grid.symmetric and (lo >= 0 or hi <= 0)
            else grid.levels // 2
        )
        if used <= levels:
            return largest
        counts = counts.copy()
        counts[0] = min(
            counts[0],
            counts[1],
        )  # zero is a code of its own: merging its bin with others loses nothing
        tried = np.unique(np.linspace(levels, used, self.candidates).astype(np.int64))
        # from the whole range downwards, so that the widest of equally good thresholds wins
        divergence = [
            _divergence(counts[:used], int(end), levels) for end in tried[::-1]
        ]
        return min(largest, float(tried[::-1][int(np.argmin(divergence))]) * width)


def _divergence(counts: Floats, end: int, levels: int) -> float:
    """KL divergence between the histogram clipped at bin ``end`` and its merger into ``levels``
    equal groups.
    """
    kept = counts[:end]
    reference = kept.copy()
    reference[-1] += counts[end:].sum()  # what is clipped piles up at the threshold
    group = np.arange(end) * levels // end
    occupied = (reference > 0).astype(np.float64)
    mass = np.bincount(group, weights=kept, minlength=levels)
    share = mass / np.maximum(
        np.bincount(group, weights=occupied, minlength=levels),
        1.0,
    )
    return _kl(reference, share[group] * occupied)


def _kl(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    total_p, total_q = p.sum(), q.sum()
    if not total_p or not total_q:
        return float("inf")
    p, q = p / total_p, q / total_q
    mask = p > 0
    # a bin that Q lacks altogether would make the divergence infinite; it counts as very unlikely
    # instead
    return float(np.sum(p[mask] * np.log(p[mask] / np.maximum(q[mask], 1e-12))))
