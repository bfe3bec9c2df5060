"""Scales and codes of torch tensors: the arithmetic of ``calibrators.affine``, where the tensors
are.

With float32 scales results equal those of numpy bit for bit. Scales of type "model" are computed in
the type of the tensor, 16-bit floats included, as AMD Quark computes them: the codes of its
checkpoints come out the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from calibrators.grid import SMALLEST_SCALE
from quark_onnx.dtypes import Integer, Scaled
from quark_onnx.torch.config.spec import TensorSpec

_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_FLOAT8 = {"fp8e4m3": torch.float8_e4m3fn, "fp8e5m2": torch.float8_e5m2}
_SHORT = (torch.float16, torch.bfloat16)


class Params(NamedTuple):
    """Scale and zero point, shaped to broadcast against what they belong to.

    Zero is None where it is 0.
    """

    scale: Any
    zero: Any = None


def scale_type(spec: TensorSpec, model: Any) -> Any:
    """The torch type that scales are stored in, for tensors of type ``model``."""
    return model if spec.scale == "model" else _TYPES[spec.scale]


def code_type(spec: TensorSpec) -> Any:
    """The torch type that holds one code: int8, uint8, int16, int32, float8_e4m3fn or float8_e5m2.

    >>> code_type(TensorSpec("uint4")), code_type(TensorSpec("fp8e4m3"))
    (torch.uint8, torch.float8_e4m3fn)
    """
    if spec.dtype.name in _FLOAT8:
        return _FLOAT8[spec.dtype.name]
    assert isinstance(spec.dtype, Scaled)
    if isinstance(spec.dtype, Integer) and spec.dtype.bits > 8:
        return {"int16": torch.int16, "int32": torch.int32}.get(
            spec.dtype.name,
            torch.int64,
        )
    return torch.int8 if spec.grid.qmin < 0 else torch.uint8


def params_for(lo: Any, hi: Any, spec: TensorSpec) -> Params:
    """The scale and zero point with which the codes cover intervals.

    Args:
        lo, hi: floats of any one shape, lo <= 0 <= hi.

    >>> params_for(torch.tensor(-1.0), torch.tensor(3.0), TensorSpec("uint8", symmetric=False))
    Params(scale=tensor(0.0157), zero=tensor(64.))
    """
    grid = spec.grid
    kept = scale_type(spec, lo.dtype)
    work = lo.dtype if lo.dtype in _SHORT and spec.scale == "model" else torch.float64
    lo, hi = lo.to(work), hi.to(work)
    if not grid.symmetric:
        scale = (hi - lo) / grid.levels
    elif grid.even:
        scale = torch.maximum(hi, -lo) / (grid.levels / 2)
    elif grid.qmin < grid.zero:
        scale = torch.maximum(
            hi / (grid.qmax - grid.zero),
            lo / (grid.qmin - grid.zero),
        )
    else:
        scale = hi / grid.qmax
    least = max(torch.finfo(kept).smallest_normal, SMALLEST_SCALE)
    scale = torch.where(
        scale > 0,
        scale.clamp(least, torch.finfo(kept).max),
        torch.ones_like(scale),
    )
    if grid.pow2:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(
            torch.ones_like(scale),
            torch.where(mantissa == 0.5, exponent - 1, exponent),
        )
    scale = _stored(scale, kept)
    if grid.symmetric:
        return Params(
            scale,
            None
            if not grid.zero
            else torch.full_like(scale, grid.zero, dtype=torch.float32),
        )
    zero = (grid.qmin - torch.round(lo / scale.to(work))).clamp(grid.qmin, grid.qmax)
    if (
        kept not in _SHORT
    ):  # with scales of 16 bits the peer takes the code that the rounded scale leads to
        # between equal ends zero lies halfway between two codes: it is the upper one, as in
        # calibrators.affine
        zero = torch.where(
            lo == -hi,
            torch.full_like(zero, (grid.qmin + grid.qmax + 1) // 2),
            zero,
        )
    return Params(scale, zero.to(torch.float32))


def _stored(scale: Any, kept: Any) -> Any:
    """Scales in the type that they are stored in.

    A narrow type takes the next number above, so that nothing clips.
    """
    near = scale.to(kept)
    if kept not in _SHORT or scale.dtype in _SHORT:
        return near
    short = (near.to(scale.dtype) < scale) & (near < torch.finfo(kept).max)
    return torch.where(short, (near.view(torch.int16) + 1).view(kept), near)


def encode(x: Any, params: Params, spec: TensorSpec) -> Any:
    """The codes of reals, of the type of ``code_type``.

    >>> encode(torch.tensor([0.2, 9.0]), Params(torch.tensor(0.5)), TensorSpec("int2"))
    tensor([0, 1], dtype=torch.int8)
    """
    grid = spec.grid
    if not isinstance(spec.dtype, Integer):
        # in the type of the tensor where the scale has it, too: what the peer does
        scaled = (
            x / params.scale
            if x.dtype == params.scale.dtype
            else x.float() / params.scale.float()
        )
        return scaled.clamp(grid.qmin, grid.qmax).to(code_type(spec))
    work = _work(code_type(spec))
    steps = torch.round(x.to(work) / params.scale.to(work))
    if params.zero is not None:
        steps += params.zero
    return steps.clamp_(grid.qmin, grid.qmax).to(code_type(spec))


def _work(codes: Any) -> Any:
    """The type that holds every code of a type exactly."""
    return torch.float64 if codes in (torch.int32, torch.int64) else torch.float32


def decode(codes: Any, params: Params, dtype: Any = torch.float32) -> Any:
    """The reals that codes stand for.

    >>> decode(torch.tensor([1, 3], dtype=torch.int8), Params(torch.tensor(0.5), torch.tensor(1.0)))
    tensor([0., 1.])
    """
    reals = codes.to(work := _work(codes.dtype), copy=True)
    if params.zero is not None:
        reals -= params.zero
    return reals.mul_(params.scale.to(work)).to(dtype)


def rounded(
    x: Any,
    params: Params,
    spec: TensorSpec,
    dtype: Any = torch.float32,
) -> Any:
    """The reals that the codes of reals stand for, without the codes between where that is the
    same.

    >>> rounded(torch.tensor([0.2, 9.0]), Params(torch.tensor(0.5)), TensorSpec("int2"))
    tensor([0.0000, 0.5000])
    """
    if not isinstance(spec.dtype, Integer) or _work(code_type(spec)) != torch.float32:
        return decode(encode(x, params, spec), params, dtype)
    scale, grid = params.scale.float(), spec.grid
    steps = (x.float() / scale).round_()
    if params.zero is not None:
        steps += params.zero
    steps.clamp_(grid.qmin, grid.qmax)
    if params.zero is not None:
        steps -= params.zero
    return steps.mul_(scale).to(dtype)


def extremes(x: Any) -> tuple[Any, Any]:
    """The least and the greatest value along the last axis, which is kept, with zero among them."""
    if not x.shape[-1]:
        none = x.new_zeros((*x.shape[:-1], 1))
        return none, none
    return x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)


def of_numbers(lo: float, hi: float, spec: TensorSpec, model: Any) -> Params:
    """Scale and zero point of one interval, for activations of type ``model``."""
    ends = torch.tensor(np.array([lo, hi], np.float64))
    ends = ends.to(model if model in _SHORT else torch.float32)
    params = params_for(ends[0], ends[1], spec)
    return Params(params.scale.to(scale_type(spec, model)), params.zero)
