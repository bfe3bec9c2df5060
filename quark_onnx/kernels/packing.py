"""Pack unsigned codes of 2, 4 and 8 bits into bytes, low bits first.

The layout of ONNX's UINT2 and UINT4 tensors (flattened to one row) and of the inputs B and
zero_points of com.microsoft::MatMulNBits (packed along the last axis).
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


def pack(codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Pack unsigned codes along the last axis into bytes, the first code in the lowest bits.

    Args:
        codes: integers 0..2^bits-1 of shape (..., count).
        bits: 2, 4 or 8.

    Returns:
        uint8 of shape (..., ceil(count * bits / 8)); the unused high bits of the last byte are 0.

    Raises:
        ConfigError: the width is not 2, 4 or 8.
        PlanError: the codes are not integers, are a scalar, or one does not fit the width.

    >>> pack(np.array([1, 2, 3]), 4)
    array([33,  3], dtype=uint8)
    """
    if bits not in BITS:
        raise ConfigError(
            f"codes of {bits!r} bits cannot be packed; the widths are 2, 4 and 8",
        )
    if codes.dtype.kind not in "iu" or codes.ndim == 0:
        raise PlanError(
            f"codes to pack are {codes.dtype} of shape {codes.shape}; they must be rows"
            " of integers",
        )
    greatest = (1 << bits) - 1
    # Python integers compare exactly, whatever the type of the codes.
    if codes.size and (int(codes.min()) < 0 or int(codes.max()) > greatest):
        raise PlanError(
            f"codes {codes.min()}..{codes.max()} do not fit {bits} bits: 0..{greatest}",
        )
    # A byte per code.
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
