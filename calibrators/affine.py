"""Compute scales and zero points, quantize and dequantize: the only place that does.

Follows the ONNX operators QuantizeLinear and DequantizeLinear:
``code = clip(rint(x / scale) + zero_point)`` with ties to even,
``x = (code - zero_point) * scale``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.grid import Floats, Grid, QParams, Range

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT64 = np.dtype(np.int64)
#: float32 holds all smaller integers exactly, and so the sum of a code and a zero point.
_EXACT_INTEGERS = 1 << 22
#: Bytes of floats that are quantized at a time: their intermediate arrays stay in the cache.
SLAB = 1 << 18


def params_for(
    range_: Range, grid: Grid, axis: int | None = None, *, short: int = 0
) -> QParams:
    """Return the scale and zero point with which ``grid`` covers ``range_``.

    A float scale covers the range to within half a step; a power-of-two scale is the smallest that
    clips nothing. No scale is zero, denormal, infinite or NaN. A row without extent (all zeros)
    gets scale 1. Near the greatest float32 the scale is lowered so that no dequantized value is
    infinite.

    Args:
        range_: one interval per row.
        grid: integer codes to use.
        axis: channel axis that the rows stand for; None for one row for the whole tensor.
        short: steps by which the codes of a power-of-two scale may miss an end of the range.

    Returns:
        float32 scales and int64 zero points of shape (rows,), or () if ``axis`` is None.

    >>> params_for(Range(-1.0, 3.0), Grid(0, 255, symmetric=False))
    QParams(scale=array(0.01568628, dtype=float32), zero_point=array(64), axis=None, block_size=0)
    """
    lo = range_.lo
    hi = range_.hi
    if grid.pow2:
        scale, zero = _pow2(lo, hi, grid, short)
    elif grid.symmetric:
        scale = round_scale(_legal(_symmetric_scale(lo, hi, grid), grid), grid)
        zero = np.full(lo.shape, grid.zero, np.float64)
    else:
        # The denominator counts steps between codes: 255 for uint8, so that both ends are codes.
        # first: the zero point must belong to it
        scale = round_scale(_legal((hi - lo) / grid.levels, grid), grid)
        zero = np.rint(grid.qmin - lo / scale)
        # A range symmetric around zero has its zero point halfway between two codes. The upper one
        # is used: 0 of int8 and 128 of uint8. Zeros alone have the code 0.
        middle = (grid.qmin + grid.qmax + 1) // 2
        zero = np.where(lo == -hi, np.where(hi > 0, middle, 0), zero)
    # A zero point lies beyond the grid where ``short`` steps may be missing, or where the scale is
    # the greatest legal one.
    zero = np.clip(zero, grid.qmin, grid.qmax)
    scale = _lowered(scale, zero, lo, hi, grid)
    if axis is None:
        scale = scale[0]
        zero = zero[0]
    return QParams(np.asarray(scale, np.float32), np.asarray(zero, np.int64), axis)


def round_scale(scale: Floats, grid: Grid) -> Floats:
    """Round positive scales to the stored type: nearest float32, or float16 rounded up.

    float16 scales are rounded up because a smaller scale would clip the ends of the range.

    >>> round_scale(np.array([0.1]), Grid(0, 15, half=True))
    array([0.10003662])
    """
    if not grid.half:
        return scale.astype(np.float32).astype(np.float64)
    # The cast rounds to nearest even; the comparison is in float64, where both sides are exact.
    near = np.clip(scale, *grid.scales).astype(np.float16)
    short = (near < scale) & (near < grid.scales[1])
    rounded = np.where(short, np.nextafter(near, np.float16(np.inf)), near)
    return rounded.astype(np.float64)


def _symmetric_scale(lo: Floats, hi: Floats, grid: Grid, short: int = 0) -> Floats:
    """Return the smallest scale for a symmetric grid to reach the farther end.

    Args:
        lo: least values, at most 0, shape (rows,).
        hi: greatest values, at least 0, shape (rows,).
        grid: symmetric integer codes.
        short: steps by which the codes may miss an end.
    """
    if grid.even:
        # Half a step beyond the greatest code: levels / 2 is 127.5 for int8.
        return np.maximum(hi, -lo) / (grid.levels / 2 + short)
    # Per end, as the codes below and above the zero point differ in number: 128 and 127 for int8.
    return np.maximum(
        hi / (grid.qmax + short - grid.zero), lo / (grid.qmin - short - grid.zero)
    )


def _legal(scale: Floats, grid: Grid) -> Floats:
    """Clip scales to the normal numbers of their type; scale 1 for an empty range."""
    return np.where(scale > 0, np.clip(scale, *grid.scales), 1.0)


def _lowered(scale: Floats, zero: Floats, lo: Floats, hi: Floats, grid: Grid) -> Floats:
    """Lower scales whose extreme code would dequantize to more than the greatest float32.

    Args:
        scale: shape (rows,).
        zero: zero points within the grid, shape (rows,).
        lo: least values, shape (rows,).
        hi: greatest values, shape (rows,).
        grid: integer codes.
    """
    below = zero - grid.qmin
    above = grid.qmax - zero
    # The magnitude of the code that the farther end rounds to, saturated to the grid.
    largest_code = np.maximum(
        np.minimum(np.rint(-lo / scale), below), np.minimum(np.rint(hi / scale), above)
    )
    fits = largest_code * scale.astype(np.float32) <= _FLOAT32_MAX
    # One float32 below the quotient, which may have been rounded up.
    lower = np.nextafter(
        np.float32(_FLOAT32_MAX / np.maximum(below, above)), np.float32(0)
    )
    if grid.pow2:
        # The greatest power of two that is not above.
        lower = np.ldexp(1.0, np.frexp(lower)[1] - 1)
    return np.where(fits, scale, lower)


def _pow2(lo: Floats, hi: Floats, grid: Grid, short: int) -> tuple[Floats, Floats]:
    """Return the smallest sufficient power-of-two scale, and the zero point.

    Args:
        lo: least values, at most 0, shape (rows,).
        hi: greatest values, at least 0, shape (rows,).
        grid: integer codes.
        short: steps that may be missing at either end.

    Returns:
        Scales and zero points of shape (rows,). Zero points may lie outside of the grid.
    """
    if grid.symmetric:
        scale = _pow2_at_least(_symmetric_scale(lo, hi, grid, short), grid)
        return scale, np.full(lo.shape, grid.zero, np.float64)
    levels = grid.levels + short
    scale = _pow2_at_least((hi - lo) / levels, grid)
    # Both sides are rounded up to integer codes, so that one more octave may be needed.
    narrow = np.ceil(-lo / scale) + np.ceil(hi / scale) > levels
    scale = np.minimum(np.where(narrow, 2 * scale, scale), grid.scales[1])
    return scale, grid.qmin + np.ceil(-lo / scale)


def _pow2_at_least(scale: Floats, grid: Grid) -> Floats:
    """Round scales up to powers of two."""
    return np.ldexp(1.0, _exponent_at_least(_legal(scale, grid)))


def _exponent_at_least(values: Floats) -> NDArray[np.int32]:
    """Return the exponents of the least powers of two that are not below the values."""
    # frexp gives 0.5 <= mantissa < 1: a mantissa of 0.5 is an exact power of two, which stays.
    mantissa, exponent = np.frexp(values)
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def octaves_for(codes: NDArray[Any], greatest: int) -> Floats:
    """Return by how many octaves scales must grow for codes to fit a format.

    Args:
        codes: magnitudes before rounding.
        greatest: greatest code of the format.

    Returns:
        Exponents of 2, at least 0, in the shape of ``codes``.

    >>> octaves_for(np.array([100, 32767, 32768, 200000]), 32767)
    array([0., 0., 1., 3.])
    """
    octaves = _exponent_at_least(np.asarray(codes, np.float64) / greatest)
    return np.maximum(octaves, 0).astype(np.float64)


def covered(params: QParams, grid: Grid) -> Range:
    """Return the interval of real values that the codes of ``grid`` reach under ``params``.

    >>> covered(params_for(Range(-1.0, 0.5), Grid(-128, 127, pow2=True)), Grid(-128, 127))
    Range(lo=array([-1.]), hi=array([0.9921875]))
    """
    scale = params.scale.astype(np.float64)
    return Range(
        (grid.qmin - params.zero_point) * scale, (grid.qmax - params.zero_point) * scale
    )


def quantize(
    x: NDArray[Any], params: QParams, grid: Grid, dtype: np.dtype[Any] = _INT64
) -> NDArray[Any]:
    """Quantize floats to integer codes, saturated to the grid.

    Args:
        x: floats of any shape.
        params: scale and zero point, per tensor, per channel or per block.
        grid: integer codes to saturate to.
        dtype: type of the result.

    Returns:
        Integer codes of type ``dtype``, in the shape of ``x``.

    >>> grid = Grid(-2, 2)
    >>> quantize(np.array([0.2, 9.0]), params_for(Range(-1, 1), grid), grid, np.dtype(np.int8))
    array([0, 2], dtype=int8)
    """
    x = np.asarray(x)
    if x.ndim:
        count = x.shape[0]
    else:
        count = 1
    step = max(1, count * SLAB // max(1, x.nbytes))
    # Whole blocks, as ``QParams.part`` requires.
    step += -step % max(1, params.block_size)
    # In slabs, as there are several intermediate copies between the floats and the codes.
    if step < count:
        codes = np.empty(x.shape, dtype)
        for start in range(0, count, step):
            part = slice(start, start + step)
            codes[part] = quantize(x[part], params.part(part), grid, dtype)
        return codes
    # Division in float32, the type of x and of y_scale in QuantizeLinear: float64 would round some
    # ties to another code.
    scale, zero = params.spread(x.shape)
    # The type in which a zero point is added without rounding.
    exact = np.float32 if max(-grid.qmin, grid.qmax) < _EXACT_INTEGERS else np.float64
    # A tiny scale sends large values to infinity, which saturates.
    with np.errstate(over="ignore"):
        steps = np.rint(np.asarray(x, np.float32) / scale).astype(exact, copy=False)
    steps += zero
    result: NDArray[Any] = np.clip(steps, grid.qmin, grid.qmax).astype(dtype)
    return result


def dequantize(codes: NDArray[Any], params: QParams) -> NDArray[np.float32]:
    """Return the float32 values of integer codes, in the shape of ``codes``."""
    # The difference is computed in int64: that of two 8-bit integers would wrap around.
    scale, zero = params.spread(codes.shape)
    reals: NDArray[np.float32] = (codes - zero).astype(np.float32) * scale
    return reals


def fake_quantize(x: NDArray[Any], params: QParams, grid: Grid) -> NDArray[np.float32]:
    """Quantize and dequantize ``x``.

    >>> fake_quantize(np.array([0.3, 9.0]), params_for(Range(-1, 1), Grid(-2, 2)), Grid(-2, 2))
    array([0.5, 1. ], dtype=float32)
    """
    return dequantize(quantize(x, params, grid), params)
