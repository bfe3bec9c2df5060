"""A quantized weight whose roundings and scales gradient descent can change.

Every rounding hands gradients straight through (Bengio et al. 2013, "Estimating or Propagating
Gradients Through Stochastic Neurons for Conditional Computation"). Values in training equal the
dequantized codes bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from calibrators.grid import SMALLEST_SCALE
from quark_onnx.dtypes import Integer, Scaled
from quark_onnx.kernels.minifloat import E4M3, MiniFloat
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.config.number_formats import E5M3, FloatScaled, TwoLevel
from quark_onnx.torch.formats import block_formats
from quark_onnx.torch.formats.bit_packing import in_blocks
from quark_onnx.torch.formats.quantized_tensor import Quantized

#: The least and the greatest range, as shares of the original range.
_SHARES = (0.1, 1.0)
#: The greatest shift of a value, in steps.
_REACH = 0.5
#: For a value whose code an algorithm has chosen, the initial distance in steps from the middle of
#: the interval that is rounded to the code.
_FROM_MIDDLE = 0.45


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, rounded: torch.Tensor
    ) -> torch.Tensor:
        # A view, since autograd treats an input that is returned as it is apart.
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        # The rounded values come from a detached tensor.
        return gradients[0], None


def through(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return ``rounded``, with the gradients of ``x`` (straight-through estimator).

    >>> x = torch.tensor(1.2, requires_grad=True)
    >>> (3 * through(x, torch.round(x.detach()))).backward()
    >>> x.grad
    tensor(3.)
    """
    result: torch.Tensor = _Through.apply(x, rounded)  # type: ignore[no-untyped-call]
    return result


