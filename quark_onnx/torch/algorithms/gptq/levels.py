"""TensorLevels: the representable values of each element of a weight for given scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from quark_onnx.dtypes import Integer, Scaled
from quark_onnx.kernels.minifloat import E2M1, E4M3, E5M2, MiniFloat
from quark_onnx.torch.config.number_formats import FloatScaled, TwoLevel, element_of
from quark_onnx.torch.formats import block_formats
from quark_onnx.torch.formats.affine import code_type
from quark_onnx.torch.formats.quantized_tensor import Quantized, joined

#: Of integers whose levels are whole numbers in float32, sums with a zero point included.
_MOST_BITS = 16
#: What is added to a number has whole numbers for neighbours. Rounding by a sum is done in one
#: thread where numbers are few, which is faster, and much so beside other work.
_WHOLE = 1.5 * 2**23
#: Values that are rounded at once.
_AT_ONCE = 1 << 18
_FLOAT8 = {"fp8e4m3": E4M3, "fp8e5m2": E5M2}


@dataclass(frozen=True)
class TensorLevels:
    """A value is ``(level - zero) * scale``.

    Levels are whole numbers between two ends, or the values of a small float.

    Attributes:
        scale, zero: float32, (rows, blocks) of a weight's matrix, or (rows,) of a column; without
            zero points None. Zero points are whole numbers of at most 16 bits.
        least, greatest: the ends of the levels.
        element: the small float; None for whole numbers.
        size: columns of a block.
    """

    scale: Any
    zero: Any
    least: float
    greatest: float
    element: MiniFloat | None = None
    size: int = 1

    @classmethod
    def of(cls, quantized: Quantized) -> TensorLevels | None:
        """Those of a weight with its scales as they are; None for formats whose scales are part of
        the codes, for more levels than float32 can tell apart, and for floats of 4 bits with one
        scale.
        """
        spec, rows = quantized.spec, quantized.shape[0]
        columns = prod(quantized.shape[1:])
        if quantized.scale is None or (
            isinstance(spec.dtype, Integer) and spec.dtype.bits > _MOST_BITS
        ):
            return None
        size = columns if quantized.scale.ndim < 2 else spec.group

        def spread(part: Any) -> Any:
            part = part.float()
            return part if part.ndim == 2 else part.reshape(-1, 1).expand(rows, 1)

        if isinstance(spec.dtype, Integer):
            zero = None if quantized.zero is None else spread(quantized.zero)
            return cls(
                spread(quantized.scale),
                zero,
                spec.grid.qmin,
                spec.grid.qmax,
                size=size,
            )
        if isinstance(spec.dtype, Scaled):
            small = _FLOAT8.get(spec.dtype.name)
            return (
                None
                if small is None
                else cls._of_floats(spread(quantized.scale), small, size)
            )
        if isinstance(spec.dtype, TwoLevel):
            return cls._of_floats(
                spread(quantized.scale.float() * quantized.whole.float()),
                E2M1,
                size,
            )
        powers = spread(block_formats.scale_values(quantized.scale, spec.dtype))
        if isinstance(spec.dtype, FloatScaled):
            return cls._of_floats(powers, E2M1, size)
        element = element_of(spec.dtype)
        return (
            cls(powers / 64, None, -128, 127, size=size)
            if element is None
            else cls._of_floats(powers, element, size)
        )

    @classmethod
    def _of_floats(cls, scale: Any, element: MiniFloat, size: int) -> TensorLevels:
        return cls(scale, None, -element.largest, element.largest, element, size)

    @classmethod
    def stacked(cls, parts: Sequence[TensorLevels]) -> TensorLevels:
        """Those of several weights with as many columns and the same levels, one below the other."""  # noqa: E501
        return replace(
            parts[0],
            scale=joined([each.scale for each in parts]),
            zero=joined([each.zero for each in parts]),
        )

    @property
    def levels_of(self) -> tuple[float, float, MiniFloat | None, bool]:
        """What makes levels the same: their ends, what lies between, and whether there are zero
        points.
        """
        return self.least, self.greatest, self.element, self.zero is not None

    def part(self, rows: Any) -> TensorLevels:
        """That of some rows, of all columns."""
        return replace(
            self,
            scale=self.scale[rows],
            zero=None if self.zero is None else self.zero[rows],
        )

    def merged(self, other: TensorLevels, wins: Any) -> TensorLevels:
        """This one, with the rows of another of the same levels where a mask, (rows,), says so."""
        zero = (
            None
            if self.zero is None
            else torch.where(wins[:, None], other.zero, self.zero)
        )
        return replace(
            self,
            scale=torch.where(wins[:, None], other.scale, self.scale),
            zero=zero,
        )

    def columns(self) -> list[TensorLevels]:
        """Those of one column for each block."""
        scales = self.scale.t().contiguous()
        zeros = (
            [None] * len(scales) if self.zero is None else self.zero.t().contiguous()
        )
        return [
            replace(self, scale=scale, zero=zero, size=1)
            for scale, zero in zip(scales, zeros, strict=True)
        ]

    def levels(self, values: Any) -> Any:
        """The levels nearest to values."""
        units = values / self._wide(self.scale, values)
        return self.rounded(
            units if self.zero is None else units + self._wide(self.zero, values),
        )

    def rounded(self, units: Any) -> Any:
        """The level nearest to each number of steps, which is changed."""
        return self.nearest(units if self.element is not None else units.add_(_WHOLE))

    def base(self, zero: Any) -> Any:
        """A zero point as numbers of steps are added to it, for `nearest`."""
        return zero if self.element is not None else zero + _WHOLE

    def nearest(self, units: Any) -> Any:
        """The level nearest to each number of steps that was added to a base; it is changed."""
        if self.element is not None:
            return block_formats.round_to(units, self.element)
        return units.clamp_(self.least + _WHOLE, self.greatest + _WHOLE).sub_(_WHOLE)

    def values(self, levels: Any) -> Any:
        """What levels stand for."""
        units = levels if self.zero is None else levels - self._wide(self.zero, levels)
        return units * self._wide(self.scale, levels)

    def _wide(self, part: Any, values: Any) -> Any:
        """One number for each column."""
        if self.size == 1 or part.shape[1] == 1:
            return part
        return part.repeat_interleave(self.size, 1)[:, : values.shape[1]]

    def put(self, quantized: Quantized, values: Any) -> Quantized:
        """A weight with the levels nearest to values, (rows, columns), in place of its own."""
        rows = max(1, _AT_ONCE // max(1, values.shape[1]))
        whole = quantized.codes.clone().reshape(quantized.shape[0], -1)
        for start in range(0, len(values), rows):
            codes = self._codes(quantized, values[start : start + rows], start)
            whole[start : start + rows, : values.shape[1]] = codes
        return replace(quantized, codes=whole.reshape(quantized.codes.shape))

    def _codes(self, quantized: Quantized, values: Any, start: int) -> Any:
        levels = self.part(slice(start, start + len(values))).levels(values)
        if self.element is None:
            return levels.to(
                torch.int8
                if self.zero is None and self.least == -128
                else code_type(quantized.spec),
            )
        if isinstance(quantized.spec.dtype, Scaled):
            return levels.to(code_type(quantized.spec))
        return block_formats.code_of(levels, self.element)
