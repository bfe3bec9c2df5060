"""bounded: scales of functions whose range is known, such as Sigmoid, Tanh, Softmax and
LpNormalization.
"""

from __future__ import annotations

import numpy as np

from calibrators import (
    Calibrator,
    Grid,
    MinMax,
    MinMSE,
    QParams,
    Range,
    Statistic,
    params_for,
)
from calibrators.grid import SMALLEST_SCALE
from calibrators.histogram import Histogram
from calibrators.histogram_row import HistogramRow
from quark_onnx.config import QuantizationSpec

#: Known bounds are not halved beyond this share of them.
_LEAST_SHARE = 2.0**-12


def calibrator_for(spec: QuantizationSpec) -> Calibrator:
    """Return what is measured within known bounds: extremes, or a histogram where two scales have
    to be compared.
    """
    return MinMSE() if spec.pow2 else MinMax()


def params(bounds: tuple[float, float], found: Statistic | None, grid: Grid) -> QParams:
    """Return scale and zero point of a function whose range is known.

    A float scale covers the bounds exactly. Of power-of-two scales there are two candidates: the
    least that covers the bounds, with a step of 2d, and the one with step d, if its codes end at
    most d before a bound. Codes from -128 to 127 cover [0, 1] with 2^-6; with 2^-7 they end at
    127/128, and the half step above 127.5/128 is saturated.

    The error of the finer scale is at most d/2, and at most d for the share p of the values that is
    saturated. That of the coarser one is at most d for any value, so that the greatest error is the
    same. Of values that are spread evenly over a step the mean squared error is (1 - p) d²/12 + p
    d² at most, against d²/3 - p d²/3 at least, as the coarser scale has a code for the bound
    itself. The finer one is better unless p is above 1/5. Few functions have so many values there,
    but gates that are either open or shut and a softmax over two classes do, so that the histogram
    of the calibration decides. Without one the finer scale is taken.

    Args:
        bounds: least and greatest value of the function.
        found: what was measured of it; None if nothing was.
        grid: the codes to use.

    >>> params((0.0, 1.0), None, Grid(-128, 127, pow2=True)).scale
    array(0.0078125, dtype=float32)
    """
    reach = within(bounds, found)
    finer, covering = (params_for(reach, grid, short=short) for short in (1, 0))
    if finer.scale == covering.scale or not isinstance(found, Histogram):
        return finer
    scales = np.array([finer.scale, covering.scale], np.float64)
    zeros = np.array([finer.zero_point, covering.zero_point], np.float64)
    return (finer, covering)[HistogramRow(found, 0, grid).best_params(scales, zeros)]


def within(bounds: tuple[float, float], found: Statistic | None) -> Range:
    """Return known bounds, halved as often as they still hold everything that was measured.

    A softmax over a thousand values leaves nearly all of the unit interval empty. Halving leaves a
    margin for what other data may bring, and a function that does use its bounds keeps them.
    """
    lo, hi = (np.array([bound]) for bound in bounds)
    if found is not None:
        used = max(
            float(-found.lo.min()) / max(-bounds[0], SMALLEST_SCALE),
            float(found.hi.max()) / bounds[1],
        )
        share = 2.0 ** np.ceil(np.log2(max(used, _LEAST_SHARE)))
        lo, hi = lo * min(share, 1.0), hi * min(share, 1.0)
    return Range(lo, hi)
