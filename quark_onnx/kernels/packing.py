"""Pack integer codes of 2, 4 and 8 bits into bytes and back, low bits first.

The layout of ONNX's INT2, UINT2, INT4 and UINT4 tensors (flattened to one row) and of the inputs B
and zero_points of com.microsoft::MatMulNBits (packed along the last axis). Signed codes are two's
complement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.common.errors import ConfigError, PlanError

#: Supported widths, which divide a byte.
BITS = (2, 4, 8)

#: Bytes processed at a time: a few such buffers fit the nearest caches.
_CHUNK = 1 << 16

# The codes of a byte are adjacent in one word: shifting the word onto itself moves all of them.
_WORDS: dict[int, np.dtype[Any]] = {2: np.dtype("<u4"), 4: np.dtype("<u2")}
_MASKS = {2: 0x03030303, 4: 0x0F0F}


def packed_size(count: int, bits: int) -> int:
    """Return the bytes of ``count`` codes of ``bits`` bits.

    >>> packed_size(5, 4)
    3
    """
    _check(bits)
    # Rounded up: the last byte may hold fewer codes.
    return -(-count * bits // 8)


def pack(codes: NDArray[Any], bits: int, *, signed: bool = False) -> NDArray[np.uint8]:
    """Pack integer codes along the last axis into bytes, the first code in the lowest bits.

    Args:
        codes: integers of shape (..., count).
        bits: 2, 4 or 8.
        signed: codes are -2^(bits-1)..2^(bits-1)-1 in two's complement, otherwise 0..2^bits-1.

    Returns:
        uint8 of shape (..., ceil(count * bits / 8)); the unused high bits of the last byte are 0.

    Raises:
        ConfigError: the width is not 2, 4 or 8.
        PlanError: the codes are not integers, are a scalar, or one does not fit the width.

    >>> pack(np.array([1, 2, 3]), 4)
    array([33,  3], dtype=uint8)
    >>> pack(np.array([-1, 1, -2, 0]), 2, signed=True)
    array([39], dtype=uint8)
    """
    _check(bits)
    if codes.dtype.kind not in "iu" or codes.ndim == 0:
        raise PlanError(
            f"codes to pack are {codes.dtype} of shape {codes.shape}; they must be rows"
            " of integers",
        )
    if signed:
        least = -(1 << bits - 1)
        greatest = (1 << bits - 1) - 1
    else:
        least = 0
        greatest = (1 << bits) - 1
    # Python integers compare exactly, whatever the type of the codes.
    if codes.size and (int(codes.min()) < least or int(codes.max()) > greatest):
        raise PlanError(
            f"codes {codes.min()}..{codes.max()} do not fit {bits} bits:"
            f" {least}..{greatest}",
        )
    # A byte per code; in uint8, negative codes wrap around to their two's complement.
    plain = codes.astype(np.uint8)
    if bits == 8:
        return plain
    # Each row starts at a byte of its own.
    short = -codes.shape[-1] % (8 // bits)
    if short:
        plain = np.pad(plain, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    packed = np.empty((*plain.shape[:-1], plain.shape[-1] * bits // 8), np.uint8)
    words = np.ascontiguousarray(plain).reshape(-1).view(_WORDS[bits])
    flat = packed.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        part = words[start : start + _CHUNK] & _MASKS[bits]
        gap = 8 - bits
        # For 4 bits: 0x0b0a becomes 0x0bba, whose lowest byte holds a in the low bits and b above.
        part |= part >> gap
        if bits == 2:
            part |= part >> 2 * gap
        flat[start : start + _CHUNK] = part  # the lowest byte of each word
    return packed


def unpack(
    packed: NDArray[np.uint8], bits: int, count: int, *, signed: bool = False
) -> NDArray[Any]:
    """Unpack the codes of :func:`pack`.

    Args:
        packed: uint8 of shape (..., at least ceil(count * bits / 8)).
        bits: 2, 4 or 8.
        count: codes in each row.
        signed: the codes are two's complement.

    Returns:
        uint8, or int8 if signed, of shape (..., count).

    Raises:
        ConfigError: the width is not 2, 4 or 8.
        PlanError: the bytes are not uint8, or are fewer than the codes need.

    >>> unpack(np.array([33, 3], np.uint8), 4, 3)
    array([1, 2, 3], dtype=uint8)
    >>> unpack(np.array([39], np.uint8), 2, 4, signed=True)
    array([-1,  1, -2,  0], dtype=int8)
    """
    size = packed_size(count, bits)
    if packed.dtype != np.uint8 or packed.ndim == 0 or packed.shape[-1] < size:
        raise PlanError(
            f"packed codes are {packed.dtype} of shape {packed.shape}; {count} codes of"
            f" {bits} bits need {size} bytes",
        )
    packed = packed[..., :size]
    if bits == 8:
        return packed.astype(np.int8 if signed else np.uint8)
    codes: NDArray[Any] = np.empty((*packed.shape[:-1], size * (8 // bits)), np.uint8)
    flat = np.ascontiguousarray(packed).reshape(-1)
    words = codes.reshape(-1).view(_WORDS[bits])
    half = 1 << bits - 1
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK].astype(_WORDS[bits])
        gap = 8 - bits
        if bits == 2:
            part |= part << 2 * gap
        # The inverse: 0x00ba becomes 0x0bba, and the mask leaves 0x0b0a.
        part |= part << gap
        part &= _MASKS[bits]
        words[start : start + _CHUNK] = part
        # Flipping the sign bit and subtracting it extends it to the full byte.
        if signed:
            per_byte = 8 // bits
            chunk = codes.reshape(-1)[start * per_byte : (start + _CHUNK) * per_byte]
            chunk ^= half
            chunk -= half
    if signed:
        # The bytes are two's complement already.
        codes = codes.view(np.int8)
    return codes[..., :count]


def _check(bits: int) -> None:
    if bits not in BITS:
        raise ConfigError(
            f"codes of {bits!r} bits cannot be packed; the widths are 2, 4 and 8",
        )
