"""MeanMinMax: the range of the average sample, as in NNCF's default for activations.

One image in ten with an outlier does not cost all others their resolution, as with MinMax. Values
beyond the average are clipped. Clipping costs more than it brings where all samples have about the
same range, and where the greatest values decide, as at the logits of a classifier: outputs get the
full range instead.
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
    """Average over the samples of their least and greatest values.

    Attributes:
        by_sample: the range depends on where a sample ends and the next one begins.
        at_outputs: the calibrator to use instead after the last weighted layer of a model.
    """

    by_sample: ClassVar[bool] = True
    at_outputs: ClassVar[Calibrator] = MinMax()

    def statistic(self) -> MeanExtremes:
        """Return an empty statistic of the kind that ``range`` reads."""
        return MeanExtremes()

    def range(self, statistic: MeanExtremes, grid: Grid) -> Range:
        """Return the interval for ``grid`` to cover, per row."""
        lo, hi = statistic.means()
        return Range(lo, hi)
