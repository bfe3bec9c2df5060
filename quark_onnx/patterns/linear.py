"""View MatMul and Gemm with a constant weight as linear layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput
from quark_onnx.graph.matching import only_use
from quark_onnx.patterns.conv_and_gemm import (
    MATRIX,
    Layer,
    plain_matrix,
    reads_activation,
)
from quark_onnx.patterns.norms import SCALE

Floats = NDArray[np.float64]
#: Operators whose result has the last axis of their input.
_KEEPING = frozenset(
    {
        "Identity",
        "Dropout",
        "Relu",
        "LeakyRelu",
        "Sigmoid",
        "Tanh",
        "Erf",
        "Gelu",
        "Softmax",
        "Sqrt",
    },
)
#: Operators whose result has the longest last axis of their inputs.
_JOINING = frozenset({"Add", "Sub", "Mul", "Div", "Pow"})


@dataclass(frozen=True)
class Linear:
    """A MatMul or Gemm by a constant matrix on the right.

    Attributes:
        node: the product.
        inputs: number of input channels.
        outputs: number of output channels.
        weight: the weight along the axis of the inputs, and along the axis of the outputs.
        bias: the constant that is added, in the node or right after it; None without a bias.
    """

    node: Node
    inputs: int
    outputs: int
    weight: tuple[ConstantInput, ConstantInput]
    bias: ConstantInput | None

    @classmethod
    def of(cls, graph: Graph, node: Node) -> Linear | None:
        """Return the layer of a node; None for another node, or a computed bias."""
        weight = node.input(1)
        shape = graph.sizes(weight)
        if len(shape) != MATRIX or not plain_matrix(node, shape):
            return None
        # A weight that is the activation or the bias as well cannot be changed alone.
        if not graph.is_constant(weight) or node.inputs.count(weight) > 1:
            return None
        first = -2 if Layer.stored(node).turned else -1
        second = -3 - first
        inputs = int(shape[first] or 0)
        outputs = int(shape[second] or 0)
        if not inputs or not outputs or graph.elem_type(weight) != TensorProto.FLOAT:
            return None
        bias = _bias(graph, node, outputs)
        if bias is None and node.input(2):
            return None
        sides = (ConstantInput(node, 1, first), ConstantInput(node, 1, second))
        return cls(node, inputs, outputs, sides, bias)

    @classmethod
    def reading(cls, graph: Graph, node: Node, tensor: str) -> Linear | None:
        """Return the layer of a node if a tensor is its activation and nothing else."""
        if not reads_activation(node, tensor):
            return None
        return cls.of(graph, node)

    def matrix(self, graph: Graph) -> Floats:
        """Return the weight, of shape (inputs, outputs)."""
        side = self.weight[0]
        value = side.value(graph)
        return value if side.axis == -2 else value.T

    def add_to_bias(self, graph: Graph, key: str, vector: Floats) -> None:
        """Add a vector to the bias, which is created if need be."""
        if self.bias is not None:
            self.bias.change(graph, key, lambda value: value + vector)
            return
        name = graph.add_constant(f"{self.node.name}_{key}", vector.astype(np.float32))
        if self.node.kind == "Gemm":
            graph.fill_input(self.node, 2, name)
            return
        # A MatMul has no bias: an Add computes the result in its place.
        result = self.node.outputs[0]
        product = graph.fresh(f"{result}_product")
        graph.set_output(self.node, 0, product)
        graph.add("Add", [product, name], [result])


def _bias(graph: Graph, node: Node, size: int) -> ConstantInput | None:
    """Return the constant vector that is added to a product, in the node or right after it."""
    if node.kind == "MatMul":
        return _added(graph, node, size)
    bias = ConstantInput(node, 2)
    return bias if bias.spread(graph, size) else None


def _added(graph: Graph, node: Node, size: int) -> ConstantInput | None:
    """Return the constant vector of the Add that alone reads a product, or None."""
    result = node.outputs[0]
    reader = only_use(graph, result, "Add")
    if reader is None:
        return None
    place = 1 - reader.inputs.index(result)
    added = reader.inputs[place]
    if graph.is_constant(added) and graph.shape(added) == (size,):
        return ConstantInput(reader, place)
    return None


def readers_of(graph: Graph, tensor: str) -> tuple[list[Linear], list[Node]]:
    """Return the layers after a tensor, and further readers except Shape."""
    layers = list[Linear]()
    others = list[Node]()
    for node in graph.consumers(tensor):
        layer = Linear.reading(graph, node, tensor)
        if layer is not None:
            layers.append(layer)
        elif node.kind != "Shape":
            others.append(node)
    return layers, others


def sources(graph: Graph) -> list[str]:
    """Return the distinct inputs of layers, in graph order."""
    layers = [node for node in graph.nodes if Linear.of(graph, node) is not None]
    names = dict.fromkeys(node.input(0) for node in layers)
    return [name for name in names if not graph.is_constant(name)]


def width(graph: Graph, tensor: str, depth: int = 8) -> int:
    """Return the length of the last axis, 0 if unknown.

    Where shape inference fails, as after an operator unknown to ONNX, weights nearby may tell.
    """
    shape = graph.shape(tensor)
    if shape and isinstance(shape[-1], int):
        return shape[-1]
    return _width_nearby(graph, tensor, depth)


def _width_nearby(graph: Graph, tensor: str, depth: int) -> int:
    """Return the length of the last axis according to readers and producers."""
    for reader in graph.consumers(tensor):
        layer = Linear.of(graph, reader)
        if layer is not None and reader.input(0) == tensor:
            return layer.inputs
    node = graph.producer(tensor)
    if node is None or not depth:
        return 0
    layer = Linear.of(graph, node)
    if layer is not None:
        return layer.outputs
    return _width_through(graph, tensor, node, depth)


def _width_through(graph: Graph, tensor: str, node: Node, depth: int) -> int:
    """Return the length of the last axis according to the inputs of a node."""
    if node.kind == "Reshape":
        # Neither -1 nor 0 in a target shape tells a length.
        shape = graph.constant(node.input(1))
        return 0 if shape is None or not shape.size else max(0, int(shape[-1]))
    if node.kind in SCALE:
        is_statistic = tensor in node.outputs[1:3]  # mean, inverse deviation
        scale = node.input(SCALE[node.kind][0])
        return 0 if is_statistic else width(graph, scale, 0)
    if node.kind in _JOINING:
        # Shorter operands have length 1, and are repeated.
        return max(width(graph, name, depth - 1) for name in node.inputs)
    if node.kind == "MatMul":
        return width(graph, node.inputs[1], depth - 1)
    if node.kind in _KEEPING or (node.kind == "Transpose" and last_stays(node)):
        return width(graph, node.inputs[0], depth - 1)
    return 0


def last_stays(node: Node) -> bool:
    """Return whether a Transpose leaves the last axis in place."""
    order = node.attribute("perm")
    return order is not None and bool(order[-1] == len(order) - 1)
