"""MeanMinMax: the range of the average sample, as NNCF's default for activations computes it.

One image in ten with an outlier does not take the range from all others, as it does with MinMax.
What a sample has beyond the average is clipped. That costs more than it brings where all samples
reach about equally far, and where the greatest values are what matters, as at the logits of a
classifier: outputs are given all that was seen instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from calibrators.base import Calibrator, register
from calibrators.extremes import MeanExtremes
from calibrators.grid import Grid, Range
from calibrators.minmax import MinMax


@register("mean_minmax")
@dataclass(frozen=True)
class MeanMinMax:
    """Average over the samples of the least and of the greatest value of each.

    Attributes:
        by_sample: the range depends on where a sample ends and the next one begins.
        at_outputs: the calibrator that takes its place behind the last weighted layer of a model.
    """

    by_sample: ClassVar[bool] = True
    at_outputs: ClassVar[Calibrator] = MinMax()

    def statistic(self) -> MeanExtremes:
        return MeanExtremes()

    def range(self, statistic: MeanExtremes, grid: Grid) -> Range:
        lo, hi = statistic.means()
        return Range(lo, hi)
