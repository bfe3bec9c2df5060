"""Operators of quantized graphs that OpenVINO 2026.4 computes wrongly.

It computes a chain of products with up to 8 rows and sizes of up to 256 in one kernel. Where the
dequantized result of one reaches the next pair by nothing but a Relu, a sum with one number and the
like, it leaves out the scales: results are off by a factor of up to 1e9.

It pads the codes of an AveragePool with 0, which stands for 0 only with this zero point.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.codes import constant_behind
from quark_onnx.graph.matching import counts_padding
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.graph.shapes import known_sizes

_PRODUCTS = frozenset({"MatMul", "Gemm"})
#: Operators that the kernel computes by moving the bounds at which the next pair rounds.
_ARITHMETIC = frozenset(
    {"Abs", "Add", "Clip", "Div", "Identity", "Mul", "Neg", "Relu", "Sub"}
)
#: Operators that move codes without a pair after them.
_MOVING = frozenset(
    {"Concat", "DepthToSpace", "Expand", "MaxPool", "Pad", "Reshape", "Resize", "Slice"}
    | {"SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Upsample"}
)
#: Operators whose results are not negative, so that their zero point is 0.
POSITIVE = frozenset({"Relu", "Sigmoid", "HardSigmoid", "Softmax"})
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


def padded_means(graph: Graph) -> list[Node]:
    """Return the averages over codes and their padding, whose zero point is not 0."""
    return [
        node for node in graph.nodes_of({"AveragePool"}) if _pads_codes(graph, node)
    ]


def moved_to(graph: Graph, tensor: str) -> dict[str, None]:
    """Return the tensor, and tensors whose values it holds after operators that only move them."""

    def before(tensor: str) -> Sequence[str]:
        mover = graph.producer_of_kind(tensor, _MOVING)
        return () if mover is None else mover.operands

    return reach([tensor], before)


def _pads_codes(graph: Graph, node: Node) -> bool:
    if not counts_padding(node):
        return False
    for tensor in moved_to(graph, node.inputs[0]):
        dequantize = graph.producer_of_type(tensor, DEQUANTIZE)
        if dequantize is None:
            continue
        zeros = graph.constant(dequantize.input(2))
        if zeros is not None and zeros.any():
            return True
    return False


def _is_small(graph: Graph, node: Node) -> bool:
    """Return whether the kernel of OpenVINO takes a product of codes."""
    weight = node.inputs[1]
    transpose = graph.producer_of_kind(weight, {"Transpose"})
    if transpose is not None:
        weight = transpose.inputs[0]
    if graph.producer_of_type(weight, DEQUANTIZE) is None:
        return False
    sizes = known_sizes(graph.shape(constant_behind(graph, weight)))
    rows = _rows(graph, node)
    return rows <= _MOST_ROWS and sizes is not None and max(sizes) <= _MOST_SIZE


def _rows(graph: Graph, node: Node) -> float:
    """Return the number of rows of a product of matrices; infinity if it is unknown."""
    tensors = [node.outputs[0], node.inputs[0]]
    # Shapes of dequantized values are not inferred while pairs are written.
    for kinds in (DEQUANTIZE, QUANTIZE):
        pair = graph.producer_of_type(tensors[-1], kinds)
        if pair is not None:
            tensors.append(pair.inputs[0])
    for name in tensors:
        sizes = graph.sizes(name)
        if len(sizes) > 2:
            return np.inf
        # A result may be declared with a name for a size that is known of the operand.
        if len(sizes) == 2 and isinstance(sizes[0], int):
            return sizes[0]
    return np.inf


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
    if values is None or not values.size:
        return False
    return bool(np.ptp(values.astype(np.float64)))
