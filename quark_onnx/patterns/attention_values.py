"""Attention values: the path of a head from the layer that projects its values to the layer that
reads their sum.

Weighing mixes tokens, not the channels of a head, so a rotation of these passes through.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput, private
from quark_onnx.kernels.hadamard import Rotation
from quark_onnx.patterns.linear import Floats, Linear, last_stays, width

_MOVING = frozenset(
    {"Identity", "Dropout", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand"},
)


@dataclass(frozen=True)
class Heads:
    """One attention.

    Attributes:
        size: channels of a head.
        writers: weight and bias that values are projected with.
        part: which of their channels are values, as first and last one; others may be queries and
            keys.
        reader: the layer behind the attention.
    """

    size: int
    writers: tuple[ConstantInput, ...]
    part: tuple[int, int]
    reader: Linear

    def rotate(self, graph: Graph, rotation: Rotation, key: str) -> None:
        """Rotate the channels of each head, and turn the weight that reads them."""
        for writer in self.writers:
            writer.change(
                graph,
                f"{key}_{self.part[0]}",
                partial(self._turned, rotation, writer.axis),
            )
        side = self.reader.weight[0]
        side.change(graph, key, lambda value: rotation.turn(value, side.axis))

    def _turned(self, rotation: Rotation, axis: int, value: Floats) -> Floats:
        (first, last) = self.part
        result: Floats = value.copy()
        where = (..., slice(first, last)) if axis == -1 else (slice(first, last),)
        result[where] = rotation.turn(value[where], axis)
        return result


def heads(graph: Graph) -> list[Heads]:
    """The attentions of a graph whose values nobody else reads."""
    found = (_heads(graph, node) for node in graph.nodes if node.kind == "MatMul")
    return [each for each in found if each is not None]


def _heads(graph: Graph, node: Node) -> Heads | None:
    values = node.inputs[1]
    size = width(graph, values)
    if size < 2 or any(map(graph.is_constant, node.inputs)):
        return None
    reader = _reader(graph, node.outputs[0], size)
    written = _writers(graph, values, node, size) if reader is not None else None
    if reader is None or written is None or reader.inputs % size:
        return None
    return Heads(size, written[0], written[1], reader)


def _sole(graph: Graph, tensor: str, reader: Node) -> bool:
    nodes = [node for node in graph.consumers(tensor) if node.kind != "Shape"]
    return (
        nodes == [reader]
        and private(graph, tensor)
        and reader.inputs.count(tensor) == 1
    )


def _passes(graph: Graph, node: Node, size: int) -> bool:
    """Whether channels stay where they are within each head."""
    if node.kind not in _MOVING or any(
        width(graph, name) % size or not width(graph, name) for name in _ends(node)
    ):
        return False
    if node.kind == "Transpose":
        return last_stays(node)
    return (
        node.kind == "Reshape" or len({width(graph, name) for name in _ends(node)}) == 1
    )


def _ends(node: Node) -> tuple[str, str]:
    return node.inputs[0], node.outputs[0]


def _reader(graph: Graph, tensor: str, size: int) -> Linear | None:
    """The layer that reads weighted sums."""
    while True:
        nodes = [node for node in graph.consumers(tensor) if node.kind != "Shape"]
        if (
            len(nodes) != 1
            or not _sole(graph, tensor, nodes[0])
            or nodes[0].inputs[0] != tensor
        ):
            return None
        layer = Linear.of(graph, nodes[0])
        if layer is not None:
            return layer
        if not _passes(graph, nodes[0], size):
            return None
        tensor = nodes[0].outputs[0]


def _writers(
    graph: Graph,
    tensor: str,
    reader: Node,
    size: int,
) -> tuple[tuple[ConstantInput, ...], tuple[int, int]] | None:
    """What values are computed with, and which part of it."""
    biases, part = list[ConstantInput](), None
    while True:
        node = graph.producer(tensor)
        alone = _sole(graph, tensor, reader) and width(graph, tensor) % size == 0
        if (
            node is None
            or not alone
            or (tensor != node.outputs[0] and node.kind != "Split")
        ):
            return None
        reader, layer = node, Linear.of(graph, node)
        if layer is not None:
            biases += [ConstantInput(node, 2)] if node.input(2) else []
            shapes = [
                graph.shape(bias.node.inputs[bias.index]) or (0,) for bias in biases
            ]
            part = part or (0, layer.outputs)
            fits = all(shape[-1] == layer.outputs for shape in shapes) and not any(
                end % size for end in part
            )
            return ((layer.weight[1], *biases), part) if fits else None
        if node.kind == "Split" and not part and width(graph, node.inputs[0]):
            before = sum(
                width(graph, name)
                for name in node.outputs[: node.outputs.index(tensor)]
            )
            rank = len(graph.shape(node.inputs[0]) or ())
            if node.attribute("axis", 0) not in (-1, rank - 1):
                return None
            part, tensor = (before, before + width(graph, tensor)), node.inputs[0]
        elif node.kind == "Add" and any(map(graph.is_constant, node.inputs)):
            place = 0 if graph.is_constant(node.inputs[0]) else 1
            biases.append(ConstantInput(node, place))
            tensor = node.inputs[1 - place]
        elif _passes(graph, node, size) and (
            not part or len({width(graph, name) for name in _ends(node)}) == 1
        ):
            tensor = node.inputs[0]
        else:
            return None
