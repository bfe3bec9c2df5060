"""Count the operations of a node, where shapes are known."""

from __future__ import annotations

from math import prod

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node

_MOVES = frozenset(
    {
        "Reshape",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Identity",
        "Shape",
        "Size",
        "Constant",
        "Cast",
        "Concat",
        "Slice",
        "Split",
        "Gather",
    },
)


def operations(graph: Graph, node: Node) -> int:
    """Return the number of operations of a node.

    Two per product of a Conv, Gemm or MatMul, one per element of the results of other operators,
    none
    for moves of data. Unknown dimensions count as 1.

    >>> from onnx import parser
    >>> text = 'g (float[2,8] x) => (float[2,4] y) <float[8,4] w> { y = MatMul (x, w) }'
    >>> graph = Graph.of(parser.parse_model('<ir_version: 9, opset_import: ["": 17]>' + text))
    >>> operations(graph, graph.nodes[0])
    128
    """
    if node.kind in _MOVES or not node.outputs:
        return 0
    results = _size(graph, node.outputs[0])
    if node.kind in ("Conv", "Gemm", "MatMul", "ConvTranspose"):
        return 2 * _products(graph, node, results)
    if "Pool" in node.kind or node.kind.startswith("Reduce"):
        if "Global" in node.kind or "Reduce" in node.kind:
            return _size(graph, node.inputs[0])
        return _window(node, results)
    return results


def _products(graph: Graph, node: Node, results: int) -> int:
    if node.kind == "Conv":
        return results * prod(_sizes(graph, node.input(1))[1:])
    if node.kind == "ConvTranspose":
        return _size(graph, node.inputs[0]) * prod(_sizes(graph, node.input(1))[1:])
    inputs = _sizes(graph, node.inputs[0]) or [1]
    if node.kind == "Gemm" and node.attribute("transA", 0):
        return results * inputs[0]
    return results * inputs[-1]


def _window(node: Node, results: int) -> int:
    return results * int(prod(node.attribute("kernel_shape", [1])))


def _size(graph: Graph, tensor: str) -> int:
    return prod(_sizes(graph, tensor))


def _sizes(graph: Graph, tensor: str) -> list[int]:
    """Return the dimensions of a tensor, 1 for an unknown one; empty for an unknown shape."""
    shape = graph.sizes(tensor)
    return [size if isinstance(size, int) else 1 for size in shape]
