"""TensorLevels: the representable values of each element of a weight for given scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from quark_onnx.dtypes import Integer, Scaled
from quark_onnx.kernels.minifloat import E2M1, E4M3, E5M2, MiniFloat
from quark_onnx.torch.config.number_formats import FloatScaled, TwoLevel, element_of
from quark_onnx.torch.formats import block_formats
from quark_onnx.torch.formats.affine import code_type
from quark_onnx.torch.formats.quantized_tensor import Quantized, joined

#: Integers of more bits are not exact in float32 once a zero point is added and ``_WHOLE`` used.
_MOST_BITS = 16
#: The spacing of float32 is 1 from 2^23 to 2^24: adding this number rounds to whole numbers, ties
#: to even. torch.round distributes short tensors over threads, which costs more than the sum.
_WHOLE = 1.5 * 2**23
#: Elements that are rounded at once.
_AT_ONCE = 1 << 18
_FLOAT8 = {"fp8e4m3": E4M3, "fp8e5m2": E5M2}


@dataclass(frozen=True)
class TensorLevels:
    """The levels of a weight; a value is ``(level - zero) * scale``.

    Levels are the whole numbers of a range, or the values of a small float.

    Attributes:
        scale: float32, (rows, groups) for a weight, or (rows,) for a column.
        zero: as ``scale``, whole numbers of at most 16 bits; None without zero points.
        least: the least level.
        greatest: the greatest level.
        element: the small float; None for whole numbers.
        size: columns of a group.
    """

    scale: torch.Tensor
    zero: torch.Tensor | None
    least: float
    greatest: float
    element: MiniFloat | None = None
    size: int = 1

    @classmethod
    def of(cls, quantized: Quantized) -> TensorLevels | None:
        """Return the levels of a weight with its present scales.

        Args:
            quantized: the weight.

        Returns:
            None for formats whose scales are part of the codes, for integers of more than 16 bits,
            and for floats of 4 bits with a single scale.
        """
        dtype = quantized.spec.dtype
        too_wide = isinstance(dtype, Integer) and dtype.bits > _MOST_BITS
        if quantized.scale is None or too_wide:
            return None
        size = quantized.spec.group
        # Per-tensor and per-channel scales: one group of all columns.
        if quantized.scale.ndim < 2:
            size = prod(quantized.shape[1:])
        if isinstance(dtype, Integer):
            return cls._of_integers(quantized, size)
        return cls._of_small_floats(quantized, size)

    @classmethod
    def _of_integers(cls, quantized: Quantized, size: int) -> TensorLevels:
        grid = quantized.spec.grid
        rows = quantized.shape[0]
        zero = None
        if quantized.zero is not None:
            zero = _per_row(quantized.zero, rows)
        scale = _per_row(quantized.scale, rows)
        return cls(scale, zero, grid.qmin, grid.qmax, size=size)

    @classmethod
    def _of_small_floats(cls, quantized: Quantized, size: int) -> TensorLevels | None:
        dtype = quantized.spec.dtype
        rows = quantized.shape[0]
        if isinstance(dtype, Scaled):
            element = _FLOAT8.get(dtype.name)
            scale = quantized.scale
        elif isinstance(dtype, TwoLevel):
            element = E2M1
            # Block scale times global scale, as the dequantized value has it.
            scale = quantized.scale.float() * quantized.whole.float()
        else:
            element = element_of(dtype)
            scale = block_formats.scale_values(quantized.scale, dtype)
            if isinstance(dtype, FloatScaled):
                element = E2M1
            elif element is None:
                # MXINT8: 8-bit integers with 6 fraction bits
                return cls(_per_row(scale, rows) / 64, None, -128, 127, size=size)
        if element is None:
            return None
        scale = _per_row(scale, rows)
        return cls(scale, None, -element.largest, element.largest, element, size)

    @classmethod
    def stacked(cls, parts: Sequence[TensorLevels]) -> TensorLevels:
        """Concatenate the rows of weights with equal columns and levels."""
        scale = joined([part.scale for part in parts])
        zero = joined([part.zero for part in parts])
        return replace(parts[0], scale=scale, zero=zero)

    @property
    def levels_of(self) -> tuple[float, float, MiniFloat | None, bool]:
        """A key of the levels: equal keys mean equal levels, whatever the scales."""
        return self.least, self.greatest, self.element, self.zero is not None

    def part(self, rows: slice | torch.Tensor) -> TensorLevels:
        """Return the levels of some rows, a slice or an index tensor."""
        zero = None if self.zero is None else self.zero[rows]
        return replace(self, scale=self.scale[rows], zero=zero)

    def merged(self, other: TensorLevels, wins: torch.Tensor) -> TensorLevels:
        """Replace rows.

        Args:
            other: levels with the same key.
            wins: (rows,) bool, the rows to take from ``other``.
        """
        # (rows, 1) against (rows, groups).
        mask = wins[:, None]
        zero = None
        if self.zero is not None:
            assert other.zero is not None  # an equal key
            zero = torch.where(mask, other.zero, self.zero)
        scale = torch.where(mask, other.scale, self.scale)
        return replace(self, scale=scale, zero=zero)

    def columns(self) -> list[TensorLevels]:
        """Return the levels of a column of each group."""
        scales = self.scale.t().contiguous()
        zeros: list[torch.Tensor | None] = [None] * len(scales)
        if self.zero is not None:
            zeros = [*self.zero.t().contiguous()]
        return [
            replace(self, scale=scale, zero=zero, size=1)
            for scale, zero in zip(scales, zeros, strict=True)
        ]

    def levels(self, values: torch.Tensor) -> torch.Tensor:
        """Return the levels nearest to values, (rows, columns)."""
        units = values / self._per_column(self.scale, values)
        if self.zero is not None:
            units = units + self._per_column(self.zero, values)
        return self.rounded(units)

    def rounded(self, units: torch.Tensor) -> torch.Tensor:
        """Round values in units of the scale to levels, in place."""
        return self.nearest(units if self.element is not None else units.add_(_WHOLE))

    def base(self, zero: torch.Tensor) -> torch.Tensor:
        """Return the summand for ``nearest``: the zero point, and ``_WHOLE`` for integers."""
        if self.element is not None:
            return zero
        return zero + _WHOLE

    def nearest(self, units: torch.Tensor) -> torch.Tensor:
        """Round to levels, in place.

        Args:
            units: values in units of the scale, with ``base`` added.
        """
        if self.element is not None:
            return block_formats.round_to(units, self.element)
        return units.clamp_(self.least + _WHOLE, self.greatest + _WHOLE).sub_(_WHOLE)

    def values(self, levels: torch.Tensor) -> torch.Tensor:
        """Return the values of levels, (rows, columns)."""
        units = levels
        if self.zero is not None:
            units = levels - self._per_column(self.zero, levels)
        return units * self._per_column(self.scale, levels)

    def _per_column(self, groups: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Repeat a parameter of groups for the columns of ``values``."""
        if self.size == 1 or groups.shape[1] == 1:
            return groups
        # (rows, groups) to (rows, columns); the last group may be shorter.
        return groups.repeat_interleave(self.size, 1)[:, : values.shape[1]]

    def put(self, quantized: Quantized, values: torch.Tensor) -> Quantized:
        """Replace the codes of a weight.

        Args:
            quantized: the weight.
            values: (rows, columns), which are rounded to the nearest levels.
        """
        count = max(1, _AT_ONCE // max(1, values.shape[1]))
        # (rows, padded columns): the padding of the last block keeps its codes.
        codes = quantized.codes.clone().reshape(quantized.shape[0], -1)
        for start in range(0, len(values), count):
            part = self._codes(quantized, values[start : start + count], start)
            codes[start : start + count, : values.shape[1]] = part
        return replace(quantized, codes=codes.reshape(quantized.codes.shape))

    def _codes(
        self, quantized: Quantized, values: torch.Tensor, start: int
    ) -> torch.Tensor:
        levels = self.part(slice(start, start + len(values))).levels(values)
        if self.element is None:
            # code_type knows scaled formats alone; MXINT8 is stored as int8, too.
            if self.zero is None and self.least == -128:
                return levels.to(torch.int8)
            return levels.to(code_type(quantized.spec))
        if isinstance(quantized.spec.dtype, Scaled):
            return levels.to(code_type(quantized.spec))
        return block_formats.code_of(levels, self.element)


def _per_row(parameter: torch.Tensor, rows: int) -> torch.Tensor:
    """Return scales or zero points as float32, (rows, groups); (rows, 1) without groups."""
    parameter = parameter.float()
    if parameter.ndim == 2:
        return parameter
    # () and (rows,) alike become (rows, 1), without a copy.
    return parameter.reshape(-1, 1).expand(rows, 1)
