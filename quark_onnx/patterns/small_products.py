"""Small products without a bias, of which OpenVINO computes wrong results.

OpenVINO 2026.4 computes a chain of products with up to 8 rows and sizes of up to 256 in one kernel.
Where the dequantized result of one reaches the next pair by nothing but a Relu, a sum with one
number and the like, it leaves out the scales: results are off by a factor of up to 1e9.
"""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.codes import constant_behind
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.graph.shapes import known_sizes

_PRODUCTS = frozenset({"MatMul", "Gemm"})
#: Operators that the kernel takes into the bounds of the next pair.
_ARITHMETIC = frozenset(
    {"Abs", "Add", "Clip", "Div", "Identity", "Mul", "Neg", "Relu", "Sub"}
)
_MOST_ROWS, _MOST_SIZE = 8, 256


def unscaled_products(graph: Graph) -> list[Node]:
    """Return the products of a quantized graph whose scales OpenVINO leaves out."""
    small = [node for node in graph.nodes_of(_PRODUCTS) if _is_small(graph, node)]
    # A single product is no chain.
    if len(small) < 2:
        return []

    def after(node: Node) -> list[Node]:
        return [each for each in graph.followers(node) if each.kind in _ARITHMETIC]

    def is_rounded(node: Node) -> bool:
        return any(
            reader.op_type in QUANTIZE
            for member in reach([node], after)
            for reader in graph.followers(member)
        )

    return [node for node in small if not _has_bias(graph, node) and is_rounded(node)]


def _is_small(graph: Graph, node: Node) -> bool:
    """Return whether the kernel of OpenVINO takes a product of codes."""
    weight = node.inputs[1]
    transpose = graph.producer_of_kind(weight, {"Transpose"})
    if transpose is not None:
        weight = transpose.inputs[0]
    if graph.producer_of_type(weight, DEQUANTIZE) is None:
        return False
    sizes = known_sizes(graph.shape(constant_behind(graph, weight)))
    result = known_sizes(graph.shape(node.outputs[0]))
    if sizes is None or result is None or len(result) != 2:
        return False
    return result[0] <= _MOST_ROWS and max(sizes) <= _MOST_SIZE


def _has_bias(graph: Graph, node: Node) -> bool:
    """Return whether values that differ are added to the result of a product."""
    if node.kind == "Gemm":
        return _differ(graph, node.input(2))
    readers = graph.consumers(node.outputs[0])
    if len(readers) != 1 or readers[0].kind != "Add":
        return False
    return any(_differ(graph, name) for name in readers[0].inputs)


def _differ(graph: Graph, name: str) -> bool:
    values = graph.constant(constant_behind(graph, name))
    return values is not None and bool(np.ptp(values.astype(np.float64)))
