"""Functions of standard ONNX operators for rounding without an ONNX operator.

Each function equals ``quark_onnx.torch.formats.quantized_tensor.fake_quantize`` bit for bit on
finite float32. Scales of integers and FP8 are computed in float64, block scales by the rules of
``quark_onnx.torch.formats.block_formats``.
"""

from __future__ import annotations

import re

import numpy as np
from onnx import FunctionProto, TensorProto

from calibrators.grid import SMALLEST_SCALE
from quark_onnx.dtypes import Integer
from quark_onnx.functions import mx
from quark_onnx.functions.blocks import from_rows, passing_on, to_rows
from quark_onnx.functions.body import BodyBuilder, function
from quark_onnx.functions.mx import to_minifloat
from quark_onnx.kernels.minifloat import E2M1, E4M3
from quark_onnx.torch.config.number_formats import (
    E5M3,
    FloatScaled,
    TwoLevel,
    element_of,
)
from quark_onnx.torch.config.spec import TensorSpec

#: The domain of the functions.
DOMAIN = "quark_onnx"
_AXIS = {"axis": -1}
#: Types of the codes of FP8.
_FLOAT8 = {
    "fp8e4m3": TensorProto.FLOAT8E4M3FN,
    "fp8e5m2": TensorProto.FLOAT8E5M2,
}


def name_of(spec: TensorSpec) -> str:
    """Return the name of the function of a spec.

    >>> name_of(TensorSpec("int8", per_channel=True, dynamic=True))
    'Round_int8_symmetric_per_channel_dynamic_model_scales_even'
    """
    return re.sub(r"\W+", "_", f"Round {spec} {spec.exponent}")


def inputs_of(spec: TensorSpec) -> list[str]:
    """Return the input names of a spec's function: x and the static parameters."""
    if not spec.measured:
        return ["x"]
    if isinstance(spec.dtype, TwoLevel):
        return ["x", "whole"]
    return ["x", "scale", "zero"]


def rounding(spec: TensorSpec, opset: int) -> FunctionProto:
    """Build the function that rounds float32 of rank 1 or more as a spec says."""
    body = BodyBuilder()
    if isinstance(spec.dtype, TwoLevel):
        # (block size, blocks).
        rows = to_rows(body, "x", spec.group)
        from_rows(
            body,
            _two_levels(body, rows.values, measured=spec.measured),
            rows,
            spec.group,
        )
    elif isinstance(spec.dtype, FloatScaled):
        rows = to_rows(body, "x", spec.group)
        from_rows(body, _float_scales(body, rows.values), rows, spec.group)
    elif spec.measured:
        # One calibrated scale for all values.
        _affine(body, "x", "scale", "zero", spec)
    elif spec.dtype.scaled and spec.group:
        rows = to_rows(body, "x", spec.group)
        from_rows(body, _dynamic(body, rows.values, [0], spec), rows, spec.group)
    elif spec.dtype.scaled:
        _dynamic(body, "x", [-1] if spec.per_channel else [], spec)
    else:
        rows = to_rows(body, "x", spec.group)
        element = element_of(spec.dtype)
        values = passing_on(
            body,
            rows.values,
            spec.group,
            lambda inner, x, top: mx.in_blocks(inner, x, top, element, spec.exponent),
        )
        from_rows(body, values, rows, spec.group)
    return function(name_of(spec), inputs_of(spec), body, _AXIS, opset, domain=DOMAIN)


def _affine(body: BodyBuilder, x: str, scale: str, zero: str, spec: TensorSpec) -> str:
    """Quantize and dequantize x with a scale; ``zero`` is empty if it is 0."""
    # A division, since a product with the reciprocal may round to another code.
    steps, grid = body.op("Div", x, scale), spec.grid
    ends = body.constant(grid.qmin), body.constant(grid.qmax)
    if not isinstance(spec.dtype, Integer):
        kind = _FLOAT8[spec.dtype.name]
        # As in torch, values are clipped before the cast.
        codes = body.op("Cast", body.op("Clip", steps, *ends), to=kind)
        return body.op("Mul", body.op("Cast", codes, to=TensorProto.FLOAT), scale)
    # ONNX rounds half to even.
    steps = body.op("Round", steps)
    if zero:
        steps = body.op("Add", steps, zero)
    codes = body.op("Clip", steps, *ends)
    if zero:
        codes = body.op("Sub", codes, zero)
    return body.op("Mul", codes, scale)


