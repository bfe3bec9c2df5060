"""Count the operations of a node, where shapes are known."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node

#: Pools over all of an input, of any domain.
_GLOBAL_POOL = re.compile("Global.*Pool")
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
    none for moves of data. Unknown dimensions count as 1.

    >>> from onnx import parser
    >>> text = 'g (float[2,8] x) => (float[2,4] y) <float[8,4] w> { y = MatMul (x, w) }'
    >>> graph = Graph.of(parser.parse_model('<ir_version: 9, opset_import: ["": 17]>' + text))
    >>> operations(graph, graph.nodes[0])
    128
    """
    if node.kind in _MOVES or not node.outputs:
        return 0
    results = count_values(graph, node.outputs[0])
    if node.kind in _PRODUCTS:
        return 2 * _PRODUCTS[node.kind](graph, node, results)
    if node.kind.startswith("Reduce") or _GLOBAL_POOL.search(node.kind):
        return count_values(graph, node.inputs[0])
    if "Pool" in node.kind:
        return results * int(prod(node.attribute("kernel_shape", [1])))
    return results


def _of_conv(graph: Graph, node: Node, results: int) -> int:
    # Weight (out, in / groups, *kernel): each result sums over all but the first axis.
    return results * prod(_sizes(graph, node.input(1))[1:])


def _of_transposed_conv(graph: Graph, node: Node, _results: int) -> int:
    # Weight (in, out / groups, *kernel): each input value is multiplied by all but the first
    # axis.
    return _of_conv(graph, node, count_values(graph, node.inputs[0]))


def _of_gemm(graph: Graph, node: Node, results: int) -> int:
    inputs = _sizes(graph, node.inputs[0]) or [1]
    # A is (M, K), and (K, M) with transA: each result sums over K.
    return results * inputs[0 if node.attribute("transA", 0) else -1]


def _of_matmul(graph: Graph, node: Node, results: int) -> int:
    inputs = _sizes(graph, node.inputs[0]) or [1]
    return results * inputs[-1]


#: Number of products by operator, of a graph, a node and the size of its result.
_PRODUCTS: dict[str, Callable[[Graph, Node, int], int]] = {
    "Conv": _of_conv,
    "ConvTranspose": _of_transposed_conv,
    "Gemm": _of_gemm,
    "MatMul": _of_matmul,
}


def count_values(graph: Graph, tensor: str) -> int:
    """Return the number of values of a tensor; a size that is not known counts as 1."""
    return prod(_sizes(graph, tensor))


def _sizes(graph: Graph, tensor: str) -> list[int]:
    """Return the dimensions of a tensor, 1 for an unknown one; empty for an unknown shape."""
    shape = graph.sizes(tensor)
    return [size if isinstance(size, int) else 1 for size in shape]
