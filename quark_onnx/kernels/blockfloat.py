"""Quantize to block formats: block floating point (BFP) and microscaling (MX).

Follows the OCP Microscaling Formats (MX) Specification 1.0, section 6.3, and the operators
BFPQuantizeDequantize and MXQuantizeDequantize of the domain ``com.amd.quark``: bit for bit, except
that a zero here is always +0.

All arithmetic is in float64, where scaling float32 values by powers of two and rounding is exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quark_onnx.common.errors import ConfigError
from quark_onnx.kernels.minifloat import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    HALF_EVEN,
    Floats,
    MiniFloat,
    round_to,
    to_integer,
)

#: Floating element types of MX, by the value of the vendor's attribute ``element_dtype``.
ELEMENTS: dict[str, MiniFloat] = {
    "fp8_e5m2": E5M2,
    "fp8_e4m3": E4M3,
    "fp6_e3m2": E3M2,
    "fp6_e2m3": E2M3,
    "fp4_e2m1": E2M1,
}
#: Exponent of subnormal float32 in the operators: a stored exponent of zero.
LEAST_EXPONENT = -127
#: Bits of a block floating-point format besides the mantissa: the shared exponent and the sign.
EXPONENT_AND_SIGN = 9
#: A mantissa has at most 23 bits: a float32's with the hidden bit, minus the sign.
BIT_WIDTHS = range(EXPONENT_AND_SIGN + 1, EXPONENT_AND_SIGN + 24)
#: Exponents of the scales that E8M0 stores, from -127 to 127.
E8M0 = 127
#: Rules for the shared exponent of a microscaling block; see ``threshold``.
EXPONENTS = ("floor", "even", "ceil", "rceil")
#: The rule of least error for each element type. A float with a wide exponent range loses nothing
#: by a greater shared exponent, so that nothing is clipped; E4M3 has no value between 448 and 512,
#: where "even" still clips. E2M3 and E2M1 lose small values by it, and are clipped where the
#: greatest value is rounded to the last code anyway. The 64ths of int8 lose a bit to gain less than
#: half a step.
LEAST_ERROR = {
    "fp8_e4m3": "rceil",
    "fp8_e5m2": "even",
    "fp6_e3m2": "even",
    "fp6_e2m3": "even",
    "fp4_e2m1": "even",
    "int8": "floor",
}
#: Fraction bits of the element type int8.
FRACTION = 6
#: Values rounded at a time in the search for the better of two exponents.
_PART = 1 << 20


def bfp(
    x: ArrayLike,
    axis: int,
    *,
    bit_width: int = 16,
    block_size: int = 8,
    rounding_mode: int = HALF_EVEN,
) -> NDArray[np.float32]:
    """Quantize and dequantize to block floating point: an exponent per ``block_size`` values.

    A block's step is 2^(E - m + 1), with E the exponent of its greatest finite value and
    m = bit_width - 9; values are rounded to multiples of the step and clipped to ±(2^m - 1) of
    them. NaN and infinities pass unchanged and do not count.

    Args:
        x: float32 of any shape, rank 1 at least; the last block along the axis may be incomplete.
        axis: axis of the blocks; negative counts from the end.
        bit_width: 8 for the exponent, 1 for the sign, plus the mantissa.
        block_size: number of values that share an exponent.
        rounding_mode: direction of ties: 0 away from zero, 1 up, 2 to the even integer.

    Returns:
        float32, of x's shape.

    Raises:
        ConfigError: the axis, a size or the rounding mode is invalid.

    >>> bfp(np.float32([64.5, 1.5, -2.5, 0.25]), 0)
    array([64.,  2., -2.,  0.], dtype=float32)
    """
    bits = _mantissa_bits(bit_width)
    blocks, shape = _blocks(x, axis, block_size)
    finite = np.isfinite(blocks)
    clean = np.where(finite, blocks, 0.0)
    step = _power(_exponent(clean) - bits + 1)
    values = _in_steps(clean, step, 1 - 2**bits, 2**bits - 1, rounding_mode)
    return _restored(np.where(finite, values, blocks), shape, axis)


def bfp_prime(  # noqa: PLR0913  the attributes of the operator
    x: ArrayLike,
    axis: int,
    *,
    bit_width: int,
    block_size: int = 16,
    sub_block_size: int = 2,
    sub_block_shift_bits: int = 1,
    rounding_mode: int = HALF_EVEN,
) -> NDArray[np.float32]:
    """Quantize and dequantize to MX4, MX6 and MX9: finer steps for small sub-blocks.

    A sub-block's step is that of its block (see ``bfp``), halved as often as its own greatest
    exponent is smaller, but at most 2^sub_block_shift_bits - 1 times. Subnormal values become
    zero; a block with a NaN or an infinity becomes NaN.

    Args:
        x: float32 of any shape, rank 1 at least; the last block along the axis may be incomplete.
        axis: axis of the blocks; negative counts from the end.
        bit_width: 11 for MX4, 13 for MX6, 16 for MX9.
        block_size: number of values that share an exponent.
        sub_block_size: number of values that share a shift; a divisor of the block size.
        sub_block_shift_bits: width of a shift.
        rounding_mode: direction of ties: 0 away from zero, 1 up, 2 to the even integer.

    Returns:
        float32, of x's shape.

    Raises:
        ConfigError: the axis, a size or the rounding mode is invalid.

    >>> bfp_prime(np.float32([1.9, 1.2, 0.9, 0.3]), 0, bit_width=11)
    array([1.5 , 1.  , 0.75, 0.25], dtype=float32)
    """
    bits = _mantissa_bits(bit_width)
    if sub_block_size < 1 or block_size % sub_block_size:
        raise ConfigError(
            f"sub-blocks of {sub_block_size} do not divide blocks of {block_size}",
        )
    blocks, shape = _blocks(x, axis, block_size)
    broken = ~np.isfinite(blocks).all(axis=-1, keepdims=True)
    subnormal = np.abs(blocks) < np.finfo(np.float32).smallest_normal
    clean = np.where(broken | subnormal, 0.0, blocks)
    count = block_size // sub_block_size
    parts = clean.reshape(*clean.shape[:-1], count, sub_block_size)
    block = _exponent(clean)[..., None]
    shift = np.minimum(block - _exponent(parts), 2**sub_block_shift_bits - 1)
    step = _power(block - shift - bits + 1)
    values = _in_steps(parts, step, 1 - 2**bits, 2**bits - 1, rounding_mode)
    values = np.where(broken, np.nan, values.reshape(clean.shape))
    return _restored(values, shape, axis)


def mx(  # noqa: PLR0913  the attributes of the operator
    x: ArrayLike,
    axis: int,
    element: str,
    block_size: int = 32,
    rounding_mode: int = HALF_EVEN,
    exponent: str = "floor",
) -> NDArray[np.float32]:
    """Quantize and dequantize to microscaling: a power-of-two scale per ``block_size`` values.

    The scale is 2^(E - emax), with E the exponent of the block's greatest finite value, as in the
    specification; or, by the other rules, twice that if this value is above a threshold. Those
    rules limit scales to E8M0, 2^-127 to 2^127; "floor" does not, as in AMD's operator. The
    elements are rounded half to even and saturate. NaN and infinities pass unchanged and do not
    count.

    Args:
        x: float32 of any shape, rank 1 at least; the last block along the axis may be incomplete.
        axis: axis of the blocks; negative counts from the end.
        element: fp8_e5m2, fp8_e4m3, fp6_e3m2, fp6_e2m3, fp4_e2m1 or int8 (64ths, from -128 to 127).
        block_size: number of values that share a scale.
        rounding_mode: for int8 only, direction of ties: 0 away from zero, 1 up, 2 to the even
            integer.
        exponent: rule for the shared exponent, one of ``EXPONENTS``.

    Returns:
        float32, of x's shape.

    Raises:
        ConfigError: the element, a rule, the rounding mode, the axis or the block size is invalid.

    >>> mx(np.float32([5.0, 2.5, -0.7, 0.1]), 0, "fp4_e2m1")
    array([ 4. ,  2. , -0.5,  0. ], dtype=float32)
    """
    if element != "int8" and element not in ELEMENTS:
        raise ConfigError(
            f"MX element type {element!r} is unknown; use one of"
            f" {', '.join([*ELEMENTS, 'int8'])}",
        )
    if exponent not in EXPONENTS:
        raise ConfigError(
            f"exponent rule {exponent!r} is unknown; use one of {', '.join(EXPONENTS)}",
        )
    blocks, shape = _blocks(x, axis, block_size)
    finite = np.isfinite(blocks)
    clean = np.where(finite, blocks, 0.0)
    format = ELEMENTS.get(element)
    shared = _shared(clean, format, exponent)
    values = _in_elements(clean, shared, format, rounding_mode)
    return _restored(np.where(finite, values, blocks), shape, axis)


def better_mx(
    x: ArrayLike, axis: int, element: str, block_size: int = 32
) -> NDArray[np.float32]:
    """Quantize constants to microscaling with the better of two scales for each block.

    The exponent of a block is that of the specification or one more, whichever has the smaller
    squared error. The decoder stays the same: ``mx`` with the rule "floor" derives the same scale
    from the result. This requires the greatest magnitude of a block to be a value of the format or
    the next power of two: 480 of E4M3, which has 448 and the double of 240, would be clipped.

    Args:
        x: float32 of any shape, rank 1 at least.
        axis: axis of the blocks.
        element: a float, one of ``ELEMENTS``.
        block_size: number of values that share a scale.

    Returns:
        float32, of x's shape.

    >>> values = np.float32([500.0, 30.0])
    >>> better_mx(values, 0, "fp8_e4m3"), mx(values, 0, "fp8_e4m3")
    (array([512.,  30.], dtype=float32), array([448.,  30.], dtype=float32))
    """
    moved = np.moveaxis(np.asarray(x, np.float32), axis, -1)
    rows = moved.reshape(-1, moved.shape[-1])
    rounded = np.empty_like(rows)
    step = max(1, _PART // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        blocks, shape = _blocks(rows[start : start + step], -1, block_size)
        finite = np.isfinite(blocks)
        better = _better(np.where(finite, blocks, 0.0), ELEMENTS[element])
        values = np.where(finite, better, blocks)
        rounded[start : start + step] = _restored(values, shape, -1)
    return np.ascontiguousarray(np.moveaxis(rounded.reshape(moved.shape), -1, axis))


def _better(blocks: Floats, element: MiniFloat) -> Floats:
    """Return finite blocks under the better of two shared exponents.

    Args:
        blocks: (..., block_size).
        element: floating element type.
    """
    plain = _exponent(blocks)
    power = _power(plain + 1)
    last = element.largest * _power(plain - element.emax)
    # Values beyond the last code must become values that either scale represents.
    size = np.abs(blocks)
    kept = np.where(size > (last + power) / 2, power, np.minimum(size, last))
    usual = _in_elements(blocks, plain - element.emax, element)
    raised = _in_elements(np.copysign(kept, blocks), plain - element.emax + 1, element)
    usual_error = np.square(usual - blocks).sum(axis=-1, keepdims=True)
    raised_error = np.square(raised - blocks).sum(axis=-1, keepdims=True)
    storable = power <= 2.0**E8M0
    better: Floats = np.where((raised_error < usual_error) & storable, raised, usual)
    return better


def threshold(rule: str, element: MiniFloat | None) -> tuple[float, bool]:
    """Return the share of 2^(E + 1) above which a block's greatest value raises the exponent E.

    "floor" never raises it (OCP MX Specification 1.0, section 6.3, and AMD's operator), "even" if
    the value would be rounded to the next power of two with the mantissa of the element type (AMD
    Quark, torchao), "ceil" above a power of two (both), and "rceil" if the value would be clipped
    (torchao).

    Args:
        rule: one of ``EXPONENTS``.
        element: element type, None for int8.

    Returns:
        The share, and whether the share itself raises the exponent.

    >>> threshold("rceil", E4M3), threshold("even", E4M3)
    ((0.875, False), (0.96875, True))
    """
    if rule == "even":
        mantissa_bits = FRACTION if element is None else element.mantissa_bits
        return 1 - 2.0 ** -(mantissa_bits + 2), True
    if rule == "rceil":
        if element is None:
            return 1 - 2.0 ** -(FRACTION + 1), False
        return element.largest * 2.0 ** -(element.emax + 1), False
    return {"floor": np.inf, "ceil": 0.5}[rule], False


def emax_of(element: MiniFloat | None) -> int:
    """Return the greatest exponent of the elements of a block; 0 for integers."""
    return 0 if element is None else element.emax


def _shared(blocks: Floats, element: MiniFloat | None, rule: str) -> NDArray[np.int64]:
    """Return the exponents of the scales of blocks, keeping the last axis with length 1."""
    exponent = _exponent(blocks)
    emax = emax_of(element)
    if rule == "floor":
        return exponent - emax
    share, inclusive = threshold(rule, element)
    bound = share * _power(exponent + 1)
    greatest = np.abs(blocks).max(axis=-1, keepdims=True, initial=0.0)
    raised = greatest >= bound if inclusive else greatest > bound
    raised &= greatest >= np.finfo(np.float32).tiny
    shared: NDArray[np.int64] = np.clip(exponent + raised - emax, -E8M0, E8M0)
    return shared


def _in_elements(
    blocks: Floats,
    exponent: NDArray[np.int64],
    element: MiniFloat | None,
    rounding: int = HALF_EVEN,
) -> Floats:
    """Quantize and dequantize finite blocks under scales of given exponents."""
    if element is None:
        return _in_steps(blocks, _power(exponent - FRACTION), -128, 127, rounding)
    scale = _power(exponent)
    # Values too small for float32 are too small for the format.
    with np.errstate(under="ignore"):
        return round_to(blocks / scale, element).astype(np.float64) * scale


def _in_steps(
    values: Floats, step: Floats, least: int, greatest: int, rounding: int
) -> Floats:
    """Round values to multiples of steps within bounds."""
    codes: Floats = np.clip(to_integer(values / step, rounding), least, greatest)
    return codes * step


def _mantissa_bits(bit_width: int) -> int:
    if bit_width not in BIT_WIDTHS:
        raise ConfigError(
            f"bit width {bit_width} is not from {BIT_WIDTHS[0]} to {BIT_WIDTHS[-1]}",
        )
    return bit_width - EXPONENT_AND_SIGN


def _blocks(x: ArrayLike, axis: int, block_size: int) -> tuple[Floats, tuple[int, ...]]:
    """Return the values as (..., blocks, block_size), and their shape with ``axis`` last.

    The last block is padded with zeros.
    """
    values = np.asarray(x, np.float32)
    if not -values.ndim <= axis < values.ndim:
        raise ConfigError(
            f"axis {axis} is not an axis of a tensor of rank {values.ndim}",
        )
    if block_size < 1:
        raise ConfigError(f"block size {block_size} is not positive")
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        moved = np.moveaxis(values, axis, -1).astype(np.float64)
    count = -(-moved.shape[-1] // block_size)
    padded = np.zeros((*moved.shape[:-1], count * block_size))
    padded[..., : moved.shape[-1]] = moved
    return padded.reshape(*moved.shape[:-1], count, block_size), moved.shape


def _restored(blocks: Floats, shape: tuple[int, ...], axis: int) -> NDArray[np.float32]:
    """Return blocks as float32 in the shape of the tensor, without the padding.

    Args:
        blocks: (..., blocks, block_size).
        shape: shape of the tensor, with the axis of the blocks last.
        axis: the axis of the blocks in the tensor.
    """
    *outer, count, block_size = blocks.shape
    flat = blocks.reshape(*outer, count * block_size)[..., : shape[-1]]
    # The element -128 of the greatest blocks is -2^128, beyond float32.
    with np.errstate(over="ignore"):
        # Adding 0 makes negative zeros positive.
        narrow = flat.astype(np.float32) + np.float32(0)
    return np.ascontiguousarray(np.moveaxis(narrow, -1, axis))


def _exponent(groups: Floats) -> NDArray[np.int64]:
    """Return floor(log2) of the greatest magnitude along the last axis, which is kept."""
    greatest = np.abs(groups).max(axis=-1, keepdims=True, initial=0.0)
    exponent = np.frexp(greatest)[1].astype(np.int64) - 1
    exponent = np.where(greatest > 0, exponent, LEAST_EXPONENT)
    return np.maximum(exponent, LEAST_EXPONENT)


def _power(exponent: NDArray[np.int64]) -> Floats:
    power: Floats = np.ldexp(1.0, exponent)
    return power
