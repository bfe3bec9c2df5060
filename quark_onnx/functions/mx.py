"""Define MXQuantizeDequantize as an ONNX function: MXFP8, MXFP6, MXFP4 and MXINT8.

Computes the same as ``quark_onnx.kernels.blockfloat``, bit for bit, with operators of opset 17 that
are unchanged up to opset 28. In the vendor's domain the shared exponent is rounded down as in the
specification. An operator of the same name in the project's own domain has the rule as an
attribute.
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
    BodyBuilder,
    Settings,
    Value,
    dispatch,
    distinct,
    function,
    settings,
)
from quark_onnx.kernels.blockfloat import (
    E8M0,
    ELEMENTS,
    EXPONENTS,
    FRACTION,
    emax_of,
    threshold,
)
from quark_onnx.kernels.minifloat import HALF_EVEN, MiniFloat

NAME = "MXQuantizeDequantize"

#: Domain of the operator with a rule as attribute.
OWN = float4.DOMAIN

#: Default values of the attributes.
DEFAULTS: Settings = {
    "element_dtype": "int8",
    "axis": 1,
    "block_size": 32,
    "rounding_mode": 0,
}
#: Default values of the operator with a rule.
_OWN_DEFAULTS: Settings = {**DEFAULTS, "rounding_mode": HALF_EVEN, "exponent": "even"}

_ALLOWED: dict[str, Collection[Value]] = {
    "element_dtype": (*ELEMENTS, "int8"),
    "block_size": range(1, 1 << 16),
    "rounding_mode": range(3),
    "exponent": EXPONENTS,
}


def definitions(nodes: Iterable[NodeProto], opset: int) -> list[FunctionProto]:
    """Return a function for the MXQuantizeDequantize nodes of each domain.

    A function holds a variant for each combination of attributes in the model; the axis is free. It
    takes float32 of any shape of rank 1 or more, static or dynamic. The model needs opset 17 or
    later, IR version 8 or later and an import of the vendor's domain.

    Args:
        nodes: the model's nodes; other operators and domains are ignored.
        opset: version of the default domain.

    Returns:
        The functions; none without such nodes.

    Raises:
        ModelError: an attribute value is not supported, or the opset is not.

    >>> from onnx import helper
    >>> node = helper.make_node(NAME, ["x"], ["y"], domain=DOMAIN, element_dtype="fp4_e2m1")
    >>> [function.name for function in definitions([node], 17)]
    ['MXQuantizeDequantize']
    """
    functions = []
    nodes = [node for node in nodes if node.op_type == NAME]
    # One function per domain: the attribute ``exponent`` exists in the project's own alone.
    for domain, defaults in ((DOMAIN, DEFAULTS), (OWN, _OWN_DEFAULTS)):
        allowed = {
            name: values for name, values in _ALLOWED.items() if name in defaults
        }
        node_settings = [
            settings(node, defaults, allowed) for node in nodes if node.domain == domain
        ]
        if node_settings:
            body = BodyBuilder()
            dispatch(body, distinct(node_settings, allowed), _variant)
            functions.append(
                function(NAME, ["x"], body, defaults, opset, domain=domain)
            )
    return functions


def _variant(body: BodyBuilder, variant: Settings) -> str:
    size = int(variant["block_size"])
    rounding = int(variant["rounding_mode"])
    element = ELEMENTS.get(str(variant["element_dtype"]))
    rule = str(variant.get("exponent", "floor"))

    def core(inner: BodyBuilder, values: str, top: str) -> str:
        # The rule of the specification needs no comparison with a threshold.
        if rule != "floor":
            return in_blocks(inner, values, top, element, rule, rounding)
        power = doubled_power(inner, top)
        if element is None:
            return to_steps(
                inner, values, step(inner, power, -FRACTION), (-128, 127), rounding
            )
        # 2^(E - emax) maps the greatest magnitude into the last binade of the element type.
        scale = step(inner, power, -element.emax)
        return inner.op(
            "Mul", to_minifloat(inner, inner.op("Div", values, scale), element), scale
        )

    rows = to_rows(body, "x", size)
    return from_rows(body, passing_on(body, rows.values, size, core), rows, size)


def in_blocks(  # noqa: PLR0913  the settings of a block format
    body: BodyBuilder,
    values: str,
    top: str,
    element: MiniFloat | None,
    rule: str,
    rounding: int = HALF_EVEN,
) -> str:
    """Quantize and dequantize blocks, one per column, whose shared exponents E8M0 stores.

    Args:
        body: receives the nodes.
        values: finite float32 (block size, columns).
        top: greatest magnitudes of the columns.
        element: element type, None for int8.
        rule: choice of the shared exponent, see ``quark_onnx.kernels.blockfloat.threshold``.
        rounding: rounding mode of int8.
    """
    power = doubled_power(body, top)
    if rule != "floor":
        share, inclusive = threshold(rule, element)
        # The exponent of a subnormal number is never raised.
        # ``power`` is 2^(E + 1): the share is relative to it.
        bound = body.op("Mul", power, body.constant(share, np.float64))
        bound = body.op("Max", bound, body.constant(2.0**-126, np.float64))
        twice = body.op("Mul", power, body.constant(2, np.float64))
        wide = body.op("Cast", top, to=TensorProto.DOUBLE)
        raised = body.op("GreaterOrEqual" if inclusive else "Greater", wide, bound)
        power = body.op("Where", raised, twice, power)
    emax = emax_of(element)
    # 2^(E + 1) * 2^(-emax - 1) = 2^(E - emax).
    scale = body.op("Mul", power, body.constant(2.0 ** (-emax - 1), np.float64))
    # E8M0 stores the exponents -127 to 127.
    ends = (body.constant(2.0**end, np.float64) for end in (-E8M0, E8M0))
    scale = body.op("Clip", scale, *ends)
    # A block of zeros has no exponent: any scale but 0 will do.
    positive = body.op("Greater", power, body.constant(0, np.float64))
    scale = body.op("Where", positive, scale, body.constant(1, np.float64))
    # A power of two is exact in float32.
    scale = body.op("Cast", scale, to=TensorProto.FLOAT)
    if element is None:
        steps = body.op("Mul", scale, body.constant(2.0**-FRACTION))
        return to_steps(body, values, steps, (-128, 127), rounding)
    return body.op(
        "Mul", to_minifloat(body, body.op("Div", values, scale), element), scale
    )


def to_minifloat(body: BodyBuilder, v: str, format: MiniFloat) -> str:
    """Round values below 2^(emax + 1) half to even, and saturate; zeros are positive.

    With c = (2^s - 1) |v|, c - (c - v) is v rounded to 24 - s bits, after Dekker and Veltkamp;
    verified for each s in use with all mantissas and both signs, including ties. Subnormals have
    the c of the least normal number, or slightly more, and so the same step.
    """
    bits = 23 - format.mantissa_bits
    # c is at least 1.5 * 2^(s + emin): subnormals get the step of the least normal number.
    subnormal = body.constant(1.5 * 2.0 ** (bits + format.emin))
    far = body.op(
        "Max", body.op("Mul", body.op("Abs", v), body.constant(2**bits - 1)), subnormal
    )
    rounded = body.op("Sub", far, body.op("Sub", far, v))
    return body.op(
        "Clip", rounded, body.constant(-format.largest), body.constant(format.largest)
    )
