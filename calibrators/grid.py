"""Define the values of calibration: integer grids, float ranges, scales with zero points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: The smallest scale: the least normal float32. Some kernels flush smaller, denormal numbers to 0.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Grid:
    """The integer codes of a format and the rule for the zero point.

    Attributes:
        qmin: least code that is used.
        qmax: greatest code that is used.
        symmetric: the zero point is fixed at the middle (0 for signed codes), otherwise free.
        pow2: the scale must be a power of two.
        half: scales are float16 numbers.
        even: on a symmetric grid all codes share the range evenly, so that the greatest magnitude
            lies half a step beyond the greatest code instead of on it.

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
        """Least and greatest scale, powers of two.

        Normal numbers of float32, or any of float16.
        """
        if self.half:
            # The least denormal float16, and the greatest power of two.
            return (2.0**-24, 2.0**15)
        return (SMALLEST_SCALE, 2.0**127)

    @property
    def zero(self) -> int:
        """The zero point of a symmetric grid."""
        if self.qmin < 0:
            return 0
        # 128 for uint8, to which onnxruntime.quantization rounds 127.5.
        return (self.qmin + self.qmax + 1) // 2


@dataclass(frozen=True)
class Range:
    """The interval of real values for a grid to cover, per row, including zero.

    Attributes:
        lo: float64 array of shape (rows,), ``lo <= 0``.
        hi: float64 array of shape (rows,), ``hi >= 0``.
    """

    lo: Floats
    hi: Floats

    def __post_init__(self) -> None:
        # Zero must be a code: padding, Relu and sparse activations produce exact zeros.
        object.__setattr__(
            self, "lo", np.minimum(np.atleast_1d(np.asarray(self.lo, np.float64)), 0.0)
        )
        object.__setattr__(
            self, "hi", np.maximum(np.atleast_1d(np.asarray(self.hi, np.float64)), 0.0)
        )


def chosen(
    full: Range, candidates: Sequence[Range], best: Callable[[int, Range], int]
) -> Range:
    """Return the best of several ranges, for each row.

    Args:
        full: the full range, which stands in for one that a percentile left nothing but zero.
        candidates: ranges of the same rows.
        best: returns the index of the best one for a row, of the candidates of the row.
    """
    lo = np.stack([candidate.lo for candidate in candidates], axis=1)
    hi = np.stack([candidate.hi for candidate in candidates], axis=1)
    empty = lo == hi
    lo = np.where(empty, full.lo[:, None], lo)
    hi = np.where(empty, full.hi[:, None], hi)
    rows = range(len(lo))
    indices = [best(row, Range(lo[row], hi[row])) for row in rows]
    picked = np.array(indices, np.int64)
    return Range(lo[rows, picked], hi[rows, picked])


@dataclass(frozen=True)
class QParams:
    """Scale and zero point of a tensor: ``real = (code - zero_point) * scale``.

    Attributes:
        scale: float32 array of shape () per tensor, (channels,) per channel, or per block the
            tensor shape with the count of blocks along ``axis``. Fewer axes than the tensor's mean
            that blocks run over all axes from ``axis`` on, flattened into one.
        zero_point: int64 array of the same shape.
        axis: axis of the channels or of the blocks, None per tensor.
        block_size: values in a block, 0 for no blocks.
    """

    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    axis: int | None = None
    block_size: int = 0

    def in_blocks(self, shape: tuple[int, ...], axis: int, block_size: int) -> QParams:
        """Return the parameters of a tensor in blocks, from one value per row of ``layout.rows``.

        >>> flat = QParams(np.arange(9, dtype=np.float32), np.zeros(9, np.int64), 0)
        >>> flat.in_blocks((40, 3), axis=0, block_size=16).scale
        array([[0., 3., 6.],
               [1., 4., 7.],
               [2., 5., 8.]], dtype=float32)
        """
        axis %= len(shape)
        # ``layout.rows`` moves the axis of the blocks to the end; -(-a // b) rounds up.
        lines = (*shape[:axis], *shape[axis + 1 :], -(-shape[axis] // block_size))
        scale = np.moveaxis(self.scale.reshape(lines), -1, axis)
        zero = np.moveaxis(self.zero_point.reshape(lines), -1, axis)
        return QParams(
            np.ascontiguousarray(scale), np.ascontiguousarray(zero), axis, block_size
        )

    def spread(
        self, shape: tuple[int, ...]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scale and zero point shaped to broadcast against a tensor of this shape.

        >>> QParams(np.float32([[1, 2, 3]]), np.int64([[0, 0, 0]]), 1, block_size=2).spread((1, 2, 3))[0]
        array([[[1., 1., 2.],
                [2., 3., 3.]]], dtype=float32)
        """  # noqa: E501
        if self.axis is None:
            return self.scale, self.zero_point
        if self.block_size and self.scale.ndim < len(shape):
            # Blocks over several axes in one, such as inputs and kernel of a convolution.
            flat = self.spread((*shape[: self.axis], prod(shape[self.axis :])))
            return flat[0].reshape(shape), flat[1].reshape(shape)
        if self.block_size:
            # The last block of a line may be cut short by the end of the tensor.
            positions = range(shape[self.axis])
            scale = np.repeat(self.scale, self.block_size, self.axis)
            zero = np.repeat(self.zero_point, self.block_size, self.axis)
            return (
                np.take(scale, positions, self.axis),
                np.take(zero, positions, self.axis),
            )
        # Per channel: (1, channels, 1, 1) for axis 1 of four.
        ones = [1] * len(shape)
        ones[self.axis] = -1
        return self.scale.reshape(ones), self.zero_point.reshape(ones)

    def part(self, rows: slice) -> QParams:
        """Return the parameters of some rows (indices of the first axis) of the tensor.

        Rows start and end with a block.
        """
        # Channels of another axis than the first belong to every part.
        if self.axis is None or (self.axis != 0 and not self.block_size):
            return self
        if self.axis == 0 and self.block_size:
            rows = slice(
                rows.start // self.block_size, -(-rows.stop // self.block_size)
            )
        return replace(self, scale=self.scale[rows], zero_point=self.zero_point[rows])

    def with_scale(self, scale: NDArray[np.float32]) -> QParams:
        """Return a copy with another scale of the same shape."""
        return replace(self, scale=np.asarray(scale, np.float32))
