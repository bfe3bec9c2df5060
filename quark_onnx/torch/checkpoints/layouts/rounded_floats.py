"""Weights that are stored as floats after rounding, with their scales: AMD Quark's
``fake_quantized``.

Names are those of ``checkpoints.quark_tensors``. Nothing is packed or transposed: the weight has
the type of the model, scales have the shape (outputs, groups), and zero points are int32. Shared
exponents are stored as powers of two, and the block scales of NVFP4 as floats, multiplied by the
scale of the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quark_onnx.dtypes import Integer, Scaled
from quark_onnx.errors import ModelError
from quark_onnx.torch.checkpoints.quark_tensors import factors_of, product_of
from quark_onnx.torch.config.number_formats import Progressive
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.block_formats import scale_values
from quark_onnx.torch.formats.quantized_tensor import Quantized, quantize


def stored_floats(weight: Quantized) -> dict[str, Any]:
    """Return the tensors of a quantized weight, by the end of their names."""
    found = {"weight": weight.dequantize()}
    if weight.scale is None:
        return found
    scale = weight.scale
    if scale.dtype == torch.uint8:
        scale = scale_values(scale, weight.spec.dtype).to(weight.dtype)
    elif weight.whole is not None:  # E4M3, relative to the scale of the tensor
        scale = scale.float() * weight.whole
    found["weight_scale"] = scale
    if isinstance(weight.spec.dtype, Progressive):
        zero = torch.zeros_like(scale, dtype=torch.int32)
        return found | factors_of(weight) | {"weight_zero_point_2": zero}
    if isinstance(weight.spec.dtype, Integer):
        zero = torch.zeros_like(scale) if weight.zero is None else weight.zero
        found["weight_zero_point"] = zero.to(torch.int32)
    if weight.whole is not None:
        found["weight_scale_2"] = weight.whole
    return found


def restored_floats(
    parts: Mapping[str, Any],
    spec: TensorSpec,
    shape: tuple[int, ...],
    dtype: Any,
) -> Quantized:
    """Return the weight of the tensors that ``stored_floats`` makes.

    Values that have been rounded are codes again after another rounding with the same scales.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    for name in ("weight",) if spec.is_cast else ("weight", "weight_scale"):
        if name not in parts:
            raise ModelError(f"a weight of {spec} lacks its {name!r}")
    weight = parts["weight"].to(dtype)
    if tuple(weight.shape) != shape:
        raise ModelError(
            f"a weight is {list(weight.shape)}, and {list(shape)} in the model",
        )
    if isinstance(spec.dtype, Progressive):
        return _rounded_twice(weight, parts, spec)
    params = None
    if isinstance(spec.dtype, Scaled):
        zero = parts.get("weight_zero_point")
        kept = None if zero is None or not bool(zero.any()) else zero.float()
        params = Params(parts["weight_scale"], kept)
    return quantize(weight, spec, params=params, whole=parts.get("weight_scale_2"))


def _rounded_twice(
    weight: Any,
    parts: Mapping[str, Any],
    spec: TensorSpec,
) -> Quantized:
    """Return the codes of a weight whose scales have two factors.

    AMD Quark stores such weights unrounded, and rounds them after reading: to FP8 by the factor of
    the tensor, then to integers by the reciprocal of the other one. A weight that is rounded
    already keeps its codes: the greatest error of FP8 is a 17th, and 8 times that is less than a
    half.
    """
    scale = product_of(parts, spec)
    codes = (
        (weight.float() / parts["weight_scale"].float()).to(torch.float8_e4m3fn).float()
    )
    reciprocal = 1 / parts["weight_scale_2"].float()
    codes = torch.round(codes.reshape(len(weight), -1) * reciprocal[:, None]).clamp(
        spec.grid.qmin,
        spec.grid.qmax,
    )
    return Quantized(
        spec,
        tuple(weight.shape),
        codes.to(torch.int8),
        scale,
        None,
        None,
        weight.dtype,
    )