class TrainableWeight:
    """A weight in training.

    Args:
        weight: floats of shape (outputs, ...).
        start: the codes of the weight; ``made`` returns these until a leaf is moved.
        steps: the levels of ``start``.

    Attributes:
        shift: the summand of every value before rounding, in steps, -0.5 to 0.5; more where the
            code in ``start`` is farther away.
        high: the factor of the upper end of the range for each scale, at most 1; also of the lower
            end where the format is symmetric.
        low: the factor of the lower end; None where the format is symmetric.
    """

    def __init__(
        self, weight: torch.Tensor, start: Quantized, steps: TensorLevels
    ) -> None:
        self._start = start
        self._spec = start.spec
        self._element = steps.element
        self._qmin = steps.least
        self._qmax = steps.greatest
        self._reals = self._matrix(weight.detach().float())
        scale = start.scale.float()
        self._unit: float | torch.Tensor = 1.0
        if isinstance(self._spec.dtype, TwoLevel):
            # Scales of blocks are relative to the global scale, which is not trained.
            self._unit = start.whole.float()
        elif not isinstance(self._spec.dtype, Scaled):
            scale = block_formats.scale_values(start.scale, self._spec.dtype)
            self._unit = 1.0 if self._element else 2.0**-6  # MXINT8 has 1/64
        # Broadcastable against the values: (rows, blocks, 1), (rows, 1) or ().
        self._scale = self._spread(scale)
        self._zero: torch.Tensor | None = None
        if start.zero is not None:
            self._zero = self._spread(start.zero.float())
        # A factor for each scale; symmetric formats have one end, others two.
        self.high = torch.ones_like(self._scale)
        self.low: torch.Tensor | None = None
        if isinstance(self._spec.dtype, Integer) and not self._spec.grid.symmetric:
            self.low = torch.ones_like(self._scale)
        self.shift = torch.zeros_like(self._reals)
        self._reach = self._reproduce()
        for leaf in self.leaves():
            leaf.requires_grad_(True)

    def _matrix(self, weight: torch.Tensor) -> torch.Tensor:
        matrix = weight.reshape(len(weight), -1)
        # (rows, blocks, size); otherwise (rows, columns).
        if self._spec.group:
            return in_blocks(matrix, self._spec.group)
        return matrix

    def _spread(self, parameter: torch.Tensor) -> torch.Tensor:
        """Broadcast a parameter of each scale to the values."""
        if not parameter.ndim:
            return parameter
        missing = self._reals.ndim - parameter.ndim
        return parameter.reshape(*parameter.shape, *[1] * missing)

    def _reproduce(self) -> torch.Tensor:
        """Initialize the shifts of values whose codes are not the nearest; return the shift limits.

        Such a value starts close to the end of the interval that is rounded to the code, on its own
        side: a code that an algorithm has chosen for no lasting reason can change back.
        """
        scale, zero = self._grid()
        units = self._reals / scale
        wanted = self._matrix(self._start.dequantize(torch.float32))
        differs = self._values(units, zero) * scale != wanted
        if not differs.any():
            return torch.full((), _REACH, device=units.device)
        # The distance from the value to the code that was chosen, in steps.
        middle = (wanted / scale - units) / self._spacing(units)
        near_end = middle - _FROM_MIDDLE * middle.sign()
        self.shift = torch.where(differs, near_end, self.shift)
        # small floats lie closer on one side than on the other
        differs &= self._values(units, zero) * scale != wanted
        self.shift = torch.where(differs, middle, self.shift)
        return self.shift.abs().clamp(min=_REACH)

    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors that gradient descent changes."""
        leaves = (self.shift, self.high, self.low)
        return [leaf for leaf in leaves if leaf is not None]

    @property
    def fineness(self) -> float:
        """The step size of ranges, relative to a range of 15 steps.

        A finer grid has more codes that a change of the range moves.
        """
        # as large a step, compared with the greatest value, as 4 bits have, or a larger one
        if self._element is not None:
            return 1.0
        return min(15 / (self._qmax - self._qmin), 1.0)

    def hold(self) -> None:
        """Clamp the leaves to their limits."""
        with torch.no_grad():
            self.shift.clamp_(-self._reach, self._reach)
            # The first leaf is the shift; the others are shares of ranges.
            for leaf in self.leaves()[1:]:
                leaf.clamp_(*_SHARES)

    def weight(self) -> torch.Tensor:
        """Return the dequantized weight, of the weight's shape and type, with gradients."""
        scale, zero = self._grid()
        values = self._values(self._reals / scale, zero) * scale
        rows = self._start.shape[0]
        columns = prod(self._start.shape[1:])
        return (
            values.reshape(rows, -1)[:, :columns]
            .reshape(self._start.shape)
            .to(self._start.dtype)
        )

    def made(self) -> Quantized:
        """Return the codes and scales."""
        with torch.no_grad():
            kept, (scale, zero) = self._kept(), self._grid()
            values = self._values(self._reals / scale, zero)
        start = self._start
        if self._element is not None and not isinstance(self._spec.dtype, Scaled):
            codes = block_formats.code_of(values, self._element)
        else:
            # Codes of integers include the zero point; ``values`` are multiples of the scale around
            # 0.
            shifted = values if zero is None else values + zero
            codes = shifted.to(start.codes.dtype)
        # Without the axes that _spread added.
        kept = kept.reshape(start.scale.shape)
        if not isinstance(self._spec.dtype, Scaled):
            kept = block_formats.scale_codes(kept, self._spec.dtype)
        kept = kept.to(start.scale.dtype)
        if zero is not None:
            zero = zero.reshape(start.scale.shape).to(start.zero.dtype)
        return replace(start, codes=codes, scale=kept, zero=zero)

    def _grid(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scales and zero points."""
        kept = self._kept()
        if self.low is None:
            return kept * self._unit, self._zero
        assert self._zero is not None  # asymmetric formats have zero points
        # The zero point is as many new steps from qmin as the range reaches below 0.
        below = (self._zero - self._qmin) * self.low * self._scale / kept
        zero = self._qmin + through(below, torch.round(below.detach()))
        return kept, zero.clamp(self._qmin, self._qmax)

    def _kept(self) -> torch.Tensor:
        """Return scales in their storage type."""
        share = self.high
        if self.low is not None:
            assert self._zero is not None  # asymmetric formats have zero points
            above = self._qmax - self._zero
            below = self._zero - self._qmin
            # The width of the new range, relative to the old one of qmax - qmin steps.
            share = (above * self.high + below * self.low) / (self._qmax - self._qmin)
        scale = self._scale * share
        if isinstance(self._spec.dtype, TwoLevel):
            return through(scale, block_formats.round_scale(scale.detach(), E4M3))
        if isinstance(self._spec.dtype, FloatScaled):
            return through(scale, block_formats.round_scale(scale.detach(), E5M3))
        if not isinstance(self._spec.dtype, Scaled) or self._spec.grid.pow2:
            # E8M0, and scales that are powers of two, by the nearest exponent; the gradient
            # passes.
            power = torch.round(torch.log2(scale.detach()))
            power = power.clamp(-block_formats.BIAS, block_formats.BIAS)
            return through(scale, torch.exp2(power))
        # The least normal number of the stored type, since kernels may flush subnormal scales to 0.
        kept = self._start.scale.dtype
        least = max(torch.finfo(kept).smallest_normal, SMALLEST_SCALE)
        return scale.clamp(min=least).to(kept).float()

    def _values(self, units: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """Round values in units of the scale, with gradients."""
        # Shifts are in steps, which differ in length for small floats.
        moved = units + self.shift * self._spacing(units.detach())
        if self._element is not None:
            # Clamped with gradients: a value beyond the range gets none, and its shift stays.
            moved = moved.clamp(-self._element.largest, self._element.largest)
            return through(moved, block_formats.round_to(moved.detach(), self._element))
        steps = through(moved, torch.round(moved.detach()))
        if zero is None:
            return steps.clamp(self._qmin, self._qmax)
        return (steps + zero).clamp(self._qmin, self._qmax) - zero

    def _spacing(self, units: torch.Tensor) -> float | torch.Tensor:
        """Return the distance between neighbouring codes, in units of the scale."""
        if self._element is None:
            return 1.0
        return _spacing_of(units, self._element)


def _spacing_of(x: torch.Tensor, format: MiniFloat) -> torch.Tensor:
    """Return the distance between neighbouring values of a small float at ``x``."""
    # The exponent bits alone: the power of two below |x|. Below 2^emin, subnormal codes have equal
    # distances.
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    return power.clamp(2.0**format.emin, 2.0**format.emax) * 2.0**-format.mantissa_bits
