"""Scales and integer codes of torch tensors: the arithmetic of ``calibrators.affine``.

With float32 scales, results equal the numpy results bit for bit. Scales of type "model" are
computed in the dtype of the tensor, including 16-bit floats. AMD Quark does the same, so that its
checkpoints have equal codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from calibrators.grid import SMALLEST_SCALE
from quark_onnx.dtypes import Integer, Scaled
from quark_onnx.torch.config.spec import TensorSpec

#: The 16-bit floats by name.
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_TYPES = {"float32": torch.float32, **HALVES}
_FLOAT8 = {"fp8e4m3": torch.float8_e4m3fn, "fp8e5m2": torch.float8_e5m2}
_SHORT = (torch.float16, torch.bfloat16)


class Params(NamedTuple):
    """Scale and zero point of a tensor, broadcastable against the tensor.

    Zero is None if the zero point is 0.
    """

    scale: Any
    zero: Any = None

    def each(self, change: Callable[[Any], Any]) -> Params:
        """Return the parameters with a change of each tensor that is present."""
        return Params(*(None if tensor is None else change(tensor) for tensor in self))


def explicit_zero(zero: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor:
    """Return zero points as a tensor: zeros in the shape of the scales if there are none."""
    return torch.zeros_like(scale) if zero is None else zero


def implicit_zero(zero: torch.Tensor | None) -> torch.Tensor | None:
    """Return float zero points; None if all are 0, as in ``Params``."""
    if zero is None or not bool(zero.any()):
        return None
    return zero.float()


def scale_type(spec: TensorSpec, model: torch.dtype) -> torch.dtype:
    """Return the torch dtype of stored scales, for tensors of dtype ``model``."""
    return model if spec.scale == "model" else _TYPES[spec.scale]


def code_type(spec: TensorSpec) -> torch.dtype:
    """Return the torch dtype of codes.

    Returns:
        int8, uint8, int16, int32, int64, float8_e4m3fn or float8_e5m2.

    >>> code_type(TensorSpec("uint4")), code_type(TensorSpec("fp8e4m3"))
    (torch.uint8, torch.float8_e4m3fn)
    """
    # Codes of 8-bit floats are stored in torch's own types, not as bytes.
    if spec.dtype.name in _FLOAT8:
        return _FLOAT8[spec.dtype.name]
    assert isinstance(spec.dtype, Scaled)
    if isinstance(spec.dtype, Integer) and spec.dtype.bits > 8:
        return {"int16": torch.int16, "int32": torch.int32}.get(
            spec.dtype.name,
            torch.int64,
        )
    return torch.int8 if spec.grid.qmin < 0 else torch.uint8


def params_for(lo: torch.Tensor, hi: torch.Tensor, spec: TensorSpec) -> Params:
    """Return the scale and zero point whose codes cover the given ranges.

    Args:
        lo: floats of any shape, lo <= 0.
        hi: floats of the shape of ``lo``, hi >= 0.
        spec: how the tensor is quantized.

    Returns:
        Scale and zero point of the shape of ``lo``.

    >>> params_for(torch.tensor(-1.0), torch.tensor(3.0), TensorSpec("uint8", symmetric=False))
    Params(scale=tensor(0.0157), zero=tensor(64.))
    """
    grid = spec.grid
    kept = scale_type(spec, lo.dtype)
    # Scales of the model's 16-bit type are computed in it, as AMD Quark does; others in float64, so
    # that only the last step rounds.
    work = lo.dtype if lo.dtype in _SHORT and spec.scale == "model" else torch.float64
    lo, hi = lo.to(work), hi.to(work)
    # (hi - lo) covers qmax - qmin steps. With even codes, the greatest magnitude lies half a step
    # beyond qmax.
    if not grid.symmetric:
        scale = (hi - lo) / grid.levels
    elif grid.even:
        scale = torch.maximum(hi, -lo) / (grid.levels / 2)
    elif grid.qmin < grid.zero:
        # Both ends may have unequal numbers of steps (128 below, 127 above): the larger scale
        # covers both.
        scale = torch.maximum(
            hi / (grid.qmax - grid.zero),
            lo / (grid.qmin - grid.zero),
        )
    else:
        # No code below zero: negative values saturate at 0.
        scale = hi / grid.qmax
    least = max(torch.finfo(kept).smallest_normal, SMALLEST_SCALE)
    # A range of zeros has scale 1, and subnormal scales are avoided: kernels may flush them.
    scale = torch.where(
        scale > 0,
        scale.clamp(least, torch.finfo(kept).max),
        torch.ones_like(scale),
    )
    if grid.pow2:
        # frexp gives mantissas in [0.5, 1): rounding up to a power of two keeps the range covered.
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(
            torch.ones_like(scale),
            torch.where(mantissa == 0.5, exponent - 1, exponent),
        )
    # Zero points follow from the stored scale, by which codes are divided.
    scale = _stored(scale, kept)
    if grid.symmetric and not grid.zero:
        return Params(scale)
    if grid.symmetric:
        return Params(scale, torch.full_like(scale, grid.zero, dtype=torch.float32))
    zero = (grid.qmin - torch.round(lo / scale.to(work))).clamp(grid.qmin, grid.qmax)
    # With 16-bit scales AMD Quark takes the code that follows from the rounded scale.
    if kept not in _SHORT:
        # In a range -x to x, zero lies halfway between two codes: take the upper one, as
        # calibrators.affine does, and the code 0 for zeros alone.
        upper = torch.full_like(zero, (grid.qmin + grid.qmax + 1) // 2)
        upper = torch.where(hi > 0, upper, torch.zeros_like(zero))
        zero = torch.where(lo == -hi, upper, zero)
    return Params(scale, zero.to(torch.float32))


def _stored(scale: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    """Return scales in their stored dtype, rounded up, so that no value is clipped."""
    near = scale.to(kept)
    if kept not in _SHORT or scale.dtype in _SHORT:
        return near
    # The bits of a positive float, plus 1, are those of the next greater one.
    short = (near.to(scale.dtype) < scale) & (near < torch.finfo(kept).max)
    return torch.where(short, (near.view(torch.int16) + 1).view(kept), near)


def encode(x: torch.Tensor, params: Params, spec: TensorSpec) -> torch.Tensor:
    """Return the codes of floats, in the dtype of ``code_type``.

    Args:
        x: floats.
        params: scale and zero point, broadcastable against ``x``.
        spec: how ``x`` is quantized.

    >>> encode(torch.tensor([0.2, 9.0]), Params(torch.tensor(0.5)), TensorSpec("int2"))
    tensor([0, 1], dtype=torch.int8)
    """
    grid = spec.grid
    if not isinstance(spec.dtype, Integer):
        # AMD Quark divides in the dtype of the tensor if the scale has the same dtype
        scale = params.scale
        if x.dtype != scale.dtype:
            x, scale = x.float(), scale.float()
        # Clamped first: E5M2 would overflow to infinities, and E4M3, in older releases of torch,
        # to NaN.
        scaled: torch.Tensor = x / scale
        return scaled.clamp(grid.qmin, grid.qmax).to(code_type(spec))
    work = _work(code_type(spec))
    # torch.round rounds half to even, as NumPy and onnxruntime do.
    steps = torch.round(x.to(work) / params.scale.to(work))
    if params.zero is not None:
        steps += params.zero
    return steps.clamp_(grid.qmin, grid.qmax).to(code_type(spec))


def _work(codes: torch.dtype) -> torch.dtype:
    """Return the float dtype that holds every code of an integer dtype exactly."""
    return torch.float64 if codes in (torch.int32, torch.int64) else torch.float32


def decode(
    codes: torch.Tensor,
    params: Params,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the dequantized values of codes.

    Args:
        codes: codes of ``encode``.
        params: scale and zero point, broadcastable against ``codes``.
        dtype: dtype of the result.

    >>> decode(torch.tensor([1, 3], dtype=torch.int8), Params(torch.tensor(0.5), torch.tensor(1.0)))
    tensor([0., 1.])
    """
    # A copy, as the operations below work in place.
    reals = codes.to(work := _work(codes.dtype), copy=True)
    if params.zero is not None:
        reals -= params.zero
    return reals.mul_(params.scale.to(work)).to(dtype)


