"""Estimate the runtime of a quantized model on a processor from the structure of its graph.

An estimate is repeatable where a measurement is not, so that a model always gets equal decisions.
Multiply-adds of layers run on integers; an operator that no layer absorbs costs memory traffic: a
read and a write per value, whatever the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.cost import count_values
from quark_onnx.graph.matching import only_reader
from quark_onnx.patterns.conv_and_gemm import LAYERS

#: Nanoseconds of one core for a multiply-add of an int8 layer, and for one value of an operator
#: between quantized tensors (onnxruntime 1.32 on an x86 processor with VNNI).
_MULTIPLY_ADD, _VALUE = 0.02, 1.0
#: By how many nanoseconds a multiply-add takes longer in a float layer, and in one of several
#: groups, for which onnxruntime has no fast float kernel (measured by benchmarks/raises.py).
_FLOAT_MULTIPLY_ADD, _GROUPED_FLOAT_MULTIPLY_ADD = 0.02, 0.3
#: Nanoseconds for a value of an embedding table, which is dequantized whole in each run unless
#: the results have its format.
_TABLE_VALUE = 0.25
#: Operators that onnxruntime absorbs into the layer before them.
_ABSORBED = frozenset({"Relu", "Clip"})
#: Operators that compute nothing and copy nothing.
_FREE = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Constant"}
)


def estimated_runtime(graph: Graph) -> float:
    """Return the estimated runtime of a graph on one core in nanoseconds, for a batch of 1."""
    return sum(_node_runtime(graph, node) for node in graph.nodes)


def unfused_runtime(graph: Graph, tensors: Sequence[str]) -> float:
    """Return the runtime in nanoseconds of an additional operator per tensor.

    Args:
        graph: the float graph, with inferred shapes.
        tensors: names of the tensors.
    """
    return sum(count_values(graph, name) * _VALUE for name in tensors)


def raised_runtime(graph: Graph, node: Node) -> float:
    """Return by how many nanoseconds a node runs longer where it leaves 8-bit integers.

    Its arithmetic is that of floats, and its inputs and results are converted. An activation
    function that a layer absorbs takes the layer along; the tensor between them has no scale.

    Args:
        graph: the float graph, with inferred shapes.
        node: the node.
    """
    layer = absorbing_layer(graph, node)
    runtime = _slower_arithmetic(graph, layer or node)
    if node.kind == "Gather" and graph.is_constant(node.inputs[0]):
        runtime += count_values(graph, node.inputs[0]) * _TABLE_VALUE
    elif layer is None:
        inputs = [name for name in node.operands if not graph.is_constant(name)]
        runtime += unfused_runtime(graph, inputs)
    if not _is_followed(graph, node):
        runtime += unfused_runtime(graph, node.results)
    return runtime


def _slower_arithmetic(graph: Graph, node: Node) -> float:
    """Return by how many nanoseconds the multiply-adds of a node take longer on floats."""
    grouped = node.attribute("group", 1) > 1
    price = _GROUPED_FLOAT_MULTIPLY_ADD if grouped else _FLOAT_MULTIPLY_ADD
    return price * _multiply_adds(graph, node)


def _multiply_adds(graph: Graph, node: Node) -> float:
    """Return the number of multiply-adds of a layer with a constant weight; 0 of any other node.

    Unknown sizes count as 1.
    """
    if node.kind not in LAYERS or not graph.is_constant(node.input(1)):
        return 0.0
    weight = graph.sizes(node.input(1))
    # Of a Conv's weight (M, C/group, ...), a matrix (K, N), or its transpose.
    sizes = [size for size in weight if isinstance(size, int)]
    # Each result sums over all elements of the weight that belong to its output channel.
    results = count_values(graph, node.outputs[0])
    return results * prod(sizes) / max(_channels(graph, node, sizes), 1)


def _node_runtime(graph: Graph, node: Node) -> float:
    if node.kind in LAYERS and graph.is_constant(node.input(1)):
        return _multiply_adds(graph, node) * _MULTIPLY_ADD
    if node.kind in _FREE or absorbing_layer(graph, node) is not None:
        return 0.0
    return unfused_runtime(graph, node.results)


def absorbing_layer(graph: Graph, node: Node) -> Node | None:
    """Return the layer in which onnxruntime computes an activation function; None if apart.

    Args:
        graph: the float graph.
        node: a node of any kind.
    """
    if node.kind not in _ABSORBED or not node.inputs:
        return None
    # A tensor with other readers is needed before the activation function as well.
    if only_reader(graph, node.inputs[0]) is None:
        return None
    return graph.producer_of_kind(node.inputs[0], LAYERS)


def _is_followed(graph: Graph, node: Node) -> bool:
    """Return whether a layer absorbs the activation function after it."""
    if node.kind not in LAYERS:
        return False
    reader = only_reader(graph, node.outputs[0])
    return reader is not None and absorbing_layer(graph, reader) is not None


def _channels(graph: Graph, node: Node, sizes: list[int]) -> int:
    """Return the number of outputs of a layer's weight.

    Args:
        sizes: known dimensions of the weight; empty for an unknown shape.
    """
    if not sizes:
        return 1
    if node.kind in ("MatMul", "Gemm"):
        # (K, N), or (N, K) with transB.
        return sizes[0] if node.attribute("transB", 0) else sizes[-1]
    return sizes[0]