def _dynamic(body: BodyBuilder, x: str, axes: list[int], spec: TensorSpec) -> str:
    """Quantize x with min-max scales over given axes, or over the full tensor."""
    grid, over = spec.grid, list[str]()
    if axes:
        over.append(body.ints(*axes))
    none = body.constant(0)
    # In float64 like ``calibrators.affine``, so that scales are rounded once; ranges include 0.
    lo = _double(body, body.op("Min", body.op("ReduceMin", x, *over), none))
    hi = _double(body, body.op("Max", body.op("ReduceMax", x, *over), none))

    def divided(value: str, by: float) -> str:
        return body.op("Div", value, body.constant(by, np.float64))

    if not grid.symmetric:
        scale = divided(body.op("Sub", hi, lo), grid.levels)
    # All codes share the range: ``levels`` steps and no step for the zero point.
    elif grid.even:
        scale = divided(body.op("Max", hi, body.op("Neg", lo)), grid.levels / 2)
    # Both sides have to be covered: the least code may reach further than the greatest.
    elif grid.qmin < grid.zero:
        scale = body.op(
            "Max",
            divided(hi, grid.qmax - grid.zero),
            divided(lo, grid.qmin - grid.zero),
        )
    else:
        scale = divided(hi, grid.qmax)
    # A range of zeros has the scale 1.
    positive = body.op("Greater", scale, body.constant(0, np.float64))
    least, greatest = SMALLEST_SCALE, float(np.finfo(np.float32).max)
    scale = body.op(
        "Clip",
        scale,
        body.constant(least, np.float64),
        body.constant(greatest, np.float64),
    )
    scale = body.op("Where", positive, scale, body.constant(1, np.float64))
    scale = body.op("Cast", scale, to=TensorProto.FLOAT)
    return _affine(body, x, scale, _zero(body, lo, scale, spec), spec)


def _zero(body: BodyBuilder, lo: str, scale: str, spec: TensorSpec) -> str:
    """Return the zero points; empty if they are 0."""
    grid = spec.grid
    if grid.symmetric and not grid.zero:
        return ""
    if grid.symmetric:
        return body.constant(grid.zero)
    # With the scale as it was rounded to float32.
    steps = body.op("Round", body.op("Div", lo, _double(body, scale)))
    zero = body.op("Sub", body.constant(grid.qmin, np.float64), steps)
    zero = body.op(
        "Clip",
        zero,
        body.constant(grid.qmin, np.float64),
        body.constant(grid.qmax, np.float64),
    )
    return body.op("Cast", zero, to=TensorProto.FLOAT)


def _double(body: BodyBuilder, x: str) -> str:
    return body.op("Cast", x, to=TensorProto.DOUBLE)


def _two_levels(body: BodyBuilder, values: str, *, measured: bool) -> str:
    """Quantize NVFP4 blocks, one per column.

    The global scale is an input, or computed from the tensor's maximum magnitude.
    """
    # (1, blocks).
    top = body.op("ReduceMax", body.op("Abs", values), body.ints(0))
    one, none = body.constant(1), body.constant(0)
    global_scale = "whole"
    if not measured:
        global_scale = body.op(
            # The maximum magnitude of the whole tensor.
            "Div",
            body.op("ReduceMax", top),
            body.constant(E2M1.largest * E4M3.largest),
        )
        is_positive = body.op("Greater", global_scale, none)
        global_scale = body.op("Where", is_positive, global_scale, one)
    scale = body.op(
        "Div", top, body.op("Mul", global_scale, body.constant(E2M1.largest))
    )
    # E4M3 ends at 448; a block beyond the calibrated maximum has a greater ratio.
    scale = body.op("Min", scale, body.constant(E4M3.largest))
    scale = body.op(
        "Cast",
        body.op("Cast", scale, to=TensorProto.FLOAT8E4M3FN),
        to=TensorProto.FLOAT,
    )
    scale = body.op(
        "Mul",
        # A block may be so small, compared with the tensor, that its E4M3 scale is 0.
        body.op("Where", body.op("Greater", scale, none), scale, one),
        global_scale,
    )
    return _fp4(body, values, scale)


def _float_scales(body: BodyBuilder, values: str) -> str:
    """Quantize blocks of AMD's FP4, one per column, with E5M3 scales."""
    top = body.op("ReduceMax", body.op("Abs", values), body.ints(0))
    scale = body.op(
        "Min",
        body.op("Div", top, body.constant(E2M1.largest)),
        body.constant(E5M3.largest),
    )
    scale = to_minifloat(body, scale, E5M3)
    # At least the smallest E5M3 number: blocks of zeros divide by it.
    scale = body.op(
        "Max",
        scale,
        body.constant(2.0 ** (E5M3.emin - E5M3.mantissa_bits)),
    )
    return _fp4(body, values, scale)


def _fp4(body: BodyBuilder, values: str, scale: str) -> str:
    """Round values to FP4 (E2M1) by the scales of their blocks."""
    ends = body.constant(-E2M1.largest), body.constant(E2M1.largest)
    elements = to_minifloat(
        body,
        body.op("Clip", body.op("Div", values, scale), *ends),
        E2M1,
    )
    return body.op("Mul", elements, scale)
