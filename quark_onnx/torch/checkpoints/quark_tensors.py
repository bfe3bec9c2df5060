"""Conversion between quantized layers and the tensors of AMD Quark's checkpoints.

Names are ``weight``, ``weight_scale``, ``weight_zero_point`` and, with a second scale,
``weight_scale_2``. Scales of activations are ``input_scale`` and ``output_scale``. If scales are
products, ``weight_scale`` is the per-tensor factor and ``weight_scale_2`` has the per-channel
factors. Integers with per-group scales are stored with inputs first. Eight nibbles
are packed to an int32 along the last axis. MX scales are bytes with a bias of 127.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.dtypes import Integer
from quark_onnx.kernels.minifloat import E4M3
from quark_onnx.torch.config.number_formats import (
    FloatScaled,
    Progressive,
    TwoLevel,
    element_of,
    is_float8,
)
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats import affine
from quark_onnx.torch.formats.bit_packing import (
    codes_to_whole_bytes,
    in_blocks,
    pack_bits,
    pack_nibbles,
    unpack_bits,
    unpack_nibbles,
)
from quark_onnx.torch.formats.quantized_tensor import Quantized


def _is_in_bytes(spec: TensorSpec) -> bool:
    """Return whether several integers share a byte; int2 has a byte for each code."""
    return spec.dtype.bits in (2, 3) and spec.dtype.name != "int2"


def stored(weight: Quantized, method: str = "reorder") -> dict[str, Any]:
    """Return the tensors of a quantized weight, by the end of their names.

    Args:
        weight: the weight.
        method: order of nibbles, "reorder" or "order".
    """
    spec = weight.spec
    if spec.is_cast:
        return {"weight": weight.codes.reshape(weight.shape)}
    if isinstance(spec.dtype, Integer):
        return _integers(weight, method)
    if is_float8(spec.dtype):
        # Codes of a convolution have the shape of its weight.
        return {
            "weight": weight.matrix.reshape(weight.shape),
            "weight_scale": weight.scale,
        }
    parts = {"weight": _elements(weight), "weight_scale": weight.scale}
    if weight.whole is None:
        return parts
    return parts | {"weight_scale_2": weight.whole}


def has_place(spec: TensorSpec) -> bool:
    """Return whether the layout supports a weight of this specification."""
    # AMD Quark has no serialized form of block floating point (MX6, MX9, BFP16) and MXINT8.
    if spec.is_cast or spec.dtype.scaled or element_of(spec.dtype) is not None:
        return True
    return isinstance(spec.dtype, TwoLevel | FloatScaled)


def check_shape(name: str, spec: TensorSpec, shape: tuple[int, ...]) -> None:
    """Raise ConfigError if the codes of a weight do not fill whole bytes."""
    for length in _packed_lengths(spec, shape[0], math.prod(shape[1:])):
        multiple = codes_to_whole_bytes(_bits(spec))
        if length % multiple:
            raise ConfigError(
                f"{name} is {list(shape)}, and {length} codes of {spec.dtype.name} do"
                f" not fill whole bytes, as a multiple of {multiple} does; exclude this"
                " layer, or choose another format for it",
            )


def _packed_lengths(spec: TensorSpec, rows: int, columns: int) -> list[int]:
    """Return how many codes are packed into bytes in a row; none if codes are whole bytes."""
    if not isinstance(spec.dtype, Integer):
        is_whole = spec.is_cast or is_float8(spec.dtype) or _bits(spec) == 8
        return [] if is_whole else [columns]
    # Words of nibbles are padded.
    if not _is_in_bytes(spec):
        return []
    # Groups are stored with inputs first, so that a row has the codes of all outputs.
    if spec.group:
        return [rows]
    # Zero points of outputs are packed as well.
    if spec.per_channel:
        return [columns, rows]
    return [columns]


def check_parts(parts: Mapping[str, Any], spec: TensorSpec) -> None:
    """Raise ModelError if a tensor of a weight is missing."""
    names = ["weight"]
    if not spec.is_cast:
        names.append("weight_scale")
    for name in names:
        if name not in parts:
            raise ModelError(f"a weight of {spec} lacks its {name!r}")


def restored(
    parts: Mapping[str, Any],
    spec: TensorSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    method: str,
) -> Quantized:
    """Return the weight from the tensors of ``stored``.

    Args:
        parts: tensors by the end of their names.
        spec: how the weight is quantized.
        shape: shape of the weight.
        dtype: dtype of the float weight.
        method: order of nibbles, "reorder" or "order".

    Raises:
        ModelError: a tensor is missing.
    """
    check_parts(parts, spec)
    weight = parts["weight"]
    if spec.is_cast:
        values = weight.reshape(shape[0], -1)
        return Quantized(spec, shape, values, None, None, None, dtype)
    if isinstance(spec.dtype, Integer):
        return _integers_back(parts, spec, shape, dtype, method)
    scale, whole = parts["weight_scale"], parts.get("weight_scale_2")
    if is_float8(spec.dtype):
        codes = weight.reshape(shape[0], -1)
    else:
        codes = weight.view(torch.uint8)
        if _bits(spec) < 8:
            codes = unpack_bits(codes, _bits(spec))
    return Quantized(
        spec, shape, in_blocks(codes, spec.group), scale, None, whole, dtype
    )


def _integers(weight: Quantized, method: str) -> dict[str, Any]:
    """Return the tensors of integers, by the end of their names."""
    spec, codes, scale = weight.spec, weight.matrix, weight.scale
    zero = affine.explicit_zero(weight.zero, scale).to(affine.code_type(spec))
    if spec.group:
        # amd-quark stores groups as (inputs, outputs).
        codes, scale, zero = (
            tensor.t().contiguous() for tensor in (codes, scale, zero)
        )
    # amd-quark has the single scale of 8-bit integers in float32.
    elif not spec.per_channel and spec.dtype.bits == 8:
        scale = scale.float()
    else:
        codes = codes.contiguous()
    if not spec.group and spec.dtype.bits == 8:
        codes = codes.reshape(weight.shape)
    if isinstance(spec.dtype, Progressive):
        return {
            "weight": _packed(codes, spec, method),
            **factors_of(weight),
            "weight_zero_point_2": _packed(zero, spec, method),
        }
    return {
        "weight": _packed(codes, spec, method),
        "weight_scale": scale,
        # A single zero point is not packed.
        "weight_zero_point": _packed(zero, spec, method) if zero.ndim else zero,
    }


def factors_of(weight: Quantized) -> dict[str, Any]:
    """Return both factors of a weight's scales, by the end of their names.

    The per-tensor factor is the smallest power of two that scales all values into the range of FP8.
    With a power of two, the product of the factors equals the scales exactly.
    """
    # A weight of zeros has a finite logarithm.
    greatest = (
        weight.dequantize(torch.float32)
        .abs()
        .max()
        .clamp(min=torch.finfo(torch.float32).smallest_normal)
    )
    # 2^ceil(log2(amax / 448)).
    tensor_factor = torch.exp2(torch.ceil(torch.log2(greatest / E4M3.largest)))
    return {
        "weight_scale": tensor_factor,
        "weight_scale_2": weight.scale.float() / tensor_factor,
    }


def product_of(parts: Mapping[str, Any], spec: TensorSpec) -> Any:
    """Return the scales as products of the factors of ``factors_of``.

    Raises:
        ModelError: a factor is missing.
    """
    if "weight_scale_2" not in parts:
        raise ModelError(f"a weight of {spec} lacks its 'weight_scale_2'")
    return parts["weight_scale"].float() * parts["weight_scale_2"].float()


def _packed(codes: torch.Tensor, spec: TensorSpec, method: str) -> Any:
    """Return codes or zero points in amd-quark's packing; int2 and int8 stay bytes."""
    bits = spec.dtype.bits
    if bits == 4:
        return pack_nibbles(codes, method)
    if _is_in_bytes(spec):
        return pack_bits(codes.to(torch.uint8), bits)
    return codes


