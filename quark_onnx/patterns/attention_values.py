"""Trace the values of attention heads from their projection to the output projection.

The weighted sum mixes tokens, not the channels of a head, so that a rotation of the channels
commutes with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput, private
from quark_onnx.graph.matching import is_along_last_axis
from quark_onnx.kernels.hadamard import Rotation
from quark_onnx.patterns.linear import Floats, Linear, last_stays, width

_MOVING = frozenset(
    {"Identity", "Dropout", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand"},
)


@dataclass(frozen=True)
class Heads:
    """The value path of an attention.

    Attributes:
        size: channels of a head.
        writers: weight and bias of the projection of the values.
        part: first and last channel of the values in the projection, which may also compute queries
            and keys.
        reader: the output projection.
    """

    size: int
    writers: tuple[ConstantInput, ...]
    part: tuple[int, int]
    reader: Linear

    def rotate(self, graph: Graph, rotation: Rotation, key: str) -> None:
        """Rotate the channels of the heads, and inversely the output projection.

        Args:
            graph: the graph, which is changed in place.
            rotation: a rotation of ``size`` channels, the same for each head.
            key: suffix of the names of changed constants; a shared one is changed once per key.
        """
        for writer in self.writers:
            self._turn(graph, writer, rotation, f"{key}_{self.part[0]}")
        side = self.reader.weight[0]
        side.change(graph, key, lambda value: rotation.turn(value, side.axis))

    def _turn(
        self, graph: Graph, writer: ConstantInput, rotation: Rotation, key: str
    ) -> None:
        """Rotate the channels of the values in a weight or bias of the projection."""
        channels = slice(*self.part)

        def turned(value: Floats) -> Floats:
            result: Floats = value.copy()
            if writer.axis == -1:
                result[..., channels] = rotation.turn(value[..., channels], -1)
            else:  # -2, the first axis of a matrix
                result[channels] = rotation.turn(value[channels], writer.axis)
            return result

        writer.change(graph, key, turned)


def heads(graph: Graph) -> list[Heads]:
    """Return the attentions of a graph with unshared values."""
    candidates = [_heads(graph, node) for node in graph.nodes_of(("MatMul",))]
    return [candidate for candidate in candidates if candidate is not None]


def _heads(graph: Graph, node: Node) -> Heads | None:
    """Return the value path whose weighted sum a MatMul computes.

    None for other products, and for values that other nodes read.
    """
    values = node.inputs[1]
    size = width(graph, values)
    if size < 2 or _has_constant(graph, node):
        return None
    reader = _reader(graph, node.outputs[0], size)
    # The output projection reads all heads, one after the other.
    if reader is None or reader.inputs % size:
        return None
    projection = _ValueTrace(graph, size).run(values, node)
    if projection is None:
        return None
    writers, part = projection
    return Heads(size, writers, part, reader)


def _has_constant(graph: Graph, node: Node) -> bool:
    return any(graph.is_constant(name) for name in node.inputs)


def _sole(graph: Graph, tensor: str, reader: Node) -> bool:
    """Return whether a node alone reads the values of a tensor, and once."""
    if _readers(graph, tensor) != [reader] or not private(graph, tensor):
        return False
    return reader.inputs.count(tensor) == 1


def _readers(graph: Graph, tensor: str) -> list[Node]:
    """Return the readers of the values of a tensor, not of its shape."""
    # The graph's Shape nodes compute the target shapes of Reshapes.
    return [node for node in graph.consumers(tensor) if node.kind != "Shape"]


def _passes(graph: Graph, node: Node, size: int) -> bool:
    """Return whether a node leaves channels in place within each head."""
    if node.kind not in _MOVING:
        return False
    # Whole heads before and after: a Reshape may split (heads * size) into (heads, size).
    widths = {width(graph, name) for name in (node.inputs[0], node.outputs[0])}
    if 0 in widths or any(channels % size for channels in widths):
        return False
    if node.kind == "Transpose":
        return last_stays(node)
    return node.kind == "Reshape" or len(widths) == 1


class _ValueTrace:
    """Trace of values back to the projection."""

    def __init__(self, graph: Graph, size: int) -> None:
        self.graph = graph
        self.size = size
        self.biases = list[ConstantInput]()
        self.part: tuple[int, int] | None = None

    def run(
        self,
        tensor: str,
        reader: Node,
    ) -> tuple[tuple[ConstantInput, ...], tuple[int, int]] | None:
        """Return the constants of the projection, and the part of the values.

        Args:
            reader: the weighted sum, which must be the only reader.

        Returns:
            None if another node reads the values, or an unknown operator computes them.
        """
        while True:
            node = self.graph.producer(tensor)
            if node is None or not self._private(tensor, reader, node):
                return None
            layer = Linear.of(self.graph, node)
            if layer is not None:
                return self._projection(layer)
            source = self._source(tensor, node)
            if source is None:
                return None
            tensor, reader = source, node

    def _private(self, tensor: str, reader: Node, node: Node) -> bool:
        """Return whether values with a single reader can be traced to their producer."""
        # A Split has the values as any of its results; other operators as their first.
        has_values = tensor == node.outputs[0] or node.kind == "Split"
        even = width(self.graph, tensor) % self.size == 0
        return has_values and even and _sole(self.graph, tensor, reader)

    def _projection(
        self,
        layer: Linear,
    ) -> tuple[tuple[ConstantInput, ...], tuple[int, int]] | None:
        """Return the constants of the projection, and the part of the values.

        None if a bias has no value per channel, or the part splits a head.
        """
        if layer.node.input(2):
            self.biases.append(ConstantInput(layer.node, 2))
        for bias in self.biases:
            # A bias that is repeated for all channels has a value for each after the rotation.
            if bias.sizes(self.graph)[-1:] != (layer.outputs,):
                return None
        part = self.part or (0, layer.outputs)
        if any(end % self.size for end in part):
            return None
        return (layer.weight[1], *self.biases), part

    def _source(self, tensor: str, node: Node) -> str | None:
        """Return the input of a node to trace further; None if the node mixes channels.

        Args:
            node: the producer of the values, which is no layer.
        """
        if not node.inputs:
            return None
        channels = width(self.graph, node.inputs[0])
        if node.kind == "Split" and not self.part and channels:
            return self._split(tensor, node)
        if node.kind == "Add" and _has_constant(self.graph, node):
            index = 0 if self.graph.is_constant(node.inputs[0]) else 1
            self.biases.append(ConstantInput(node, index))
            return node.inputs[1 - index]
        # the part of the values is counted in channels of the whole projection
        if self.part and channels != width(self.graph, node.outputs[0]):
            return None
        return node.inputs[0] if _passes(self.graph, node, self.size) else None

    def _split(self, tensor: str, node: Node) -> str | None:
        """Record the part of a Split that has the values; return the input of the Split.

        None if another axis is split.
        """
        if not is_along_last_axis(self.graph, node, 0):
            return None
        before = node.outputs[: node.outputs.index(tensor)]
        first = sum(width(self.graph, name) for name in before)
        self.part = (first, first + width(self.graph, tensor))
        return node.inputs[0]


def _reader(graph: Graph, tensor: str, size: int) -> Linear | None:
    """Return the layer after the weighted sums.

    None if the sums reach several nodes, or an operator that mixes channels.
    """
    while True:
        node = next(iter(_readers(graph, tensor)), None)
        if node is None or not _sole(graph, tensor, node) or node.inputs[0] != tensor:
            return None
        layer = Linear.of(graph, node)
        if layer is not None:
            return layer
        if not _passes(graph, node, size):
            return None
        tensor = node.outputs[0]
