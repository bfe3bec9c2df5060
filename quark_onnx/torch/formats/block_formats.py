"""Block formats in torch: microscaling (MX), NVFP4, AMD's FP4, block floating point.

Values equal the values of :mod:`quark_onnx.kernels.blockfloat` bit for bit. Shared exponents of the
microscaling formats are stored as bytes here (E8M0), whose minimum is 2^-127.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from quark_onnx.dtypes import Block, DType
from quark_onnx.kernels.blockfloat import (
    EXPONENT_AND_SIGN,
    FRACTION,
    emax_of,
    threshold,
)
from quark_onnx.kernels.minifloat import E2M1, E4M3, MiniFloat
from quark_onnx.torch.config.number_formats import (
    E5M3,
    FloatScaled,
    TwoLevel,
    element_of,
)
from quark_onnx.torch.config.spec import TensorSpec

#: The bias of exponents that are stored as bytes.
BIAS = 127


class Shared(NamedTuple):
    """Codes of blocks, with the scales of the blocks.

    Attributes:
        codes: uint8 codes of small floats, int8 codes of MXINT8, or dequantized values (BFP16, MX6,
            MX9).
        scale: scale per block: a byte (E8M0; E5M3 of AMD's FP4), or E4M3 (NVFP4). None if ``codes``
            are dequantized values.
        whole: global scale (NVFP4).
    """

    codes: torch.Tensor
    scale: Any = None
    whole: Any = None


def encode(
    blocks: torch.Tensor,
    spec: TensorSpec,
    whole: torch.Tensor | None = None,
) -> Shared:
    """Return the codes of blocks.

    Args:
        blocks: finite floats of shape (..., blocks, block size).
        spec: how the blocks are quantized.
        whole: global scale (NVFP4), if known.
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
    # A product with a power of two is exact, but where it underflows: such an element is 0
    # anyway.
    elements = _times_power(x, -exponent)
    byte = (exponent + BIAS).to(torch.uint8).squeeze(-1)
    if element is None:
        return Shared(
            torch.round(elements * (1 << FRACTION)).clamp(-128, 127).to(torch.int8),
            byte,
        )
    return Shared(code_of(round_to(elements, element), element), byte)


def rounded(
    blocks: torch.Tensor,
    spec: TensorSpec,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the values of blocks after rounding (float32), as ``decode(encode(...))``.

    Args:
        blocks: finite floats of shape (..., blocks, block size).
        spec: how the blocks are quantized.
        whole: global scale (NVFP4), if known.
    """
    element = element_of(spec.dtype)
    if element is None:
        return decode(encode(blocks, spec, whole), spec)
    x = blocks.float()
    exponent = _exponent_of(x, spec.exponent, element)
    return _times_power(round_to(_times_power(x, -exponent), element), exponent)


def decode(
    shared: Shared,
    spec: TensorSpec,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the dequantized values of blocks, of shape (..., blocks, block size)."""
    if shared.scale is None:
        return shared.codes.to(dtype)
    if isinstance(spec.dtype, TwoLevel | FloatScaled):
        scale = scale_values(shared.scale, spec.dtype)
        if isinstance(spec.dtype, TwoLevel):
            scale = scale * shared.whole.float()
        return (_values_of(shared.codes, E2M1) * scale[..., None]).to(dtype)
    exponent = shared.scale.to(torch.int32)[..., None] - BIAS
    element = element_of(spec.dtype)
    if element is None:
        return _times_power(shared.codes.float() / (1 << FRACTION), exponent).to(dtype)
    return _times_power(_values_of(shared.codes, element), exponent).to(dtype)


def _exponent_of(x: torch.Tensor, rule: str, element: MiniFloat | None) -> torch.Tensor:
    """Return the shared exponents of blocks (..., blocks, block size) as int32 (..., blocks, 1).

    The rule "best" takes the exponent of the specification or one more: the exponent with the
    smaller squared error.
    """
    greatest = x.abs().amax(-1, keepdim=True)
    plain = shared_exponent(greatest, "floor" if rule == "best" else rule, element)
    if rule != "best" or element is None:
        return plain
    # E8M0 ends at 2^127; the byte after that is NaN.
    raised = (plain + 1).clamp(max=BIAS)
    errors = []
    for exponent in (plain, raised):
        values = _times_power(round_to(_times_power(x, -exponent), element), exponent)
        errors.append(values.sub_(x).square_().sum(-1, keepdim=True))
    # Of equal errors, the exponent of the specification stays.
    return torch.where(errors[1] < errors[0], raised, plain)


def shared_exponent(
    greatest: torch.Tensor,
    rule: str,
    element: MiniFloat | None,
) -> torch.Tensor:
    """Return the shared exponents, -127 to 127, of blocks with the given maxima.

    The rules are the rules of ``quark_onnx.kernels.blockfloat.threshold``: a carry raises the
    exponent.

    Args:
        greatest: greatest magnitudes of blocks, float32.
        rule: name of a rule.
        element: format of the elements; None for MXINT8.

    Returns:
        int32 of the shape of ``greatest``.
    """
    # Magnitudes: 8 bits of exponent above 23 of mantissa. As integers they have the order of the
    # values, and a carry out of the mantissa raises the exponent by 1.
    bits = greatest.view(torch.int32)
    if rule != "floor":
        share, inclusive = threshold(rule, element)
        # The mantissa of the least float32 that is not below the threshold.
        mantissa = int((2 * share - 1) * (1 << 23))
        raised = bits + ((1 << 23) - mantissa - (not inclusive))
        # The exponent of a subnormal number is not raised.
        bits = torch.where(bits < 1 << 23, bits, raised)
    exponent = (bits >> 23) - BIAS
    return (exponent - emax_of(element)).clamp(-BIAS, BIAS)


def round_to(x: torch.Tensor, format: MiniFloat) -> torch.Tensor:
    """Round to the values of a small float, ties to even, with saturation.

    Args:
        x: float32, of magnitudes below 2^100.
        format: format of the result's values.

    >>> from quark_onnx.kernels.minifloat import E2M1
    >>> round_to(torch.tensor([0.26, 2.5, 100.0]), E2M1)
    tensor([0.5000, 2.0000, 6.0000])
    """
    # Finite formats saturate (OCP MX 1.0, section 6.3): no value becomes an infinity.
    x = x.clamp(-format.largest, format.largest)
    # The power of two below the value. Around 1.5 * 2^n times that power, float32 has the steps of
    # the format.
    power = (
        (x.view(torch.int32) & 0x7F800000)
        .view(torch.float32)
        .clamp_(min=2.0**format.emin)
    )
    ground = power.mul_(1.5 * 2.0 ** (23 - format.mantissa_bits))
    return x.add_(ground).sub_(ground).clamp_(-format.largest, format.largest)


def code_of(values: torch.Tensor, format: MiniFloat) -> torch.Tensor:
    """Return the bit patterns (uint8) of values that the format represents exactly.

    >>> from quark_onnx.kernels.minifloat import E2M1
    >>> code_of(torch.tensor([0.0, 0.5, -1.0, 6.0]), E2M1)
    tensor([ 0,  1, 10,  7], dtype=torch.uint8)
    """
    magnitude = values.abs()
    # Subnormals are multiples of the least value, and their codes are the factors.
    subnormal = (magnitude * 2.0 ** (format.mantissa_bits - format.emin)).to(
        torch.int32
    )
    bits = magnitude.view(torch.int32) >> 23 - format.mantissa_bits
    # Both formats have the exponent above the mantissa: one subtraction changes its bias.
    normal = bits - (127 - format.bias << format.mantissa_bits)
    code = torch.where(magnitude < 2.0**format.emin, subnormal, normal)
    # A negative zero gets the code of zero.
    sign = (values < 0).to(torch.int32) << (format.exponent_bits + format.mantissa_bits)
    return (code + sign).to(torch.uint8)


@cache
def value_table(format: MiniFloat) -> torch.Tensor:
    """Return the value of every bit pattern of a format."""
    fields = format.exponent_bits + format.mantissa_bits
    code = torch.arange(1 << fields, dtype=torch.int32)
    exponent = (
        (code >> format.mantissa_bits).clamp(min=1) - format.bias - format.mantissa_bits
    )
    # Exponent field 0 means the exponent of field 1, without the leading 1 (subnormals).
    hidden = (code >> format.mantissa_bits > 0).to(torch.int32) << format.mantissa_bits
    # Values of the positive half, by code; the sign is the highest bit of a code.
    mantissa = (code & (1 << format.mantissa_bits) - 1) + hidden
    values = torch.ldexp(mantissa.float(), exponent)
    return torch.cat([values, -values])


def _values_of(codes: torch.Tensor, format: MiniFloat) -> torch.Tensor:
    return value_table(format).to(codes.device)[codes.long()]


def _times_power(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return x * 2^exponent, where 2^exponent alone may exceed the range of float32."""
    # 2^-149 to 2^127 and beyond: neither factor of the two over- or underflows.
    half = exponent // 2
    return x * torch.exp2(half.float()) * torch.exp2((exponent - half).float())


def global_scale_for(greatest: torch.Tensor) -> torch.Tensor:
    """Return NVFP4's global scale for a tensor with this greatest magnitude.

    The block of that magnitude gets the greatest E4M3 value as its scale.
    """
    whole = greatest.float() / (E2M1.largest * E4M3.largest)
    return torch.where(whole > 0, whole, torch.ones_like(whole))


def _two_levels(x: torch.Tensor, whole: torch.Tensor | None) -> Shared:
    greatest = x.abs().amax(-1)
    if whole is None:
        whole = global_scale_for(
            greatest.max() if greatest.numel() else greatest.new_zeros(()),
        )
    whole = whole.float()
    # Clamped, as older releases of torch convert values above 448 to NaN.
    scale = (
        (greatest / (E2M1.largest * whole))
        .clamp(max=E4M3.largest)
        .to(torch.float8_e4m3fn)
    )
    # A block may be so small, compared with the tensor, that its E4M3 scale is 0.
    scale = torch.where(scale.float() > 0, scale.float(), torch.ones_like(greatest))
    elements = round_to(x / (scale * whole)[..., None], E2M1)
    return Shared(code_of(elements, E2M1), scale.to(torch.float8_e4m3fn), whole)


def scale_values(scale: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return stored block scales as float32 values.

    Scales of NVFP4 are relative to the global scale.
    """
    if isinstance(dtype, FloatScaled):
        return _values_of(scale, E5M3)
    if isinstance(dtype, TwoLevel):
        return scale.float()
    return torch.exp2(scale.float() - BIAS)


def scale_codes(values: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return scales in their stored form, the inverse of ``scale_values``.

    Args:
        values: float32 values that the stored format represents exactly.
        dtype: number format of the blocks.
    """
    if isinstance(dtype, FloatScaled):
        return code_of(values, E5M3)
    if isinstance(dtype, TwoLevel):
        return values.to(torch.float8_e4m3fn)
    return (torch.log2(values) + BIAS).to(torch.uint8)


def round_scale(values: torch.Tensor, element: MiniFloat) -> torch.Tensor:
    """Round scales to a small float; the result is never 0."""
    return round_to(values.clone(), element).clamp(
        min=2.0 ** (element.emin - element.mantissa_bits),
    )


def _float_scales(x: torch.Tensor) -> Shared:
    """Encode AMD's FP4: a block's greatest magnitude maps to the greatest FP4 value."""
    scale = round_scale(x.abs().amax(-1) / E2M1.largest, E5M3)
    # E5M3 is unsigned: a scale is a magnitude, and keeps all of its 8 bits for it.
    elements = round_to(x / scale[..., None], E2M1)
    return Shared(code_of(elements, E2M1), code_of(scale, E5M3))


def _bfp(x: torch.Tensor, dtype: Any) -> Any:
    """Return BFP16, MX4, MX6 or MX9 values, as BFPQuantizeDequantize computes them."""
    assert isinstance(dtype, Block)
    attributes = dict(dtype.attributes)
    bits = attributes["bit_width"] - EXPONENT_AND_SIGN
    exponent = _exponent(x)
    if attributes["bfp_method"] == "to_bfp":
        return _rounded(x, exponent - bits + 1, bits)
    # MX4, MX6 and MX9 flush subnormal inputs, as the vendor's operator does; BFP16 does not.
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


def _rounded(x: torch.Tensor, step: Any, bits: int) -> torch.Tensor:
    codes = torch.round(_times_power(x, -step)).clamp(1 - (1 << bits), (1 << bits) - 1)
    return _times_power(codes, step) + 0.0  # a negative zero becomes a positive one


def _exponent(groups: torch.Tensor) -> torch.Tensor:
    """Return floor(log2) of the greatest magnitude along the last axis (kept), at least -127."""
    greatest = groups.abs().amax(-1, keepdim=True)
    # frexp instead of log2, which may round up to the next integer just below a power of two.
    exponent = torch.frexp(greatest)[1] - 1
    return torch.where(greatest > 0, exponent, torch.full_like(exponent, -BIAS)).clamp(
        min=-BIAS,
    )
