"""Define Q/DQ pairs of FLOAT4E2M1 as ONNX functions.

onnxruntime 1.31 can store the type but has no CPU operator for it: neither QuantizeLinear nor Cast.
So the codes, the bit patterns of OCP Microscaling Formats 1.0 (sign, two exponent bits, one
mantissa bit), are stored as uint4, and a pair of functions reads and writes them. ``as_standard``
converts them to ONNX's own pairs (opset 23), for runtimes with the type: the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from quark_onnx.functions.body import BodyBuilder, Settings, along, function, settings

#: Domain of the operators.
DOMAIN = "quark_onnx"
QUANTIZE = "Float4QuantizeLinear"
DEQUANTIZE = "Float4DequantizeLinear"

#: Default values of the attributes.
DEFAULTS: Settings = {"axis": 1}
#: Values of the codes 0 to 7; 8 to 15 are their negatives.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def definitions(nodes: Iterable[NodeProto], opset: int) -> list[FunctionProto]:
    """Return the functions that the nodes of a model need.

    They take a scalar scale, or a vector along the axis.

    Raises:
        ModelError: a node has an unknown attribute; or the opset is not supported.
    """
    functions = []
    nodes = [node for node in nodes if node.domain == DOMAIN]
    for name, build in ((QUANTIZE, _quantize), (DEQUANTIZE, _dequantize)):
        node_settings = [
            settings(node, DEFAULTS) for node in nodes if node.op_type == name
        ]
        if node_settings:
            body = BodyBuilder()
            build(body)
            functions.append(
                function(name, ["x", "scale"], body, DEFAULTS, opset, domain=DOMAIN)
            )
    return functions


def _quantize(body: BodyBuilder) -> None:
    """Count the midpoints below the magnitude: of two neighbours, a tie rounds to the even code."""
    scaled = body.op("Div", "x", along(body, "scale"))
    magnitude = body.op("Abs", scaled)
    code = ""
    for index, (low, high) in enumerate(pairwise(MAGNITUDES)):
        # A tie between codes 2k and 2k + 1 stays at the even 2k, one before 2k + 2 rises.
        compare = "GreaterOrEqual" if index % 2 else "Greater"
        passed = body.op(compare, magnitude, body.constant((low + high) / 2))
        step = body.op("Cast", passed, to=TensorProto.INT32)
        code = body.op("Add", code, step) if code else step
    negative = body.op(
        "Cast", body.op("Less", scaled, body.constant(0)), to=TensorProto.INT32
    )
    # Bit 3 is the sign.
    signed = body.op("Add", code, body.op("Mul", negative, body.constant(8, np.int32)))
    body.op(
        "Cast",
        body.op(
            # ``along`` makes a scalar x a vector of one element.
            "Reshape",
            signed,
            body.op("Shape", "x"),
            allowzero=1,
        ),
        to=TensorProto.UINT4,
    )


def _dequantize(body: BodyBuilder) -> None:
    values = body.constant([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    codes = body.op("Cast", "x", to=TensorProto.INT32)  # uint4 has no shape, either
    product = body.op(
        "Mul", body.op("Gather", values, codes), along(body, "scale", codes)
    )
    body.op("Reshape", product, body.op("Shape", codes), allowzero=1)


def as_standard(model: ModelProto) -> None:
    """Replace these operators by ONNX's own operators and type, in place."""
    graphs = list[GraphProto]()
    todo = [model.graph]
    codes = set[str]()
    # Bodies too, as their nodes may read codes of outer graphs.
    while todo:
        graph = todo.pop()
        graphs.append(graph)
        for node in graph.node:
            for attribute in node.attribute:
                # An unset field reads as an empty graph.
                inner_graphs = (attribute.g, *attribute.graphs)
                todo += [inner for inner in inner_graphs if inner.node]
            if node.domain == DOMAIN:
                codes.add(_made_standard(node))
    # Only after all nodes, since a body may read the codes of a graph around it.
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
    """Convert a node; return the name of the codes."""
    node.domain = ""
    node.op_type = node.op_type.removeprefix("Float4")
    if node.op_type == "DequantizeLinear":
        return node.input[0]
    # There is no zero point to imply the type.
    node.attribute.append(
        helper.make_attribute("output_dtype", int(TensorProto.FLOAT4E2M1))
    )
    return node.output[0]