def _integers_back(
    parts: Mapping[str, Any],
    spec: TensorSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    method: str,
) -> Quantized:
    """Return integers from the tensors of ``_integers``; see ``restored``."""
    rows = shape[0]
    columns = math.prod(shape[1:])
    scale, zero = parts["weight_scale"], parts.get("weight_zero_point")
    if isinstance(spec.dtype, Progressive):
        scale, zero = product_of(parts, spec), None  # codes are symmetric
    # The number of codes in a packed row, of the weight and of its zero points.
    counts = (rows, rows) if spec.group else (columns, rows)
    codes = _unpacked(parts["weight"], spec, counts[0], method)
    if zero is not None and zero.ndim:
        zero = _unpacked(zero, spec, counts[1], method)
    # Back to outputs first.
    if spec.group:
        codes, scale = codes.t().contiguous(), scale.t().contiguous()
        zero = None if zero is None else zero.t().contiguous()
    zero = affine.implicit_zero(zero)
    return Quantized(
        spec,
        shape,
        in_blocks(codes.reshape(rows, -1), spec.group),
        scale,
        zero,
        None,
        dtype,
    )


def _unpacked(codes: torch.Tensor, spec: TensorSpec, count: int, method: str) -> Any:
    """Return the codes or zero points of ``_packed``, ``count`` in a row."""
    bits, signed = spec.dtype.bits, spec.grid.qmin < 0
    if bits == 4:
        return unpack_nibbles(codes, count, method, signed)
    if _is_in_bytes(spec):
        return unpack_bits(codes, bits, signed)[..., :count]
    return codes


def _elements(weight: Quantized) -> Any:
    """Return the elements of blocks as bytes, or as 8-bit floats."""
    codes, bits = weight.matrix, _bits(weight.spec)
    if bits == 8:
        wide = weight.spec.dtype.name == "mxfp8e5m2"
        # The codes are bit patterns, which the file has as floats.
        return codes.contiguous().view(
            torch.float8_e5m2 if wide else torch.float8_e4m3fn,
        )
    return pack_bits(codes, bits)


def _bits(spec: TensorSpec) -> int:
    """Return the width of a code in bits: an integer's, or that of a block's element."""
    if isinstance(spec.dtype, Integer):
        return spec.dtype.bits
    element = element_of(spec.dtype)
    # NVFP4 and AMD's FP4 have elements of four bits.
    if element is None:
        return 4
    return 1 + element.exponent_bits + element.mantissa_bits
