"""Define ExtendedQuantizeLinear and ExtendedDequantizeLinear as ONNX functions.

Follows the ONNX operators QuantizeLinear and DequantizeLinear, which they extend to more types:
32-bit codes saturate(round-half-even(x / scale) + zero_point), and x / scale + zero_point as
float16, clipped to its range, or as bfloat16. The operators are those of opset 17, unchanged up to
opset 27.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike
from onnx import FunctionProto, NodeProto, TensorProto, helper

from quark_onnx.common.errors import ModelError
from quark_onnx.functions.body import (
    BodyBuilder,
    Ref,
    Settings,
    along,
    function,
    settings,
    where,
)
from quark_onnx.kernels.minifloat import FP16

QUANTIZE = "ExtendedQuantizeLinear"
DEQUANTIZE = "ExtendedDequantizeLinear"

#: Default values of the attributes.
DEFAULTS: Settings = {"axis": 1}

_BYTES = frozenset({TensorProto.INT8, TensorProto.UINT8})
_WORDS = frozenset({TensorProto.INT16, TensorProto.UINT16})
_LONGS = frozenset({TensorProto.INT32, TensorProto.UINT32})
_INTEGERS = _BYTES | _WORDS | _LONGS
_FLOATS = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})

#: A value whose cast to the types gives a different result for each.
_PROBE = 0xC0C0C0C0
_PROBED_BFLOAT16 = float(0xC1000000)


def definitions(
    nodes: Iterable[NodeProto], opset: int, element_types: Mapping[str, int]
) -> list[FunctionProto]:
    """Return the functions for ExtendedQuantizeLinear and ExtendedDequantizeLinear.

    They take any shape, static or dynamic, and a scalar scale or a vector along the axis. The model
    needs opset 17 or later, IR version 8 or later and an import of the vendor's domain. The types
    of the zero points in the model decide the bodies: if possible, the standard operator alone,
    which runtimes can fuse; if a body has to serve different types, it detects them by casting a
    probe to the type of the zero point.

    Args:
        nodes: the model's nodes; other operators are ignored.
        opset: version of the default domain.
        element_types: ``TensorProto.DataType`` of each zero point, by tensor name.

    Returns:
        At most two functions.

    Raises:
        ModelError: a node has no zero point, one of unknown or unsupported type, or an unknown
            attribute; or the opset is not supported.

    >>> node = helper.make_node(QUANTIZE, ["x", "scale", "zero"], ["y"], domain="com.amd.quark")
    >>> definitions([node], 17, {"zero": TensorProto.INT8})[0].node[0].op_type
    'QuantizeLinear'
    """
    functions = []
    nodes = list(nodes)
    for name, build in ((QUANTIZE, _quantize), (DEQUANTIZE, _dequantize)):
        # Ordered: the order of the types is that of the branches in the body.
        types = dict.fromkeys(
            _type(node, element_types) for node in nodes if node.op_type == name
        )
        if types:
            body = BodyBuilder()
            build(body, list(types), opset)
            functions.append(
                function(name, ["x", "scale", "zero"], body, DEFAULTS, opset)
            )
    return functions


def _type(node: NodeProto, element_types: Mapping[str, int]) -> int:
    # Only for the check of the attributes.
    settings(node, DEFAULTS)
    if len(node.input) != 3 or not node.input[2]:
        raise ModelError(
            f"{where(node)}: no zero point; the vendor's operator requires one"
        )
    if node.input[2] not in element_types:
        raise ModelError(
            f"{where(node)}: the type of its zero point {node.input[2]!r} is not known"
        )
    zero_type = element_types[node.input[2]]
    if zero_type not in _INTEGERS | _FLOATS:
        raise ModelError(
            f"{where(node)}: its zero point {node.input[2]!r} is"
            f" {TensorProto.DataType.Name(zero_type)}; it can be an integer of 8, 16 or 32"
            " bits, FLOAT16 or BFLOAT16"
        )
    return zero_type


def _standard(opset: int) -> frozenset[int]:
    """Return the types that QuantizeLinear treats alike in an opset."""
    if opset >= 21:
        return _BYTES | _WORDS
    return _BYTES


def _quantize(body: BodyBuilder, types: Sequence[int], opset: int) -> None:
    if _standard(opset).issuperset(types):
        body.op("QuantizeLinear", "x", "scale", "zero", axis=Ref("axis"))
    elif len(types) == 1:
        body.op("Cast", _quantize_to(body, types[0]), to=types[0])
    else:
        # A function body cannot ask for a type: what a cast makes of the probe tells it.
        probe = body.op("CastLike", body.constant(_PROBE, np.int64), "zero")
        cast_probe = body.op("Cast", probe, to=TensorProto.DOUBLE)
        body.op("CastLike", _quantize_mixed(body, cast_probe, types), "zero")


def _quantize_mixed(body: BodyBuilder, cast_probe: str, types: Sequence[int]) -> str:
    """Return the result as float64, by what the cast to the type has made of the probe."""
    type_, *others = types

    def build(inner: BodyBuilder) -> str:
        return inner.op("Cast", _quantize_to(inner, type_), to=TensorProto.DOUBLE)

    if not others:
        return build(body)
    condition = body.op("Equal", cast_probe, body.constant(_probed(type_), np.float64))
    return body.choose(
        condition,
        build,
        lambda inner: _quantize_mixed(inner, cast_probe, others),
        TensorProto.DOUBLE,
    )


def _probed(type_: int) -> float:
    if type_ == TensorProto.BFLOAT16:
        return _PROBED_BFLOAT16
    if type_ == TensorProto.FLOAT16:
        return float("inf")
    # Integer casts wrap around, each type in its own way.
    return float(np.int64(_PROBE).astype(helper.tensor_dtype_to_np_dtype(type_)))


def _quantize_to(body: BodyBuilder, type_: int) -> str:
    """Return the value to cast to a type: in float64 if float32 is too narrow, else in float32."""
    # ONNX, QuantizeLinear: saturate(round(x / scale) + zero_point).
    scaled = body.op("Div", "x", along(body, "scale"))
    if type_ in _FLOATS:
        shifted = _same_shape(
            body,
            body.op(
                "Add",
                scaled,
                along(body, body.op("Cast", "zero", to=TensorProto.FLOAT)),
            ),
        )
        if type_ == TensorProto.BFLOAT16:
            return shifted
        # The vendor's operator saturates; a Cast would write infinities.
        return body.op(
            "Clip", shifted, body.constant(-FP16.largest), body.constant(FP16.largest)
        )
    wide, kind = _arithmetic([type_])
    steps = body.op("Round", scaled)
    # float32 holds integers exactly up to 2^24 only; codes of 32 bits need float64.
    if type_ in _LONGS:
        steps = body.op("Cast", steps, to=wide)
    codes = _same_shape(
        body, body.op("Add", steps, along(body, body.op("Cast", "zero", to=wide)))
    )
    limits = np.iinfo(helper.tensor_dtype_to_np_dtype(type_))
    return body.op(
        "Clip", codes, body.constant(limits.min, kind), body.constant(limits.max, kind)
    )


def _dequantize(body: BodyBuilder, types: Sequence[int], opset: int) -> None:
    if _standard(opset).issuperset(types):
        body.op("DequantizeLinear", "x", "scale", "zero", axis=Ref("axis"))
        return
    wide, _ = _arithmetic(types)
    zero = along(body, body.op("Cast", "zero", to=wide))
    steps = body.op("Sub", body.op("Cast", "x", to=wide), zero)
    # The scale is float32, and so is the product.
    if wide != TensorProto.FLOAT:
        steps = body.op("Cast", steps, to=TensorProto.FLOAT)
    _same_shape(body, body.op("Mul", steps, along(body, "scale")))


def _arithmetic(types: Iterable[int]) -> tuple[int, DTypeLike]:
    """Return the type in which sums and differences of codes are exact."""
    if _LONGS.isdisjoint(types):
        return TensorProto.FLOAT, np.float32
    return TensorProto.DOUBLE, np.float64


def _same_shape(body: BodyBuilder, result: str) -> str:
    """Restore the shape of a scalar, which became a vector of one element."""
    return body.op("Reshape", result, body.op("Shape", "x"), allowzero=1)
