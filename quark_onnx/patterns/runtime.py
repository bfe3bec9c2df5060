"""Estimate the runtime of a quantized model on a processor from the structure of its graph.

An estimate is repeatable where a measurement is not, so that a model always gets equal decisions.
Multiply-adds of layers run on integers; an operator that no layer absorbs costs memory traffic: a
read and a write per value, whatever the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from quark_onnx.containers import of_type
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import only_reader
from quark_onnx.patterns.conv_and_gemm import LAYERS

#: Nanoseconds of one core for a multiply-add of an int8 layer, and for one value of an operator
#: between quantized tensors (onnxruntime 1.32 on an x86 processor with VNNI).
_MULTIPLY_ADD, _VALUE = 0.02, 1.0
#: The same for a multiply-add of a float layer.
_FLOAT_MULTIPLY_ADD = 0.06
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
    """Return the runtime in nanoseconds of an additional operator per tensor."""
    return sum(_elements(graph, name) * _VALUE for name in tensors)


def raised_runtime(graph: Graph, node: Node) -> float:
    """Return by how many nanoseconds a node runs longer where it leaves 8-bit integers.

    Its arithmetic is that of floats, and its inputs and results are converted.
    """
    slower = (_FLOAT_MULTIPLY_ADD - _MULTIPLY_ADD) * _multiply_adds(graph, node)
    tensors = [*node.inputs, *node.outputs]
    converted = [name for name in tensors if name and not graph.is_constant(name)]
    return slower + unfused_runtime(graph, converted)


def _multiply_adds(graph: Graph, node: Node) -> float:
    """Return the number of multiply-adds of a layer with a constant weight; 0 of any other node."""
    if node.kind not in LAYERS or not graph.is_constant(node.input(1)):
        return 0.0
    weight = graph.sizes(node.input(1))
    # of a Conv's weight (M, C/group, ...), a matrix (K, N), or its transpose
    sizes = of_type(weight, int)
    results = _elements(graph, node.outputs[0])
    return results * prod(sizes) / max(_channels(graph, node, sizes), 1)


def _node_runtime(graph: Graph, node: Node) -> float:
    if node.kind in LAYERS and graph.is_constant(node.input(1)):
        return _multiply_adds(graph, node) * _MULTIPLY_ADD
    if node.kind in _FREE or _is_absorbed(graph, node):
        return 0.0
    return unfused_runtime(graph, node.results)


def _is_absorbed(graph: Graph, node: Node) -> bool:
    """Return whether onnxruntime computes an activation function in the layer before it."""
    if node.kind not in _ABSORBED or not node.inputs:
        return False
    if graph.producer_of_kind(node.inputs[0], LAYERS) is None:
        return False
    return only_reader(graph, node.inputs[0]) is not None


def _channels(graph: Graph, node: Node, sizes: list[int]) -> int:
    """Return the number of outputs of a weight with the given dimensions."""
    if not sizes:
        return 1
    if node.kind in ("MatMul", "Gemm"):
        return sizes[0] if node.attribute("transB", 0) else sizes[-1]
    return sizes[0]


def _elements(graph: Graph, name: str) -> int:
    """Return the number of values of a tensor; a size that is not known counts as 1."""
    shape = graph.sizes(name)
    return prod(of_type(shape, int))
