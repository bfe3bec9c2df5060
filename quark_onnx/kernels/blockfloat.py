"""Formats whose values share an exponent, block by block: block floating point (BFP) and microscaling (MX).

Follows the OCP Microscaling Formats (MX) Specification 1.0, section 6.3, and the operators BFPQuantizeDequantize and
MXQuantizeDequantize of the domain ``com.amd.quark``: their results, bit for bit, but that a zero here is always +0.

Everything is computed in float64, where scaling float32 values by powers of two and rounding them is exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quark_onnx.errors import ConfigError
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

#: The element types of MX that are floats, as the vendor's attribute ``element_dtype`` calls them.
ELEMENTS: dict[str, MiniFloat] = {
    "fp8_e5m2": E5M2,
    "fp8_e4m3": E4M3,
    "fp6_e3m2": E3M2,
    "fp6_e2m3": E2M3,
    "fp4_e2m1": E2M1,
}
#: The exponent of subnormal float32 as the operators read it: that of a stored exponent of zero.
LEAST_EXPONENT = -127
#: Bits of a block floating-point format that are no mantissa: the shared exponent and the sign.
EXPONENT_AND_SIGN = 9
#: A mantissa has at most as many bits as that of a float32 and its hidden one, less one for the sign.
BIT_WIDTHS = range(EXPONENT_AND_SIGN + 1, EXPONENT_AND_SIGN + 24)


def bfp(
    x: ArrayLike, axis: int, *, bit_width: int = 16, block_size: int = 8, rounding_mode: int = HALF_EVEN
) -> NDArray[np.float32]:
    """What is left of ``x`` in block floating point: one exponent for each ``block_size`` values along ``axis``.

    A block's step is 2^(E - m + 1), with E the exponent of its greatest finite value and m = bit_width - 9; values are
    rounded to whole steps and clipped to ±(2^m - 1) of them. NaN and infinities are passed on and not looked at.

    Args:
        x: float32 of any shape, rank 1 at least; the last block along the axis may be incomplete.
        axis: where the blocks lie; negative counts from the end.
        bit_width: 8 for the exponent, 1 for the sign, and those of the mantissa.
        block_size: how many values share an exponent.
        rounding_mode: where a tie goes: 0 away from zero, 1 up, 2 to the even integer.

    Returns:
        float32, of x's shape.

    Raises:
        ConfigError: the axis, the sizes or the rounding mode make no sense.

    >>> bfp(np.float32([64.5, 1.5, -2.5, 0.25]), 0)
    array([64.,  2., -2.,  0.], dtype=float32)
    """
    bits = _mantissa_bits(bit_width)
    blocks, shape = _blocks(x, axis, block_size)
    finite = np.isfinite(blocks)
    clean = np.where(finite, blocks, 0.0)
    step = _power(_exponent(clean) - bits + 1)
    codes = np.clip(to_integer(clean / step, rounding_mode), 1 - 2**bits, 2**bits - 1)
    return _restored(np.where(finite, codes * step, blocks), shape, axis)


def bfp_prime(
    x: ArrayLike,
    axis: int,
    *,
    bit_width: int,
    block_size: int = 16,
    sub_block_size: int = 2,
    sub_block_shift_bits: int = 1,
    rounding_mode: int = HALF_EVEN,
) -> NDArray[np.float32]:
    """What is left of ``x`` in block floating point with finer steps for small sub-blocks: MX4, MX6 and MX9.

    A sub-block's step is that of its block (see ``bfp``), halved as often as its own greatest exponent is smaller, but
    at most 2^sub_block_shift_bits - 1 times. Subnormal values become zero; a block with a NaN or an infinity is NaN.

    Args:
        x: float32 of any shape, rank 1 at least; the last block along the axis may be incomplete.
        axis: where the blocks lie; negative counts from the end.
        bit_width: 11 for MX4, 13 for MX6, 16 for MX9.
        block_size: how many values share an exponent.
        sub_block_size: how many values share a shift; a divisor of the block size.
        sub_block_shift_bits: the width of a shift.
        rounding_mode: where a tie goes: 0 away from zero, 1 up, 2 to the even integer.

    Returns:
        float32, of x's shape.

    Raises:
        ConfigError: the axis, the sizes or the rounding mode make no sense.

    >>> bfp_prime(np.float32([1.9, 1.2, 0.9, 0.3]), 0, bit_width=11)
    array([1.5 , 1.  , 0.75, 0.25], dtype=float32)
    """
    bits = _mantissa_bits(bit_width)
    if sub_block_size < 1 or block_size % sub_block_size:
        raise ConfigError(f"sub-blocks of {sub_block_size} do not divide blocks of {block_size}")
    blocks, shape = _blocks(x, axis, block_size)
    broken = ~np.isfinite(blocks).all(axis=-1, keepdims=True)
    clean = np.where(broken | (np.abs(blocks) < np.finfo(np.float32).smallest_normal), 0.0, blocks)
    parts = clean.reshape(*clean.shape[:-1], block_size // sub_block_size, sub_block_size)
    block = _exponent(clean)[..., None]
    shift = np.minimum(block - _exponent(parts), 2**sub_block_shift_bits - 1)
    step = _power(block - shift - bits + 1)
    codes = np.clip(to_integer(parts / step, rounding_mode), 1 - 2**bits, 2**bits - 1)
    return _restored(np.where(broken, np.nan, (codes * step).reshape(clean.shape)), shape, axis)


def mx(
    x: ArrayLike,
    axis: int,
    element: str,
    block_size: int = 32,
    rounding_mode: int = HALF_EVEN,
    exponent: str = "floor",
) -> NDArray[np.float32]:
    """What is left of ``x`` in a microscaling format: one power-of-two scale for each ``block_size`` values.

    The scale is 2^(E - emax), with E the exponent of the block's greatest finite value, as the specification has it;
    the elements are rounded half to even and saturate. NaN and infinities are passed on and not looked at.

    Args:
        x: float32 of any shape, rank 1 at least; the last block along the axis may be incomplete.
        axis: where the blocks lie; negative counts from the end.
        element: fp8_e5m2, fp8_e4m3, fp6_e3m2, fp6_e2m3, fp4_e2m1 or int8 (64ths, from -128 to 127 of them).
        block_size: how many values share a scale.
        rounding_mode: for int8 only, where a tie goes: 0 away from zero, 1 up, 2 to the even integer.
        exponent: "floor"; "even", one more where the greatest value would be rounded beyond the format's greatest; or
            "ceil", where no element is.

    Returns:
        float32, of x's shape.

    Raises:
        ConfigError: the element, a rule or the rounding mode is unknown, or the axis or the block size makes no sense.

    >>> mx(np.float32([5.0, 2.5, -0.7, 0.1]), 0, "fp4_e2m1")
    array([ 4. ,  2. , -0.5,  0. ], dtype=float32)
    """
    if element != "int8" and element not in ELEMENTS:
        raise ConfigError(f"MX element type {element!r} is unknown; use one of {', '.join([*ELEMENTS, 'int8'])}")
    blocks, shape = _blocks(x, axis, block_size)
    finite = np.isfinite(blocks)
    clean = np.where(finite, blocks, 0.0)
    if element == "int8":
        scale = _power(_exponent(clean, exponent, 6) - 6)
        elements = np.clip(to_integer(clean / scale, rounding_mode), -128, 127)
    else:
        format = ELEMENTS[element]
        scale = _power(_exponent(clean, exponent, format.mantissa_bits) - format.emax)
        with np.errstate(under="ignore"):  # what is too small for a float32 is too small for the format
            elements = round_to(clean / scale, format).astype(np.float64)
    return _restored(np.where(finite, elements * scale, blocks), shape, axis)


def _mantissa_bits(bit_width: int) -> int:
    if bit_width not in BIT_WIDTHS:
        raise ConfigError(f"bit width {bit_width} is not from {BIT_WIDTHS[0]} to {BIT_WIDTHS[-1]}")
    return bit_width - EXPONENT_AND_SIGN


def _blocks(x: ArrayLike, axis: int, block_size: int) -> tuple[Floats, tuple[int, ...]]:
    """The values as (..., blocks, block_size), ``axis`` last and filled with zeros; and their shape without blocks."""
    values = np.asarray(x, np.float32)
    if not -values.ndim <= axis < values.ndim:
        raise ConfigError(f"axis {axis} is not an axis of a tensor of rank {values.ndim}")
    if block_size < 1:
        raise ConfigError(f"block size {block_size} is not positive")
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        moved = np.moveaxis(values, axis, -1).astype(np.float64)
    count = -(-moved.shape[-1] // block_size)
    padded = np.zeros((*moved.shape[:-1], count * block_size))
    padded[..., : moved.shape[-1]] = moved
    return padded.reshape(*moved.shape[:-1], count, block_size), moved.shape


def _restored(blocks: Floats, shape: tuple[int, ...], axis: int) -> NDArray[np.float32]:
    flat = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])[..., : shape[-1]]
    with np.errstate(over="ignore"):  # of the element -128 in the greatest blocks: -2^128 is beyond float32
        narrow = flat.astype(np.float32) + np.float32(0)  # a negative zero becomes a positive one
    return np.ascontiguousarray(np.moveaxis(narrow, -1, axis))


def _exponent(groups: Floats, rule: str = "floor", mantissa_bits: int = 0) -> NDArray[np.int64]:
    """floor(log2) of the greatest magnitude along the last axis, which is kept with length 1; or as the rule has it."""
    greatest = np.abs(groups).max(axis=-1, keepdims=True, initial=0.0)
    if rule == "even":  # half a step of the mantissa more
        greatest = greatest + np.ldexp(0.5, np.frexp(greatest)[1] - 1 - mantissa_bits)
    elif rule == "ceil":
        greatest = np.ldexp(1.0, np.ceil(np.log2(np.maximum(greatest, 1e-45))).astype(np.int64))
    elif rule != "floor":
        raise ConfigError(f"exponent rule {rule!r} is unknown; use floor, even or ceil")
    exponent = np.where(greatest > 0, np.frexp(greatest)[1].astype(np.int64) - 1, LEAST_EXPONENT)
    return np.maximum(exponent, LEAST_EXPONENT)


def _power(exponent: NDArray[np.int64]) -> Floats:
    power: Floats = np.ldexp(1.0, exponent)
    return power