def rounded(
    x: torch.Tensor,
    params: Params,
    spec: TensorSpec,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the dequantized values of the codes of floats.

    The function skips the cast to codes where the result is equal.

    Args:
        x: floats.
        params: scale and zero point, broadcastable against ``x``.
        spec: how ``x`` is quantized.
        dtype: dtype of the result.

    >>> rounded(torch.tensor([0.2, 9.0]), Params(torch.tensor(0.5)), TensorSpec("int2"))
    tensor([0.0000, 0.5000])
    """
    if not isinstance(spec.dtype, Integer) or _work(code_type(spec)) != torch.float32:
        return decode(encode(x, params, spec), params, dtype)
    scale, grid = params.scale.float(), spec.grid
    # Codes stay floats: every code is a whole number that float32 holds exactly.
    steps: torch.Tensor = (x.float() / scale).round_()
    if params.zero is not None:
        steps += params.zero
    steps.clamp_(grid.qmin, grid.qmax)
    if params.zero is not None:
        steps -= params.zero
    return steps.mul_(scale).to(dtype)


def extremes(x: torch.Tensor) -> tuple[Any, Any]:
    """Return minimum and maximum along the last axis (kept), including zero."""
    # amin of an empty axis is an error.
    if not x.shape[-1]:
        zeros = x.new_zeros((*x.shape[:-1], 1))
        return zeros, zeros
    return (
        x.amin(-1, keepdim=True).clamp(max=0),
        x.amax(-1, keepdim=True).clamp(min=0),
    )


def of_numbers(lo: float, hi: float, spec: TensorSpec, model: torch.dtype) -> Params:
    """Return scale and zero point of one range, for activations of dtype ``model``."""
    # The type of the ends decides in which type params_for computes the scale.
    ends = torch.tensor(np.array([lo, hi], np.float64))
    ends = ends.to(model if model in _SHORT else torch.float32)
    params = params_for(ends[0], ends[1], spec)
    return Params(params.scale.to(scale_type(spec, model)), params.zero)
