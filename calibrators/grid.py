"""The values that calibration speaks in: the codes of a format, a range of reals, a scale with its zero point."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: The smallest scale ever used: the least normal float32. Anything below is denormal and some kernels flush it to zero.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Grid:
    """The integer codes of a format and the rule that places zero among them.

    Attributes:
        qmin, qmax: the least and the greatest code that is used.
        symmetric: the zero point is fixed in the middle (0 for signed codes), otherwise it is free.
        pow2: the scale must be a power of two.
        smallest_scale: scales are never below this (the least normal number of the scale's type).

    >>> Grid(-128, 127).zero
    0
    >>> Grid(0, 255, symmetric=True).zero
    128
    """

    qmin: int
    qmax: int
    symmetric: bool = True
    pow2: bool = False
    smallest_scale: float = SMALLEST_SCALE

    @property
    def levels(self) -> int:
        """Number of steps between the least and the greatest code."""
        return self.qmax - self.qmin

    @property
    def zero(self) -> int:
        """The zero point of a symmetric grid."""
        return 0 if self.qmin < 0 else (self.qmin + self.qmax + 1) // 2


@dataclass(frozen=True)
class Range:
    """The interval of reals that a grid has to cover, one entry per row; it always contains zero.

    Attributes:
        lo, hi: float64 arrays of shape (rows,), ``lo <= 0 <= hi``.
    """

    lo: Floats
    hi: Floats

    def __post_init__(self) -> None:
        object.__setattr__(self, "lo", np.minimum(np.atleast_1d(np.asarray(self.lo, np.float64)), 0.0))
        object.__setattr__(self, "hi", np.maximum(np.atleast_1d(np.asarray(self.hi, np.float64)), 0.0))


@dataclass(frozen=True)
class QParams:
    """Scale and zero point of a tensor: ``real = (code - zero_point) * scale``.

    Attributes:
        scale: float32 array, shape () per tensor or (channels,) per channel.
        zero_point: int64 array of the same shape.
        axis: the channel axis, None per tensor.
    """

    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    axis: int | None = None

    def with_scale(self, scale: NDArray[np.float32]) -> QParams:
        """The same zero point and axis under another scale of the same shape."""
        return replace(self, scale=np.asarray(scale, np.float32))
