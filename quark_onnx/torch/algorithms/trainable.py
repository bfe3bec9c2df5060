"""A quantized weight whose roundings and scales gradients can move: ``w = scale * round(w / scale + shift)``.

Every rounding hands gradients straight through (Bengio et al. 2013). What is computed on the way is, bit for bit, what
the codes stand for.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from calibrators.grid import SMALLEST_SCALE
from quark_onnx.dtypes import Integer, Scaled
from quark_onnx.kernels.minifloat import E2M1, E4M3, E5M2, MiniFloat
from quark_onnx.torch import affine, shared_exponent
from quark_onnx.torch.formats import TwoLevel, element_of
from quark_onnx.torch.packing import in_blocks
from quark_onnx.torch.quantized import Quantized
from quark_onnx.torch.spec import TensorSpec

#: The least that is left of a scale, as a share of what it was.
LEAST = 0.1
_FLOAT8 = {"fp8e4m3": E4M3, "fp8e5m2": E5M2}
#: MXINT8: -2 to 127/64 in steps of 1/64.
_MXINT8 = (-128, 127, 2.0**-6)


class _Through(torch.autograd.Function):
    """The second operand; gradients go to the first."""

    @staticmethod
    def forward(ctx: Any, x: Any, rounded: Any) -> Any:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def through(x: Any, rounded: Any) -> Any:
    """``rounded``, with the gradients of ``x``.

    >>> x = torch.tensor(1.2, requires_grad=True)
    >>> (3 * through(x, torch.round(x.detach()))).backward()
    >>> x.grad
    tensor(3.)
    """
    return _Through.apply(x, rounded)


def can_train(spec: TensorSpec) -> bool:
    """Whether the codes of a format come from scales and rounding.

    >>> can_train(TensorSpec("mxfp4e2m1")), can_train(TensorSpec("bfloat16"))
    (True, False)
    """
    dtype = spec.dtype
    known = isinstance(dtype, Integer | TwoLevel) or dtype.name in (*_FLOAT8, "mxint8")
    return known or element_of(dtype) is not None


class TrainableWeight:
    """A weight on its way from codes to better ones.

    Args:
        weight: floats of shape (outputs, ...).
        start: its codes; ``made`` returns the same until a leaf is moved.

    Attributes:
        shift: what is added to every value before it is rounded, in steps.
        high: what the greatest value that has a code is multiplied by, for each scale; the least one, too, where the
            format is symmetric.
        low: what the least value that has a code is multiplied by; None where the format is symmetric.
    """

    def __init__(self, weight: Any, start: Quantized) -> None:
        self._start, self._spec = start, start.spec
        matrix = weight.detach().reshape(len(weight), -1).float()
        self._reals = in_blocks(matrix, self._spec.group) if self._spec.group else matrix
        dtype = self._spec.dtype
        self._element = E2M1 if isinstance(dtype, TwoLevel) else _FLOAT8.get(dtype.name) or element_of(dtype)
        self._unit: Any = 1.0
        if dtype.name == "mxint8":
            self._qmin, self._qmax, self._unit = _MXINT8
        elif isinstance(dtype, Scaled):
            self._qmin, self._qmax = self._spec.grid.qmin, self._spec.grid.qmax
        scale = start.scale
        if isinstance(dtype, TwoLevel):
            self._unit = start.whole.float()
        elif not isinstance(dtype, Scaled):
            scale = torch.exp2(scale.float() - shared_exponent.BIAS)
        self._scale = self._spread(scale.float())
        self._zero = None if start.zero is None else self._spread(start.zero.float())
        self.high = torch.ones_like(self._scale)
        asymmetric = isinstance(dtype, Integer) and self._zero is not None and not self._spec.grid.symmetric
        self.low = torch.ones_like(self._scale) if asymmetric else None
        self.shift = torch.zeros_like(self._reals)
        self._reach: Any = 0.5
        self._reproduce()

    def _spread(self, each: Any) -> Any:
        """One number for a scale, shaped to broadcast against the values."""
        return each[(..., *[None] * (self._reals.ndim - each.ndim))] if each.ndim else each

    def _reproduce(self) -> None:
        """Shift values that an algorithm has not rounded to the nearest into the middle of what their codes stand for."""
        scale, zero = self._grid()
        given = _codes_as_values(self._start, zero)
        scaled = self._reals / scale
        other = self._values(scaled, zero) != given
        if other.any():
            step = 1.0 if self._element is None else _spacing(scaled, self._element)
            self.shift = torch.where(other, (given - scaled) / step, self.shift)
            self._reach = self.shift.abs().clamp(min=0.5)

    def leaves(self, ranges: bool = True) -> list[tuple[Any, bool]]:
        """What gradients move, each with whether it is of a scale."""
        return [(self.shift, False), *((each, True) for each in (self.high, self.low) if ranges and each is not None)]

    def hold(self) -> None:
        """Bring leaves that have moved too far back to the ends of where they may be."""
        self.shift.clamp_(-self._reach, self._reach) if isinstance(self._reach, float) else self.shift.copy_(
            torch.minimum(torch.maximum(self.shift, -self._reach), self._reach)
        )
        for each in (self.high, self.low):
            if each is not None:
                each.clamp_(LEAST, 1.0)

    def weight(self) -> Any:
        """What the codes stand for: floats of the shape and the type of the weight, with gradients."""
        scale, zero = self._grid()
        values = self._values(self._reals / scale, zero) * scale
        rows, columns = self._start.shape[0], prod(self._start.shape[1:])
        return values.reshape(rows, -1)[:, :columns].reshape(self._start.shape).to(self._start.dtype)

    def _grid(self) -> tuple[Any, Any]:
        """Scales as they are stored, and zero points."""
        kept = self._kept()
        return kept * self._unit, self._zero_of(kept)

    def _kept(self) -> Any:
        if self.low is None:
            scale = self._scale * self.high
        else:
            above, below = self._qmax - self._zero, self._zero - self._qmin
            scale = self._scale * ((above * self.high + below * self.low) / (self._qmax - self._qmin))
        if isinstance(self._spec.dtype, TwoLevel):
            least = 2.0 ** (E4M3.emin - E4M3.mantissa_bits)
            return through(scale, shared_exponent.round_to(scale.detach(), E4M3).clamp(min=least))
        if not isinstance(self._spec.dtype, Scaled) or self._spec.grid.pow2:
            return through(scale, torch.exp2(torch.round(torch.log2(scale.detach())).clamp(-127, 127)))
        kept = self._start.scale.dtype
        return scale.clamp(min=max(torch.finfo(kept).smallest_normal, SMALLEST_SCALE)).to(kept).float()

    def _zero_of(self, scale: Any) -> Any:
        if self.low is None:
            return self._zero
        below = (self._zero - self._qmin) * self.low * self._scale / scale
        return (self._qmin + through(below, torch.round(below.detach()))).clamp(self._qmin, self._qmax)

    def _values(self, scaled: Any, zero: Any) -> Any:
        """What is left of values in units of the scale."""
        if self._element is not None:
            moved = scaled + self.shift * _spacing(scaled.detach(), self._element)
            moved = moved.clamp(-self._element.largest, self._element.largest)
            return through(moved, shared_exponent.round_to(moved.detach(), self._element))
        moved = scaled + self.shift
        steps = through(moved, torch.round(moved.detach()))
        return steps.clamp(self._qmin, self._qmax) if zero is None else (steps + zero).clamp(self._qmin, self._qmax) - zero

    def made(self) -> Quantized:
        """The codes and scales."""
        with torch.no_grad():
            kept = self._kept()
            zero = self._zero_of(kept)
            values = self._values(self._reals / (kept * self._unit), zero)
        start, dtype = self._start, self._spec.dtype
        if isinstance(dtype, Scaled):
            codes = (values if zero is None else values + zero).to(start.codes.dtype)
        else:
            codes = values.to(torch.int8) if self._element is None else shared_exponent.code_of(values, self._element)
            if not isinstance(dtype, TwoLevel):
                kept = torch.log2(kept) + shared_exponent.BIAS
        scale = kept.reshape(start.scale.shape).to(start.scale.dtype)
        zero = None if zero is None else zero.reshape(start.zero.shape).to(start.zero.dtype)
        return Quantized(self._spec, start.shape, codes, scale, zero, start.whole, start.dtype)


def _spacing(x: Any, format: MiniFloat) -> Any:
    """The distance between neighbours of a small float where ``x`` is."""
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    return power.clamp(2.0**format.emin, 2.0**format.emax) * 2.0**-format.mantissa_bits


def _codes_as_values(start: Quantized, zero: Any) -> Any:
    """What codes stand for, in units of the scale."""
    if isinstance(start.spec.dtype, Scaled) or start.spec.dtype.name == "mxint8":
        codes = start.codes.float()
        return codes if zero is None else codes - zero
    two = isinstance(start.spec.dtype, TwoLevel)
    one = torch.full_like(start.scale, 1 if two else shared_exponent.BIAS)
    shared = shared_exponent.Shared(start.codes, one, torch.ones_like(start.whole) if two else None)
    return shared_exponent.decode(shared, start.spec)
