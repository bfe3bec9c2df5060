"""Blocks that share a scale, in torch: the microscaling formats, NVFP4, AMD's FP4, and block
floating point.

The counterpart of :mod:`quark_onnx.kernels.blockfloat`, whose values come out bit for bit; the
shared exponents of the microscaling formats are stored as bytes here (E8M0), which ends them at
2^-127.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from quark_onnx.dtypes import Block, DType
from quark_onnx.kernels.blockfloat import EXPONENT_AND_SIGN, FRACTION, threshold
from quark_onnx.kernels.minifloat import E2M1, E4M3, MiniFloat
from quark_onnx.torch.config.number_formats import (
    E5M3,
    FloatScaled,
    TwoLevel,
    element_of,
)
from quark_onnx.torch.config.spec import TensorSpec

#: What is added to an exponent to store it as a byte.
BIAS = 127


class Shared(NamedTuple):
    """Codes of blocks.

    Attributes:
        codes: uint8 codes of small floats, int8 of MXINT8, or what is left of the values (BFP16,
            MX6, MX9).
        scale: for each block a byte (E8M0; E5M3 of AMD's FP4), or E4M3 (NVFP4); None where the
            values stand for themselves.
        whole: NVFP4's scale of the tensor.
    """

    codes: Any
    scale: Any = None
    whole: Any = None


def encode(blocks: Any, spec: TensorSpec, whole: Any = None) -> Shared:
    """The codes of blocks.

    Args:
        blocks: finite floats of shape (..., blocks, block size).
        whole: NVFP4's scale of the tensor, where it is known beforehand.
    """
    x = blocks.float()
    if isinstance(spec.dtype, TwoLevel):
        return _two_levels(x, whole)
    if isinstance(spec.dtype, FloatScaled):
        return _float_scales(x)
    element = element_of(spec.dtype)
    if element is None and spec.dtype.name != "mxint8":
        return Shared(_bfp(x, spec.dtype))
    exponent = _exponent_of(x, spec.exponent, element)
    elements = _times_power(x, -exponent)
    byte = (exponent + BIAS).to(torch.uint8).squeeze(-1)
    if element is None:
        return Shared(
            torch.round(elements * (1 << FRACTION)).clamp(-128, 127).to(torch.int8),
            byte,
        )
    return Shared(code_of(round_to(elements, element), element), byte)


def rounded(blocks: Any, spec: TensorSpec, whole: Any = None) -> Any:
    """What is left of blocks: ``decode`` of ``encode``, without the codes; float32."""
    element = element_of(spec.dtype)
    if element is None:
        return decode(encode(blocks, spec, whole), spec)
    x = blocks.float()
    exponent = _exponent_of(x, spec.exponent, element)
    return _times_power(round_to(_times_power(x, -exponent), element), exponent)


def decode(shared: Shared, spec: TensorSpec, dtype: Any = torch.float32) -> Any:
    """The values of blocks, of shape (..., blocks, block size)."""
    if shared.scale is None:
        return shared.codes.to(dtype)
    if isinstance(spec.dtype, TwoLevel):
        scale = shared.scale.float() * shared.whole.float()
        return (
            _values(E2M1, shared.codes.device)[shared.codes.long()] * scale[..., None]
        ).to(dtype)
    if isinstance(spec.dtype, FloatScaled):
        scale = scale_values(shared.scale, spec.dtype)
        return (
            _values(E2M1, shared.codes.device)[shared.codes.long()] * scale[..., None]
        ).to(dtype)
    exponent = shared.scale.to(torch.int32)[..., None] - BIAS
    element = element_of(spec.dtype)
    if element is None:
        return _times_power(shared.codes.float() / (1 << FRACTION), exponent).to(dtype)
    return _times_power(
        _values(element, shared.codes.device)[shared.codes.long()],
        exponent,
    ).to(dtype)


def _exponent_of(x: Any, rule: str, element: MiniFloat | None) -> Any:
    """The exponents of the scales of blocks (..., blocks, block size); (..., blocks, 1).

    "best" is that of the specification or one more, whichever leaves the smaller squared error.
    """
    greatest = x.abs().amax(-1, keepdim=True)
    plain = shared_exponent(greatest, "floor" if rule == "best" else rule, element)
    if rule != "best" or element is None:
        return plain
    next_one = (plain + 1).clamp(max=BIAS)
    errors = []
    for exponent in (plain, next_one):
        left = _times_power(round_to(_times_power(x, -exponent), element), exponent)
        errors.append(left.sub_(x).square_().sum(-1, keepdim=True))
    return torch.where(errors[1] < errors[0], next_one, plain)


def shared_exponent(greatest: Any, rule: str, element: MiniFloat | None) -> Any:
    """The exponent of the scale of blocks with such greatest magnitudes (float32), from -127 to
    127; int32.

    By the rules of ``quark_onnx.kernels.blockfloat.threshold``: a carry raises the exponent.
    """
    bits = greatest.view(torch.int32)
    if rule != "floor":
        share, inclusive = threshold(rule, element)
        mantissa = int(
            (2 * share - 1) * (1 << 23),
        )  # of the least float32 that is not below the threshold
        raised = bits + ((1 << 23) - mantissa - (not inclusive))
        bits = torch.where(
            bits < 1 << 23,
            bits,
            raised,
        )  # no exponent of a subnormal number is raised
    exponent = (bits >> 23) - BIAS
    return (exponent - (0 if element is None else element.emax)).clamp(-BIAS, BIAS)


def round_to(x: Any, format: MiniFloat) -> Any:
    """The nearest values of a small float, ties to even, saturated.

    Args:
        x: float32, of magnitudes below 2^100.

    >>> from quark_onnx.kernels.minifloat import E2M1
    >>> round_to(torch.tensor([0.26, 2.5, 100.0]), E2M1)
    tensor([0.5000, 2.0000, 6.0000])
    """
    x = x.clamp(-format.largest, format.largest)
    # the power of two below each value; so many steps above it, float32 itself has the steps of the
    # format
    power = (
        (x.view(torch.int32) & 0x7F800000)
        .view(torch.float32)
        .clamp_(min=2.0**format.emin)
    )
    ground = power.mul_(1.5 * 2.0 ** (23 - format.mantissa_bits))
    return x.add_(ground).sub_(ground).clamp_(-format.largest, format.largest)


def code_of(values: Any, format: MiniFloat) -> Any:
    """The bit patterns of values that the format has; uint8.

    >>> from quark_onnx.kernels.minifloat import E2M1
    >>> code_of(torch.tensor([0.0, 0.5, -1.0, 6.0]), E2M1)
    tensor([ 0,  1, 10,  7], dtype=torch.uint8)
    """
    magnitude = values.abs()
    subnormal = (magnitude * 2.0 ** (format.mantissa_bits - format.emin)).to(
        torch.int32,
    )
    bits = magnitude.view(torch.int32) >> 23 - format.mantissa_bits
    normal = bits - (127 - format.bias << format.mantissa_bits)
    code = torch.where(magnitude < 2.0**format.emin, subnormal, normal)
    sign = (values < 0).to(torch.int32) << (format.exponent_bits + format.mantissa_bits)
    return (code + sign).to(torch.uint8)


@cache
def _table(format: MiniFloat) -> Any:
    """The value of each bit pattern."""
    fields = format.exponent_bits + format.mantissa_bits
    code = torch.arange(1 << fields, dtype=torch.int32)
    exponent = (
        (code >> format.mantissa_bits).clamp(min=1) - format.bias - format.mantissa_bits
    )
    hidden = (code >> format.mantissa_bits > 0).to(torch.int32) << format.mantissa_bits
    mantissa = (code & (1 << format.mantissa_bits) - 1) + hidden
    values = torch.ldexp(mantissa.float(), exponent)
    return torch.cat([values, -values])


def _values(format: MiniFloat, device: Any) -> Any:
    return _table(format).to(device)


def _times_power(x: Any, exponent: Any) -> Any:
    """x · 2^exponent, for exponents whose power alone may be beyond float32."""
    half = exponent // 2
    return x * torch.exp2(half.float()) * torch.exp2((exponent - half).float())


def global_scale_for(greatest: Any) -> Any:
    """NVFP4's scale of a tensor with this greatest magnitude: its block has the greatest E4M3 as
    its scale.
    """
    whole = greatest.float() / (E2M1.largest * E4M3.largest)
    return torch.where(whole > 0, whole, torch.ones_like(whole))


def _two_levels(x: Any, whole: Any) -> Shared:
    greatest = x.abs().amax(-1)
    if whole is None:
        whole = global_scale_for(
            greatest.max() if greatest.numel() else greatest.new_zeros(()),
        )
    whole = whole.float()
    scale = (
        (greatest / (E2M1.largest * whole))
        .clamp(max=E4M3.largest)
        .to(torch.float8_e4m3fn)
    )
    scale = torch.where(scale.float() > 0, scale.float(), torch.ones_like(greatest))
    elements = round_to(x / (scale * whole)[..., None], E2M1)
    return Shared(code_of(elements, E2M1), scale.to(torch.float8_e4m3fn), whole)


def scale_values(scale: Any, dtype: DType) -> Any:
    """Return the scales of blocks as float32, by how they are stored.

    Those of NVFP4 relative to that of the tensor.
    """
    if isinstance(dtype, FloatScaled):
        return _values(E5M3, scale.device)[scale.long()]
    if isinstance(dtype, TwoLevel):
        return scale.float()
    return torch.exp2(scale.float() - BIAS)


def scale_codes(values: Any, dtype: DType) -> Any:
    """Return scales as they are stored, ``scale_values`` backwards.

    Args:
        values: float32 that the type of the scales has.
    """
    if isinstance(dtype, FloatScaled):
        return code_of(values, E5M3)
    if isinstance(dtype, TwoLevel):
        return values.to(torch.float8_e4m3fn)
    return (torch.log2(values) + BIAS).to(torch.uint8)


def round_scale(values: Any, element: MiniFloat) -> Any:
    """Return the nearest scales that a small float has; none is 0."""
    return round_to(values.clone(), element).clamp(
        min=2.0 ** (element.emin - element.mantissa_bits),
    )


def _float_scales(x: Any) -> Shared:
    """AMD's FP4: the greatest magnitude of a block becomes the greatest FP4."""
    scale = round_scale(x.abs().amax(-1) / E2M1.largest, E5M3)
    elements = round_to(x / scale[..., None], E2M1)
    return Shared(code_of(elements, E2M1), code_of(scale, E5M3))


def _bfp(x: Any, dtype: Any) -> Any:
    """BFP16, MX4, MX6 and MX9 as the operator BFPQuantizeDequantize computes them."""
    assert isinstance(dtype, Block)
    attributes = dict(dtype.attributes)
    bits = attributes["bit_width"] - EXPONENT_AND_SIGN
    exponent = _exponent(x)
    if attributes["bfp_method"] == "to_bfp":
        return _rounded(x, exponent - bits + 1, bits)
    x = torch.where(
        x.abs() < torch.finfo(torch.float32).smallest_normal,
        torch.zeros_like(x),
        x,
    )
    exponent = _exponent(x)[..., None]
    parts = x.unflatten(-1, (-1, attributes["sub_block_size"]))
    shift = (exponent - _exponent(parts)).clamp(
        max=(1 << attributes["sub_block_shift_bits"]) - 1,
    )
    return _rounded(parts, exponent - shift - bits + 1, bits).flatten(-2)


def _rounded(x: Any, step: Any, bits: int) -> Any:
    codes = torch.round(_times_power(x, -step)).clamp(1 - (1 << bits), (1 << bits) - 1)
    return _times_power(codes, step) + 0.0  # a negative zero becomes a positive one


def _exponent(groups: Any) -> Any:
    """floor(log2) of the greatest magnitude along the last axis, which is kept; at least -127."""
    greatest = groups.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(greatest)[1] - 1
    return torch.where(greatest > 0, exponent, torch.full_like(exponent, -BIAS)).clamp(
        min=-BIAS,
    )
