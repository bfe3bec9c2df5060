"""Pairs of FLOAT4E2M1 as ONNX functions.

onnxruntime 1.31 can store the type and has no operator for it on a CPU: neither QuantizeLinear nor
Cast. So the codes, the bit patterns of OCP Microscaling Formats 1.0 (sign, two bits of exponent,
one of mantissa), are stored as uint4, and a pair of functions reads and writes them.
``as_standard`` makes ONNX's own pairs of them (opset 23), for runtimes that have the type: the
bytes are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from quark_onnx.functions.body import Body, Settings, along, function, settings

#: Where these operators live.
DOMAIN = "quark_onnx"
QUANTIZE, DEQUANTIZE = "Float4QuantizeLinear", "Float4DequantizeLinear"

#: The attributes, as nodes that leave them out have them.
DEFAULTS: Settings = {"axis": 1}
#: What the codes 0 to 7 stand for; 8 to 15 are their negatives.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def definitions(nodes: Iterable[NodeProto], opset: int) -> list[FunctionProto]:
    """The functions that the nodes of a model need.

    They take one scale, or a vector of scales for the axis.

    Raises:
        ModelError: a node has an unknown attribute; or the opset is too old or too new.
    """
    made = []
    nodes = [node for node in nodes if node.domain == DOMAIN]
    for name, build in ((QUANTIZE, _quantize), (DEQUANTIZE, _dequantize)):
        own = [settings(node, DEFAULTS) for node in nodes if node.op_type == name]
        if own:
            body = Body()
            build(body)
            made.append(
                function(name, ["x", "scale"], body, DEFAULTS, opset, domain=DOMAIN),
            )
    return made


def _quantize(body: Body) -> None:
    """The number of magnitudes that are passed: of two neighbours, a tie goes to the one with an
    even code.
    """
    scaled = body.op("Div", "x", along(body, "scale"))
    magnitude, code = body.op("Abs", scaled), ""
    for place, (low, high) in enumerate(pairwise(MAGNITUDES)):
        compare = "GreaterOrEqual" if place % 2 else "Greater"
        passed = body.op(compare, magnitude, body.constant((low + high) / 2))
        step = body.op("Cast", passed, to=TensorProto.INT32)
        code = body.op("Add", code, step) if code else step
    negative = body.op(
        "Cast",
        body.op("Less", scaled, body.constant(0)),
        to=TensorProto.INT32,
    )
    signed = body.op("Add", code, body.op("Mul", negative, body.constant(8, np.int32)))
    body.op(
        "Cast",
        body.op("Reshape", signed, body.op("Shape", "x"), allowzero=1),
        to=TensorProto.UINT4,
    )


def _dequantize(body: Body) -> None:
    values = body.constant([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    codes = body.op("Cast", "x", to=TensorProto.INT32)  # uint4 has no shape, either
    product = body.op(
        "Mul",
        body.op("Gather", values, codes),
        along(body, "scale", codes),
    )
    body.op("Reshape", product, body.op("Shape", codes), allowzero=1)


def as_standard(model: ModelProto) -> None:
    """Let ONNX's own operators and type take the place of these, in place."""
    graphs, todo, codes = list[GraphProto](), [model.graph], set[str]()
    while todo:
        graph = todo.pop()
        graphs.append(graph)
        for node in graph.node:
            todo += [
                inner
                for attribute in node.attribute
                for inner in (attribute.g, *attribute.graphs)
                if inner.node
            ]
            if node.domain == DOMAIN:
                codes.add(_made_standard(node))
    for graph in graphs:
        for tensor in graph.initializer:
            if tensor.name in codes:
                tensor.data_type = TensorProto.FLOAT4E2M1
        for value in graph.value_info:
            if value.name in codes:
                value.type.tensor_type.elem_type = TensorProto.FLOAT4E2M1
    kept = [entry for entry in model.opset_import if entry.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _made_standard(node: NodeProto) -> str:
    """Change one node; the name of the codes that it reads or writes."""
    node.domain, node.op_type = "", node.op_type.removeprefix("Float4")
    if node.op_type == "DequantizeLinear":
        return node.input[0]
    # there is no zero point that would tell
    node.attribute.append(
        helper.make_attribute("output_dtype", int(TensorProto.FLOAT4E2M1)),
    )
    return node.output[0]
