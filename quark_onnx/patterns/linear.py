"""MatMul and Gemm with a constant weight, seen as one: where weight and bias are stored, and how to
change them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput
from quark_onnx.patterns.conv_and_gemm import Layer, unscaled
from quark_onnx.patterns.norms import SCALE

Floats = NDArray[np.float64]
_MATRIX = 2
#: Operators whose result has the last axis of their input, or the longest of their inputs.
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
_JOINING = frozenset({"Add", "Sub", "Mul", "Div", "Pow"})


@dataclass(frozen=True)
class Linear:
    """A MatMul or Gemm that multiplies the last axis of its first input by a constant matrix.

    Attributes:
        node: the product.
        inputs, outputs: how many channels it reads and computes.
        weight: its weight along the axis of the inputs, and along that of the outputs.
        bias: the constant that is added, in the node or right behind it; None where there is none.
    """

    node: Node
    inputs: int
    outputs: int
    weight: tuple[ConstantInput, ConstantInput]
    bias: ConstantInput | None

    @classmethod
    def of(cls, graph: Graph, node: Node) -> Linear | None:
        """The layer that a node is; None if it is none, or adds something that is not constant."""
        weight = node.input(1)
        shape = graph.shape(weight) or ()
        plain = node.kind == "MatMul" or (
            node.kind == "Gemm" and unscaled(node) and not node.attribute("transA", 0)
        )
        if (
            not plain
            or len(shape) != _MATRIX
            or not graph.is_constant(weight)
            or node.inputs.count(weight) > 1
        ):
            return None
        first = -2 if Layer.stored(node).turned else -1
        inputs, outputs = (int(shape[axis] or 0) for axis in (first, -3 - first))
        if not inputs or not outputs or graph.elem_type(weight) != TensorProto.FLOAT:
            return None
        bias = None
        if node.input(2):
            bias = ConstantInput(node, 2)
            if not bias.spread(graph, outputs):
                return None
        elif node.kind == "MatMul":
            bias = _added(graph, node, outputs)
        sides = (ConstantInput(node, 1, first), ConstantInput(node, 1, -3 - first))
        return cls(node, inputs, outputs, sides, bias)

    def matrix(self, graph: Graph) -> Floats:
        """The weight, of shape (inputs, outputs)."""
        side = self.weight[0]
        return side.value(graph) if side.axis == -2 else side.value(graph).T

    def add_to_bias(self, graph: Graph, key: str, more: Floats) -> None:
        """Add to the bias; a product that has none gets one."""
        if self.bias is not None:
            self.bias.change(graph, key, lambda value: value + more)
            return
        name = graph.add_constant(f"{self.node.name}_{key}", more.astype(np.float32))
        if self.node.kind == "Gemm":
            if len(self.node.inputs) > 2:
                graph.set_input(self.node, 2, name)
            else:
                graph.append_input(self.node, name)
            return
        result = self.node.outputs[0]
        product = graph.fresh(f"{result}_product")
        graph.set_output(self.node, 0, product)
        graph.add("Add", [product, name], [result])


def _added(graph: Graph, node: Node, size: int) -> ConstantInput | None:
    """A constant vector that is added to a product before anything else reads it."""
    result = node.outputs[0]
    readers = graph.consumers(result)
    if (
        len(readers) != 1
        or readers[0].kind != "Add"
        or graph.is_output(result)
        or graph.captured(result)
    ):
        return None
    place = 1 - readers[0].inputs.index(result)
    added = readers[0].inputs[place]
    return (
        ConstantInput(readers[0], place)
        if graph.is_constant(added) and graph.shape(added) == (size,)
        else None
    )


def readers_of(graph: Graph, tensor: str) -> tuple[list[Linear], list[Node]]:
    """The layers that read a tensor, and who reads it else.

    Who asks for its shape does not count.
    """
    layers, others = list[Linear](), list[Node]()
    for node in graph.consumers(tensor):
        layer = Linear.of(graph, node)
        if (
            layer is not None
            and node.inputs.count(tensor) == 1
            and node.input(0) == tensor
        ):
            layers.append(layer)
        elif node.kind != "Shape":
            others.append(node)
    return layers, others


def sources(graph: Graph) -> list[str]:
    """The tensors that layers read, each once, in graph order."""
    found = (
        node.input(0) for node in graph.nodes if Linear.of(graph, node) is not None
    )
    return [name for name in dict.fromkeys(found) if not graph.is_constant(name)]


def width(graph: Graph, tensor: str, depth: int = 8) -> int:
    """The length of the last axis, 0 if it is not known.

    Where shapes could not be inferred, as behind an operator that ONNX does not know, the weights
    around may tell.
    """
    shape = graph.shape(tensor)
    if shape is not None:
        return (
            shape[-1]
            if shape and isinstance(shape[-1], int)
            else _told(graph, tensor, depth)
        )
    return _told(graph, tensor, depth)


def _told(graph: Graph, tensor: str, depth: int) -> int:  # noqa: PLR0911
    """What a layer that reads a tensor, or the nodes that compute it, say about its last axis."""
    for reader in graph.consumers(tensor):
        layer = Linear.of(graph, reader)
        if layer is not None and reader.input(0) == tensor:
            return layer.inputs
    node = graph.producer(tensor)
    if node is None or not depth:
        return 0
    layer, shape = (
        Linear.of(graph, node),
        graph.constant(node.input(1)) if node.kind == "Reshape" else None,
    )
    if layer is not None:
        return layer.outputs
    if shape is not None and shape.size:
        return max(0, int(shape[-1]))
    if node.kind in SCALE and tensor in (*node.outputs[:1], *node.outputs[3:]):
        return width(graph, node.input(SCALE[node.kind][0]), 0)
    if node.kind in _JOINING:
        return max(
            width(graph, name, depth - 1) for name in node.inputs
        )  # others are 1, and repeated
    if node.kind in _KEEPING or (node.kind == "Transpose" and last_stays(node)):
        return width(graph, node.inputs[0], depth - 1)
    return width(graph, node.inputs[1], depth - 1) if node.kind == "MatMul" else 0


def last_stays(node: Node) -> bool:
    """Whether a Transpose leaves the last axis where it is."""
    order = node.attribute("perm")
    return order is not None and bool(order[-1] == len(order) - 1)
