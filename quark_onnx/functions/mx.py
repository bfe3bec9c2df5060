"""MXQuantizeDequantize as an ONNX function: the microscaling formats MXFP8, MXFP6, MXFP4 and
MXINT8.

Computes what ``quark_onnx.kernels.blockfloat`` does, bit for bit, with operators of opset 17 that
are the same up to opset 28. In the vendor's domain the shared exponent is that of the
specification, rounded down, as the vendor's operator has it. An operator of the same name in the
project's own domain has the rule as an attribute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from onnx import FunctionProto, NodeProto, TensorProto

from quark_onnx.functions import float4
from quark_onnx.functions.blocks import (
    doubled_power,
    from_rows,
    passing_on,
    step,
    to_rows,
    to_steps,
)
from quark_onnx.functions.body import (
    DOMAIN,
    Body,
    Settings,
    Value,
    dispatch,
    distinct,
    function,
    settings,
)
from quark_onnx.kernels.blockfloat import E8M0, ELEMENTS, EXPONENTS, FRACTION, threshold
from quark_onnx.kernels.minifloat import HALF_EVEN, MiniFloat

NAME = "MXQuantizeDequantize"

#: Where the operator with a rule of its own lives.
OWN = float4.DOMAIN

#: The attributes, as nodes that leave them out have them.
DEFAULTS: Settings = {
    "element_dtype": "int8",
    "axis": 1,
    "block_size": 32,
    "rounding_mode": 0,
}
#: Those of the operator with a rule.
_OWN_DEFAULTS: Settings = {**DEFAULTS, "rounding_mode": HALF_EVEN, "exponent": "even"}

_ALLOWED: dict[str, Collection[Value]] = {
    "element_dtype": (*ELEMENTS, "int8"),
    "block_size": range(1, 1 << 16),
    "rounding_mode": range(3),
    "exponent": EXPONENTS,
}


def definitions(nodes: Iterable[NodeProto], opset: int) -> list[FunctionProto]:
    """One function for all MXQuantizeDequantize nodes of a model in each of the two domains.

    A function holds a variant for each combination of attributes that occurs, and no other; the
    axis is free. It takes float32 of any shape of rank 1 or more, static or dynamic. The model
    needs opset 17 or later, IR version 8 or later and an import of the vendor's domain.

    Args:
        nodes: the model's nodes; those of other operators and domains are passed over.
        opset: of the default domain, as the model imports it.

    Returns:
        The functions; none without such nodes.

    Raises:
        ModelError: an attribute has a value that cannot be computed, or the opset is too old or too
            new.

    >>> from onnx import helper
    >>> node = helper.make_node(NAME, ["x"], ["y"], domain=DOMAIN, element_dtype="fp4_e2m1")
    >>> [function.name for function in definitions([node], 17)]
    ['MXQuantizeDequantize']
    """
    made = []
    nodes = [node for node in nodes if node.op_type == NAME]
    for domain, defaults in ((DOMAIN, DEFAULTS), (OWN, _OWN_DEFAULTS)):
        allowed = {
            name: values for name, values in _ALLOWED.items() if name in defaults
        }
        found = [
            settings(node, defaults, allowed) for node in nodes if node.domain == domain
        ]
        if found:
            body = Body()
            dispatch(body, distinct(found, allowed), _variant)
            made.append(function(NAME, ["x"], body, defaults, opset, domain=domain))
    return made


def _variant(body: Body, variant: Settings) -> str:
    size, rounding = int(variant["block_size"]), int(variant["rounding_mode"])
    element, rule = (
        ELEMENTS.get(str(variant["element_dtype"])),
        str(variant.get("exponent", "floor")),
    )

    def core(inner: Body, values: str, top: str) -> str:
        if rule != "floor":
            return in_blocks(inner, values, top, element, rule, rounding)
        power = doubled_power(inner, top)
        if element is None:
            return to_steps(
                inner,
                values,
                step(inner, power, -FRACTION),
                (-128, 127),
                rounding,
            )
        scale = step(inner, power, -element.emax)
        return inner.op(
            "Mul",
            to_minifloat(inner, inner.op("Div", values, scale), element),
            scale,
        )

    rows = to_rows(body, "x", size)
    return from_rows(body, passing_on(body, rows.values, size, core), rows, size)


def in_blocks(  # noqa: PLR0913
    body: Body,
    values: str,
    top: str,
    element: MiniFloat | None,
    rule: str,
    rounding: int = HALF_EVEN,
) -> str:
    """Return what is left of blocks, one a column, whose shared exponents E8M0 stores.

    Args:
        body: where to add nodes.
        values: finite float32 (block size, columns).
        top: their greatest magnitudes.
        element: the element type, None for int8.
        rule: how the shared exponent is chosen, see ``quark_onnx.kernels.blockfloat.threshold``.
        rounding: of int8.
    """
    power = doubled_power(body, top)
    if rule != "floor":
        share, inclusive = threshold(rule, element)
        # the exponent of a subnormal number is not raised
        bound = body.op("Mul", power, body.constant(share, np.float64))
        bound = body.op("Max", bound, body.constant(2.0**-126, np.float64))
        twice = body.op("Mul", power, body.constant(2, np.float64))
        wide = body.op("Cast", top, to=TensorProto.DOUBLE)
        raised = body.op("GreaterOrEqual" if inclusive else "Greater", wide, bound)
        power = body.op("Where", raised, twice, power)
    emax = 0 if element is None else element.emax
    scale = body.op("Mul", power, body.constant(2.0 ** (-emax - 1), np.float64))
    ends = (body.constant(2.0**end, np.float64) for end in (-E8M0, E8M0))
    scale = body.op("Clip", scale, *ends)
    positive = body.op("Greater", power, body.constant(0, np.float64))
    scale = body.op("Where", positive, scale, body.constant(1, np.float64))
    scale = body.op("Cast", scale, to=TensorProto.FLOAT)
    if element is None:
        steps = body.op("Mul", scale, body.constant(2.0**-FRACTION))
        return to_steps(body, values, steps, (-128, 127), rounding)
    return body.op(
        "Mul",
        to_minifloat(body, body.op("Div", values, scale), element),
        scale,
    )


def to_minifloat(body: Body, v: str, format: MiniFloat) -> str:
    """Values of less than 2^(emax + 1) rounded half to even, and saturated; zeros are positive.

    With c = (2^s - 1) |v|, c - (c - v) is v rounded to 24 - s bits, after Dekker and Veltkamp; for each s that occurs
    here this has been tried for all mantissas and both signs, ties included. Subnormals all have the c that the least
    normal numbers have, or a little more, and so the same step.
    """  # noqa: E501
    bits = 23 - format.mantissa_bits
    subnormal = body.constant(1.5 * 2.0 ** (bits + format.emin))
    far = body.op(
        "Max",
        body.op("Mul", body.op("Abs", v), body.constant(2**bits - 1)),
        subnormal,
    )
    rounded = body.op("Sub", far, body.op("Sub", far, v))
    return body.op(
        "Clip",
        rounded,
        body.constant(-format.largest),
        body.constant(format.largest),
    )
