"""PNG files of small images, by the standard library (PNG specification, W3C 2003)."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: Bits of a value, color type RGB, and the only methods of compression, filters and order.
_HEADER = (8, 2, 0, 0, 0)


def png(pixels: NDArray[Any]) -> bytes:
    """Return an image as a PNG file.

    Args:
        pixels: values 0 to 255 of the type uint8, (height, width, 3).

    >>> png(np.zeros((1, 2, 3), np.uint8))[:8] == _SIGNATURE
    True
    """
    height, width, _ = pixels.shape
    rows = np.ascontiguousarray(pixels, np.uint8).reshape(height, -1)
    # Each row begins with the number of its filter: 0 for none.
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, *_HEADER)),
        (b"IDAT", zlib.compress(filtered.tobytes(), 9)),
        (b"IEND", b""),
    )
    chunks = [
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    ]
    return _SIGNATURE + b"".join(chunks)
