"""Keep a MatMul apart from the addition of its bias, where the fused model does not load.

onnxruntime makes a MatMul of a tensor with three or more axes, and the Add of a bias with one axis,
a Gemm between two Reshape nodes, and moves the DequantizeLinear of the input behind the first one.
For int8 codes from opset 21 on, 1.32 does not load the result: the fault that ``graph.moved``
describes (microsoft/onnxruntime#25526). A bias of three axes has the same sum and is not fused.
"""

from __future__ import annotations

from typing import Any

from onnx import TensorProto

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.moved import OUTPUT_DTYPE_OPSET, codes_type
from quark_onnx.graph.node import DEQUANTIZE, Node

#: Axes of a product that is fused by way of two Reshape nodes, and of a bias that prevents it.
_FEWEST_AXES = 3


def unfuse_biases(graph: Graph) -> int:
    """Give biases of products of int8 codes three axes; return the number of biases."""
    if graph.opset < OUTPUT_DTYPE_OPSET:
        return 0
    count = 0
    for product in graph.nodes_of(("MatMul",)):
        dequantize = graph.producer_of_type(product.input(0), DEQUANTIZE)
        if dequantize is None or codes_type(graph, dequantize) != TensorProto.INT8:
            continue
        # Matrices become a Gemm without a Reshape, and a wider bias would change the shape.
        if len(graph.shape(product.output(0)) or ()) < _FEWEST_AXES:
            continue
        for addition in graph.consumers(product.output(0)):
            if addition.kind == "Add":
                count += _widen_bias(graph, addition)
    return count


def _widen_bias(graph: Graph, addition: Node) -> bool:
    """Give a bias of one axis three axes; return whether the Add has such a bias."""
    for index, name in enumerate(addition.inputs):
        wide = _wide(graph, name)
        if wide:
            graph.set_input(addition, index, wide)
            return True
    return False


def _wide(graph: Graph, name: str) -> str:
    """Return the name of a bias with three axes; empty if the tensor is no bias of one axis.

    Args:
        graph: the graph, which gets the constant and, for codes, a DequantizeLinear.
    """
    if graph.is_constant(name):
        return _wide_constant(graph, name)
    dequantize = graph.producer_of_type(name, DEQUANTIZE)
    if dequantize is None or not graph.is_constant(dequantize.input(0)):
        return ""
    codes = _wide_constant(graph, dequantize.input(0))
    if not codes:
        return ""
    result = graph.fresh(f"{name}_wide")
    attributes: dict[str, Any] = {}
    # A scale per value lies along the only axis, which is the last one now.
    if len(graph.shape(dequantize.input(1)) or ()) == 1:
        attributes["axis"] = _FEWEST_AXES - 1
    graph.add(
        dequantize.op_type,
        [codes, *dequantize.inputs[1:]],
        [result],
        domain=dequantize.domain,
        **attributes,
    )
    return result


def _wide_constant(graph: Graph, name: str) -> str:
    """Return the name of a constant's values with three axes; empty for other than one axis."""
    if len(graph.initializers[name].dims) != 1:
        return ""

    def widened() -> list[str]:
        values = graph.constant(name)
        assert values is not None
        return [graph.add_constant(f"{name}_wide", values.reshape(1, 1, -1))]

    [result] = graph.once(("wide", name), widened)
    return result
