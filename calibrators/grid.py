"""The values that calibration speaks in: the codes of a format, a range of reals, a scale with its
zero point.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: The smallest scale ever used: the least normal float32. Anything below is denormal and some
#: kernels flush it to zero.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Grid:
    """The integer codes of a format and the rule that places zero among them.

    Attributes:
        qmin, qmax: the least and the greatest code that is used.
        symmetric: the zero point is fixed in the middle (0 for signed codes), otherwise it is free.
        pow2: the scale must be a power of two.
        half: scales are float16 numbers.
        even: on a symmetric grid all codes share the range evenly, so that the greatest magnitude
        lies half a step
            beyond the greatest code, instead of on it.

    >>> Grid(-128, 127).zero
    0
    >>> Grid(0, 255, symmetric=True).zero
    128
    """

    qmin: int
    qmax: int
    symmetric: bool = True
    pow2: bool = False
    half: bool = False
    even: bool = False

    @property
    def levels(self) -> int:
        """Number of steps between the least and the greatest code."""
        return self.qmax - self.qmin

    @property
    def scales(self) -> tuple[float, float]:
        """The least and the greatest scale, both powers of two: normal numbers of float32, or any
        of float16.
        """
        return (2.0**-24, 2.0**15) if self.half else (SMALLEST_SCALE, 2.0**127)

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
        object.__setattr__(
            self,
            "lo",
            np.minimum(np.atleast_1d(np.asarray(self.lo, np.float64)), 0.0),
        )
        object.__setattr__(
            self,
            "hi",
            np.maximum(np.atleast_1d(np.asarray(self.hi, np.float64)), 0.0),
        )


@dataclass(frozen=True)
class QParams:
    """Scale and zero point of a tensor: ``real = (code - zero_point) * scale``.

    Attributes:
        scale: float32 array, shape () per tensor, (channels,) per channel, or the tensor's own
            shape with as many blocks along the axis as it takes to hold the values. Of fewer axes
            than the tensor has where blocks run over all axes from ``axis`` on, as if these were
            one.
        zero_point: int64 array of the same shape.
        axis: the axis of the channels or the blocks, None per tensor.
        block_size: values to a block, 0 for no blocks.
    """

    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    axis: int | None = None
    block_size: int = 0

    def in_blocks(self, shape: tuple[int, ...], axis: int, block_size: int) -> QParams:
        """The parameters of a tensor of this shape, from one value per row of
        ``calibrators.layout.rows``.

        >>> flat = QParams(np.arange(9, dtype=np.float32), np.zeros(9, np.int64), 0)
        >>> flat.in_blocks((40, 3), axis=0, block_size=16).scale
        array([[0., 3., 6.],
               [1., 4., 7.],
               [2., 5., 8.]], dtype=float32)
        """
        axis %= len(shape)
        lines = (*shape[:axis], *shape[axis + 1 :], -(-shape[axis] // block_size))
        scale, zero = (
            np.moveaxis(v.reshape(lines), -1, axis)
            for v in (self.scale, self.zero_point)
        )
        return QParams(
            np.ascontiguousarray(scale),
            np.ascontiguousarray(zero),
            axis,
            block_size,
        )

    def spread(
        self,
        shape: tuple[int, ...],
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scale and zero point shaped to broadcast against a tensor of this shape.

        >>> QParams(np.float32([[1, 2, 3]]), np.int64([[0, 0, 0]]), 1, block_size=2).spread((1, 2, 3))[0]
        array([[[1., 1., 2.],
                [2., 3., 3.]]], dtype=float32)
        """  # noqa: E501
        if self.axis is None:
            return self.scale, self.zero_point
        if self.block_size and self.scale.ndim < len(shape):
            flat = self.spread((*shape[: self.axis], prod(shape[self.axis :])))
            return flat[0].reshape(shape), flat[1].reshape(shape)
        if self.block_size:
            length = shape[self.axis]
            parts = [
                np.repeat(v, self.block_size, self.axis)
                for v in (self.scale, self.zero_point)
            ]
            scale, zero = (np.take(part, range(length), self.axis) for part in parts)
            return scale, zero
        ones = [1] * len(shape)
        ones[self.axis] = -1
        return self.scale.reshape(ones), self.zero_point.reshape(ones)

    def part(self, rows: slice) -> QParams:
        """The parameters of some rows (indices of the first axis) of the tensor.

        They start and end with a block.
        """
        if self.axis is None or (self.axis != 0 and not self.block_size):
            return self
        if self.axis == 0 and self.block_size:
            rows = slice(
                rows.start // self.block_size,
                -(-rows.stop // self.block_size),
            )
        return replace(self, scale=self.scale[rows], zero_point=self.zero_point[rows])

    def with_scale(self, scale: NDArray[np.float32]) -> QParams:
        """The same zero point and axis under another scale of the same shape."""
        return replace(self, scale=np.asarray(scale, np.float32))
