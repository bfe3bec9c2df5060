"""Dequantized weights with their scales: AMD Quark's ``fake_quantized``.

Names are the names of ``checkpoints.quark_tensors``. Tensors are neither packed nor transposed: the
weight has the dtype of the model, scales have the shape (outputs, groups), and zero points are
int32. Shared exponents are stored as powers of two, and the block scales of NVFP4 as floats,
multiplied by the global scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quark_onnx.common.errors import ModelError
from quark_onnx.dtypes import Integer, Scaled
from quark_onnx.torch.checkpoints.quark_tensors import (
    check_parts,
    factors_of,
    product_of,
)
from quark_onnx.torch.config.number_formats import Progressive
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.affine import Params, explicit_zero, implicit_zero
from quark_onnx.torch.formats.block_formats import scale_values
from quark_onnx.torch.formats.quantized_tensor import Quantized, quantize


def stored_floats(weight: Quantized) -> dict[str, Any]:
    """Return the tensors of a quantized weight, by the end of their names."""
    tensors = {"weight": weight.dequantize()}
    # 16-bit floats and block floating point have no scales.
    if weight.scale is None:
        return tensors
    scale = weight.scale
    # Bytes are exponents (E8M0), or floats without a torch dtype (E5M3).
    if scale.dtype == torch.uint8:
        scale = scale_values(scale, weight.spec.dtype).to(weight.dtype)
    elif weight.whole is not None:  # E4M3, relative to the scale of the tensor
        scale = scale.float() * weight.whole
    tensors["weight_scale"] = scale
    if isinstance(weight.spec.dtype, Progressive):
        # The codes are symmetric; amd-quark has their zero points nevertheless.
        zero = torch.zeros_like(scale, dtype=torch.int32)
        return tensors | factors_of(weight) | {"weight_zero_point_2": zero}
    if isinstance(weight.spec.dtype, Integer):
        zero = explicit_zero(weight.zero, scale)
        tensors["weight_zero_point"] = zero.to(torch.int32)
    if weight.whole is not None:
        tensors["weight_scale_2"] = weight.whole
    return tensors


def restored_floats(
    parts: Mapping[str, Any],
    spec: TensorSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Quantized:
    """Return the weight from the tensors of ``stored_floats``.

    Rounding of dequantized values with equal scales restores the codes.

    Args:
        parts: tensors by the end of their names.
        spec: how the weight is quantized.
        shape: shape of the weight.
        dtype: dtype of the float weight.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    check_parts(parts, spec)
    weight = parts["weight"].to(dtype)
    if tuple(weight.shape) != shape:
        raise ModelError(
            f"a weight is {list(weight.shape)}, and {list(shape)} in the model",
        )
    if isinstance(spec.dtype, Progressive):
        return _rounded_twice(weight, parts, spec)
    params = None
    if isinstance(spec.dtype, Scaled):
        zero = implicit_zero(parts.get("weight_zero_point"))
        params = Params(parts["weight_scale"], zero)
    # With the stored scales instead of new ones.
    return quantize(weight, spec, params=params, whole=parts.get("weight_scale_2"))


def _rounded_twice(
    weight: torch.Tensor,
    parts: Mapping[str, Any],
    spec: TensorSpec,
) -> Quantized:
    """Return the codes of a weight whose scales are products.

    AMD Quark stores such weights unrounded, and rounds them after reading: to FP8 by the per-tensor
    factor, then to integers by the reciprocal of the per-channel factor. A dequantized weight keeps
    its codes: the relative error of FP8 is at most 1/17, and 8/17 is less than one half.
    """
    scale = product_of(parts, spec)
    codes = (
        (weight.float() / parts["weight_scale"].float()).to(torch.float8_e4m3fn).float()
    )
    reciprocal = 1 / parts["weight_scale_2"].float()
    # (outputs, inputs), multiplied by (outputs, 1).
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
