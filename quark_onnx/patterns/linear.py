"""View MatMul and Gemm with a constant weight as linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput
from quark_onnx.graph.matching import constant_operand
from quark_onnx.patterns.conv_and_gemm import (
    MATRIX,
    PRODUCTS,
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
        if node.kind not in PRODUCTS:
            return None
        return cls._of_product(graph, node)

    @classmethod
    def _of_product(cls, graph: Graph, node: Node) -> Linear | None:
        """Return the layer of a MatMul or Gemm; None without a plain constant weight."""
        weight = node.input(1)
        shape = graph.sizes(weight)
        if len(shape) != MATRIX or not plain_matrix(node, shape):
            return None
        is_float = graph.elem_type(weight) == TensorProto.FLOAT
        if not is_float or not graph.is_constant(weight):
            return None
        # A weight that is the activation or the bias as well cannot be changed alone.
        if node.inputs.count(weight) != 1:
            return None
        # Axes from the end, of (inputs, outputs) or (outputs, inputs).
        input_axis = -2 if Layer.stored(node).turned else -1
        output_axis = -3 - input_axis
        inputs = int(shape[input_axis] or 0)
        outputs = int(shape[output_axis] or 0)
        if not inputs or not outputs:
            return None
        bias = _bias(graph, node, outputs)
        # The computed bias of a Gemm cannot be changed like a constant.
        if bias is None and node.input(2):
            return None
        sides = (
            ConstantInput(node, 1, input_axis),
            ConstantInput(node, 1, output_axis),
        )
        return cls(node, inputs, outputs, sides, bias)

    @classmethod
    def reading(
        cls,
        graph: Graph,
        node: Node,
        tensor: str,
    ) -> Linear | None:
        """Return the layer of a node if a tensor is its activation and nothing else.

        Args:
            graph: the graph.
            node: a node of any kind.
            tensor: name of the tensor.

        Returns:
            None for a node that is no layer, or that reads the tensor at another input.
        """
        if not reads_activation(node, tensor):
            return None
        return cls.of(graph, node)

    def matrix(self, graph: Graph) -> Floats:
        """Return the weight, of shape (inputs, outputs)."""
        side = self.weight[0]
        value = side.value(graph)
        return value if side.axis == -2 else value.T

    def add_to_bias(self, graph: Graph, key: str, vector: Floats) -> None:
        """Add a vector to the bias, which is created if need be.

        Args:
            graph: the graph, which is changed in place.
            key: suffix of the constant's name.
            vector: summands, (outputs,).
        """
        if self.bias is not None:
            self.bias.change(graph, key, lambda value: value + vector)
            return
        # A vector per output; MatMul and Gemm broadcast it over the rows.
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
    """Return the constant vector that is added to a product, in the node or right after it.

    None without a bias, and for a computed one or one of another size than that of the outputs.
    """
    if node.kind == "Gemm":
        bias = ConstantInput(node, 2)
        return bias if bias.spread(graph, size) else None
    added = constant_operand(graph, node.outputs[0], "Add")
    # A constant of a higher rank would broadcast the product.
    if added is None or added.sizes(graph) != (size,):
        return None
    return added


def readers_of(graph: Graph, tensor: str) -> tuple[list[Linear], list[Node]]:
    """Return the layers after a tensor, and further readers except Shape.

    Args:
        graph: the graph.
        tensor: name of the tensor.

    Returns:
        The layers with the tensor as activation, and the other readers, both in graph order.
    """
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
    layers = [Linear.of(graph, node) for node in graph.nodes]
    names = dict.fromkeys(layer.node.input(0) for layer in layers if layer is not None)
    return [name for name in names if not graph.is_constant(name)]


def width(graph: Graph, tensor: str, depth: int = 8) -> int:
    """Return the length of the last axis, 0 if unknown.

    Where shape inference fails, as after an operator unknown to ONNX, weights nearby may tell.

    Args:
        graph: the graph.
        tensor: name of the tensor.
        depth: number of operators to follow backward.
    """
    shape = graph.shape(tensor)
    # An inferred size is certain; nearby weights are only looked at without one.
    if shape and isinstance(shape[-1], int):
        return shape[-1]
    return _width_nearby(graph, tensor, depth)


def _width_nearby(graph: Graph, tensor: str, depth: int) -> int:
    """Return the length of the last axis according to readers and producers; 0 if unknown."""
    for reader in graph.consumers(tensor):
        layer = Linear.of(graph, reader)
        if layer is not None and reader.input(0) == tensor:
            return layer.inputs
    node = graph.producer(tensor)
    # The depth limits the search, which follows both operands of an Add.
    if node is None or not depth:
        return 0
    return _width_through(graph, tensor, node, depth)


def _width_through(graph: Graph, tensor: str, node: Node, depth: int) -> int:
    """Return the length of the last axis of a result of a node; 0 if unknown.

    Args:
        depth: number of operators to follow backward, at least 1.
    """
    layer = Linear.of(graph, node)
    if layer is not None:
        return layer.outputs
    if node.kind == "Reshape":
        return _target_width(graph, node)
    if node.kind in SCALE:
        return _scale_width(graph, node, tensor)
    # Shorter operands have length 1, and are repeated.
    widths = [width(graph, name, depth - 1) for name in _inputs_with_width(node)]
    return max(widths, default=0)


def _target_width(graph: Graph, reshape: Node) -> int:
    """Return the length of the last axis in a target shape; 0 for -1, 0 and a computed shape."""
    shape = graph.constant(reshape.input(1))
    if shape is None or not shape.size:
        return 0
    return max(0, int(shape[-1]))


def _scale_width(graph: Graph, norm: Node, result: str) -> int:
    """Return the length of the last axis of a result according to the scale of a normalization."""
    if result in norm.outputs[1:3]:  # mean, inverse deviation
        return 0
    return width(graph, norm.input(SCALE[norm.kind][0]), 0)


def _inputs_with_width(node: Node) -> Sequence[str]:
    """Return the inputs of which the longest last axis is that of the result."""
    if node.kind in _JOINING:
        return node.inputs
    if node.kind == "MatMul":
        return node.inputs[1:2]
    if node.kind in _KEEPING or last_stays(node):
        return node.inputs[:1]
    return ()


def last_stays(node: Node) -> bool:
    """Return whether a node is a Transpose that leaves the last axis in place."""
    order = node.attribute("perm") if node.kind == "Transpose" else None
    return order is not None and bool(order[-1] == len(order) - 1)
