"""Scales of functions with a known range: Sigmoid, Tanh, Softmax, LpNormalization."""

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
from calibrators.histogram import Histogram
from calibrators.histogram_row import HistogramRow
from quark_onnx.config import QuantizationSpec

#: Known bounds are reduced to no less than this share of them.
_LEAST_SHARE = 2.0**-12


def calibrator_for(spec: QuantizationSpec) -> Calibrator:
    """Return the calibrator of a bounded function.

    The calibrator measures extremes, or a histogram where two candidate scales are compared.
    """
    return MinMSE() if spec.pow2 else MinMax()


def params(bounds: tuple[float, float], found: Statistic | None, grid: Grid) -> QParams:
    """Return scale and zero point of a function with a known range.

    A float scale covers the bounds exactly. A power-of-two scale has two candidates: the least
    scale that covers the bounds, with a step of 2d, and the scale with step d, if its codes end
    at most d before a bound. Codes from -128 to 127 cover [0, 1] with 2^-6; with 2^-7 they end
    at 127/128, and the half step above 127.5/128 saturates.

    The error of the finer scale is at most d/2, and at most d for the share p of values that
    saturate. The error of the coarser scale is at most d for every value, so the maximum errors
    are equal. For values spread evenly over a step, the mean squared error of the finer scale
    is at most (1 - p) d²/12 + p d². The error of the coarser scale is at least d²/3 - p d²/3,
    because it has a code for the bound. The finer scale is better unless p exceeds 1/5. Few
    functions have such a share of saturated values, but open-or-shut gates and a softmax over
    two classes do, so the calibration histogram decides. Without a histogram, the finer scale
    is used.

    Args:
        bounds: least and greatest value of the function.
        found: the measured statistic; None without a measurement.
        grid: the codes to use.

    >>> params((0.0, 1.0), None, Grid(-128, 127, pow2=True)).scale
    array(0.0078125, dtype=float32)
    """
    # The range, reduced to octaves or quarters of the bounds.
    reach = within(bounds, found, grid)
    finer = params_for(reach, grid, short=1)
    covering = params_for(reach, grid)
    if finer.scale == covering.scale or not isinstance(found, Histogram):
        return finer
    scales = np.array([finer.scale, covering.scale], np.float64)
    zeros = np.array([finer.zero_point, covering.zero_point], np.float64)
    return (finer, covering)[HistogramRow(found, 0, grid).best_params(scales, zeros)]


def within(bounds: tuple[float, float], found: Statistic | None, grid: Grid) -> Range:
    """Return the known bounds, reduced while they still contain every measured value.

    A softmax over a thousand values leaves most of the unit interval empty, and Tanh in a
    decomposed Mish is never negative. For power-of-two scales both bounds are halved together.
    Otherwise each bound is reduced by itself to the least of 1, 3/4, 1/2, 3/8, ... of its value
    that covers the data: that is a margin of up to a third for unseen data, and a function that
    uses its full range keeps its bounds.

    Args:
        bounds: least and greatest value of the function.
        found: the measured statistic; None without a measurement.
        grid: the codes to use.
    """
    low, high = bounds
    if found is not None:
        # A function without negative values has the lower bound 0, which no factor changes.
        used_low = 0.0
        if low < 0:
            used_low = float(-found.lo.min()) / -low
        used_high = float(found.hi.max()) / high
        if grid.pow2:
            used_low = used_high = _octaves(max(used_low, used_high))
        # Rounding may let a computed value exceed the bounds slightly; they are never widened.
        low *= min(_quarters(used_low), 1.0)
        high *= min(_quarters(used_high), 1.0)
    return Range(np.array([low]), np.array([high]))


def _octaves(used: float) -> float:
    """Return the least power of two that is not below a share."""
    return float(2.0 ** np.ceil(np.log2(max(used, _LEAST_SHARE))))


def _quarters(used: float) -> float:
    """Return the least of 1, 3/4, 1/2, 3/8, 1/4, ... that is not below a share."""
    octave = _octaves(used)
    if used <= 0.75 * octave:
        return 0.75 * octave
    return octave
