"""MXQuantizeDequantize as an ONNX function: the microscaling formats MXFP8, MXFP6, MXFP4 and MXINT8.

Computes what ``quark_onnx.kernels.blockfloat`` does, bit for bit, with operators of opset 17 that are the same up to
opset 28.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onnx import FunctionProto, NodeProto

from quark_onnx.functions.blocks import doubled_power, from_rows, passing_on, step, to_rows, to_steps
from quark_onnx.functions.body import Body, Settings, Value, dispatch, distinct, function, settings
from quark_onnx.kernels.blockfloat import ELEMENTS
from quark_onnx.kernels.minifloat import MiniFloat

NAME = "MXQuantizeDequantize"

#: The attributes, as nodes that leave them out have them.
DEFAULTS: Settings = {"element_dtype": "int8", "axis": 1, "block_size": 32, "rounding_mode": 0}

_ALLOWED: dict[str, Collection[Value]] = {
    "element_dtype": (*ELEMENTS, "int8"),
    "block_size": range(1, 1 << 16),
    "rounding_mode": range(3),
}

#: Fractional bits of the element type int8.
_FRACTION = 6


def definitions(nodes: Iterable[NodeProto], opset: int) -> list[FunctionProto]:
    """One function for all MXQuantizeDequantize nodes of a model.

    The function holds a variant for each combination of attributes that occurs, and no other; the axis is free. It
    takes float32 of any shape of rank 1 or more, static or dynamic. The model needs opset 17 or later, IR version 8 or
    later and an import of the vendor's domain.

    Args:
        nodes: the model's nodes; those of other operators are passed over.
        opset: of the default domain, as the model imports it.

    Returns:
        One function, or none without such nodes.

    Raises:
        ModelError: an attribute has a value that cannot be computed, or the opset is too old or too new.

    >>> from onnx import helper
    >>> node = helper.make_node(NAME, ["x"], ["y"], domain="com.amd.quark", element_dtype="fp4_e2m1")
    >>> [function.name for function in definitions([node], 17)]
    ['MXQuantizeDequantize']
    """
    found = [settings(node, DEFAULTS, _ALLOWED) for node in nodes if node.op_type == NAME]
    if not found:
        return []
    body = Body()
    dispatch(body, distinct(found, ("element_dtype", "block_size", "rounding_mode")), _variant)
    return [function(NAME, ["x"], body, DEFAULTS, opset)]


def _variant(body: Body, variant: Settings) -> str:
    size = int(variant["block_size"])

    def core(inner: Body, values: str, top: str) -> str:
        power = doubled_power(inner, top)
        if variant["element_dtype"] == "int8":
            steps = step(inner, power, -_FRACTION)
            return to_steps(inner, values, steps, (-128, 127), int(variant["rounding_mode"]))
        format = ELEMENTS[str(variant["element_dtype"])]
        scale = step(inner, power, -format.emax)
        return inner.op("Mul", to_minifloat(inner, inner.op("Div", values, scale), format), scale)

    rows = to_rows(body, "x", size)
    return from_rows(body, passing_on(body, rows.values, size, core), rows, size)


def to_minifloat(body: Body, v: str, format: MiniFloat) -> str:
    """Values of less than 2^(emax + 1) rounded half to even, and saturated; zeros are positive.

    With c = (2^s - 1) |v|, c - (c - v) is v rounded to 24 - s bits, after Dekker and Veltkamp; for each s that occurs
    here this has been tried for all mantissas and both signs, ties included. Subnormals all have the c that the least
    normal numbers have, or a little more, and so the same step.
    """
    bits = 23 - format.mantissa_bits
    subnormal = body.constant(1.5 * 2.0 ** (bits + format.emin))
    far = body.op("Max", body.op("Mul", body.op("Abs", v), body.constant(2**bits - 1)), subnormal)
    rounded = body.op("Sub", far, body.op("Sub", far, v))
    return body.op("Clip", rounded, body.constant(-format.largest), body.constant(format.largest))
