"""The project's only scale and zero-point arithmetic.

Follows the ONNX operators QuantizeLinear and DequantizeLinear:
``code = clip(rint(x / scale) + zero_point)`` with ties to even,
``x = (code - zero_point) * scale``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.grid import Floats, Grid, QParams, Range

_GREATEST = float(np.finfo(np.float32).max)


_CODES = np.dtype(np.int64)
#: float32 holds integers up to here, and so any sum of a code in reach and a zero point.
_EXACT = 1 << 22
#: Reals of so many bytes become codes at a time: few enough for the processor's cache to hold what
#: is made of them.
_SLAB = 1 << 20


def params_for(
    range_: Range,
    grid: Grid,
    axis: int | None = None,
    *,
    short: int = 0,
) -> QParams:
    """The scale and zero point with which ``grid`` covers ``range_``.

    A float scale covers the range to within half a step; a power-of-two scale is the smallest that
    clips nothing. No scale is zero, denormal, infinite or NaN, and a row without extent (all zeros)
    gets scale 1. Neither end comes back as infinity: near the greatest float32, where the scale
    would be too large for that, it is lowered.

    Args:
        range_: one interval per row.
        grid: the codes to use.
        axis: the channel axis the rows stand for; None when there is one row for the whole tensor.
        short: steps by which the codes of a power-of-two scale may fall short of an end of the
            range.

    >>> params_for(Range(-1.0, 3.0), Grid(0, 255, symmetric=False))
    QParams(scale=array(0.01568628, dtype=float32), zero_point=array(64), axis=None, block_size=0)
    """
    lo, hi = range_.lo, range_.hi
    if grid.pow2:
        scale, zero = _pow2(lo, hi, grid, short)
    elif grid.symmetric:
        scale = round_scale(_legal(_symmetric_scale(lo, hi, grid), grid), grid)
        zero = np.full(lo.shape, grid.zero, np.float64)
    else:
        scale = round_scale(
            _legal((hi - lo) / grid.levels, grid),
            grid,
        )  # first: the zero point must belong to it
        zero = np.rint(grid.qmin - lo / scale)
        # between equal ends zero lies halfway between two codes: it is the upper one, 0 of int8 and
        # 128 of uint8
        zero = np.where(lo == -hi, (grid.qmin + grid.qmax + 1) // 2, zero)
    zero = np.clip(zero, grid.qmin, grid.qmax)
    scale = _lowered(scale, zero, lo, hi, grid)
    if axis is None:
        scale, zero = scale[0], zero[0]
    return QParams(np.asarray(scale, np.float32), np.asarray(zero, np.int64), axis)


def round_scale(scale: Floats, grid: Grid) -> Floats:
    """Positive scales as the numbers that are stored: the nearest float32, or the float16 that is
    no smaller.

    >>> round_scale(np.array([0.1]), Grid(0, 15, half=True))
    array([0.10003662])
    """
    if not grid.half:
        return scale.astype(np.float32).astype(np.float64)
    near = np.clip(scale, *grid.scales).astype(np.float16)
    short = (near < scale) & (near < grid.scales[1])
    return np.where(short, np.nextafter(near, np.float16(np.inf)), near).astype(
        np.float64,
    )


def _symmetric_scale(lo: Floats, hi: Floats, grid: Grid, short: int = 0) -> Floats:
    if grid.even:
        return np.maximum(hi, -lo) / (grid.levels / 2 + short)
    return np.maximum(
        hi / (grid.qmax + short - grid.zero),
        lo / (grid.qmin - short - grid.zero),
    )


def _legal(scale: Floats, grid: Grid) -> Floats:
    return np.where(scale > 0, np.clip(scale, *grid.scales), 1.0)


def _lowered(scale: Floats, zero: Floats, lo: Floats, hi: Floats, grid: Grid) -> Floats:
    """The scales, lowered where the code of an end would stand for more than the greatest float32."""  # noqa: E501
    below, above = zero - grid.qmin, grid.qmax - zero
    used = np.maximum(
        np.minimum(np.rint(-lo / scale), below),
        np.minimum(np.rint(hi / scale), above),
    )
    fits = used * scale.astype(np.float32) <= _GREATEST
    lower = np.nextafter(
        np.float32(_GREATEST / np.maximum(below, above)),
        np.float32(0),
    )
    return np.where(
        fits,
        scale,
        np.ldexp(1.0, np.frexp(lower)[1] - 1) if grid.pow2 else lower,
    )


def _pow2(lo: Floats, hi: Floats, grid: Grid, short: int) -> tuple[Floats, Floats]:
    """The smallest power-of-two scale, and the zero point, whose codes reach both ends but for
    ``short`` steps.
    """
    if grid.symmetric:
        return _pow2_at_least(_symmetric_scale(lo, hi, grid, short), grid), np.full(
            lo.shape,
            grid.zero,
            np.float64,
        )
    levels = grid.levels + short
    scale = _pow2_at_least((hi - lo) / levels, grid)
    # both sides are rounded up to whole codes, so that one more octave may be needed
    narrow = np.ceil(-lo / scale) + np.ceil(hi / scale) > levels
    scale = np.minimum(np.where(narrow, 2 * scale, scale), grid.scales[1])
    return scale, grid.qmin + np.ceil(-lo / scale)


def _pow2_at_least(scale: Floats, grid: Grid) -> Floats:
    mantissa, exponent = np.frexp(_legal(scale, grid))
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))


def octaves_for(codes: NDArray[Any], greatest: int) -> Floats:
    """Return the least powers of two, as exponents of 2, that scales must grow by for codes to be
    within a format.

    Args:
        codes: magnitudes, before they are rounded.
        greatest: the greatest code of the format.

    >>> octaves_for(np.array([100, 32767, 32768, 200000]), 32767)
    array([0., 0., 1., 3.])
    """
    mantissa, exponent = np.frexp(np.asarray(codes, np.float64) / greatest)
    return np.maximum(np.where(mantissa == 0.5, exponent - 1, exponent), 0).astype(
        np.float64,
    )


def covered(params: QParams, grid: Grid) -> Range:
    """The interval of reals that the codes of ``grid`` reach under ``params``.

    >>> covered(params_for(Range(-1.0, 0.5), Grid(-128, 127, pow2=True)), Grid(-128, 127))
    Range(lo=array([-1.]), hi=array([0.9921875]))
    """
    scale = params.scale.astype(np.float64)
    return Range(
        (grid.qmin - params.zero_point) * scale,
        (grid.qmax - params.zero_point) * scale,
    )


def quantize(
    x: NDArray[Any],
    params: QParams,
    grid: Grid,
    dtype: np.dtype[Any] = _CODES,
) -> NDArray[Any]:
    """Codes of the reals ``x``, saturated to the grid.

    Of type ``dtype``, int64 if it is not given, and of x's shape.

    >>> quantize(np.array([0.2, 9.0]), params_for(Range(-1, 1), Grid(-2, 2)), Grid(-2, 2), np.dtype(np.int8))
    array([0, 2], dtype=int8)
    """  # noqa: E501
    x = np.asarray(x)
    count = x.shape[0] if x.ndim else 1
    step = max(1, count * _SLAB // max(1, x.nbytes))
    step += -step % max(1, params.block_size)
    if (
        step < count
    ):  # a part at a time: between the reals and the codes there are several copies
        whole = np.empty(x.shape, dtype)
        for part in (slice(start, start + step) for start in range(0, count, step)):
            whole[part] = quantize(x[part], params.part(part), grid, dtype)
        return whole
    scale, zero = params.spread(x.shape)
    exact = (
        np.float32 if max(-grid.qmin, grid.qmax) < _EXACT else np.float64
    )  # that adds zero points without rounding
    with np.errstate(
        over="ignore",
    ):  # a tiny scale sends large values to infinity, which saturates
        steps = np.rint(np.asarray(x, np.float32) / scale).astype(exact, copy=False)
    steps += zero
    codes: NDArray[Any] = np.clip(steps, grid.qmin, grid.qmax).astype(dtype)
    return codes


def dequantize(codes: NDArray[Any], params: QParams) -> NDArray[np.float32]:
    """The reals that integer codes stand for; float32, of the codes' shape."""
    scale, zero = params.spread(codes.shape)
    reals: NDArray[np.float32] = (codes - zero).astype(np.float32) * scale
    return reals


def fake_quantize(x: NDArray[Any], params: QParams, grid: Grid) -> NDArray[np.float32]:
    """What is left of ``x`` after quantizing and dequantizing it.

    >>> fake_quantize(np.array([0.3, 9.0]), params_for(Range(-1, 1), Grid(-2, 2)), Grid(-2, 2))
    array([0.5, 1. ], dtype=float32)
    """
    return dequantize(quantize(x, params, grid), params)
