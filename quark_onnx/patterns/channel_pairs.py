"""Pairs of layers between which channels can be scaled: divided after the first and multiplied in
the second.

Where what a layer computes reaches the next ones through operators that commute with a positive
factor, a channel may be divided by any factor in the first and multiplied by it in the others; the
model computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.patterns.clip_bounds import clip_bounds
from quark_onnx.patterns.conv_and_gemm import SPATIAL, Layer

Doubles = NDArray[np.float64]

#: Operators that commute with a positive factor for each channel: any axis may be that of the
#: channels, or the second.
_ELEMENTWISE = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "Abs", "Neg"},
)
_COMMUTING = _ELEMENTWISE | {
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "GlobalMaxPool",
}
_MATRIX = 2


@dataclass(frozen=True)
class Passed:
    """Functions that factors may pass if something is added: clips with an upper bound, and gates."""  # noqa: E501

    clips: bool
    gates: bool


@dataclass(frozen=True)
class Reader:
    """A layer that reads channels: as its inputs from number ``offset`` on, ``repeat`` for each."""

    layer: Layer
    offset: int
    repeat: int

    def span(self, channels: int) -> slice:
        """Those of the layer's inputs that are the channels."""
        return slice(self.offset, self.offset + channels * self.repeat)


@dataclass(frozen=True)
class Pair:
    """A layer, those that alone read its channels, and what stands between them.

    Attributes:
        first: the layer that computes the channels.
        channels: how many there are.
        readers: the layers that read them. clips, gates: nodes between them that need something
        added, and how often each channel is repeated there.
    """

    first: Layer
    channels: int
    readers: tuple[Reader, ...]
    clips: tuple[tuple[Node, int], ...] = ()
    gates: tuple[tuple[Node, int], ...] = ()

    def scale_weights(self, weights: dict[str, Doubles], factor: Doubles) -> None:
        """Divide the channels by factors, in weights by the names of their nodes."""
        first = weights[self.first.node.name]
        weights[self.first.node.name] = first / factor.reshape(
            *first.shape[:2],
            *[1] * (first.ndim - 2),
        )
        for reader in self.readers:
            weight = weights[reader.layer.node.name]
            whole = np.ones(weight.shape[0] * weight.shape[2])
            whole[reader.span(self.channels)] = np.repeat(factor, reader.repeat)
            shape = (weight.shape[0], 1, weight.shape[2], *[1] * (weight.ndim - 3))
            weights[reader.layer.node.name] = weight * whole.reshape(shape)

    def rescale_rest(self, graph: Graph, factor: Doubles) -> None:
        """Divide what stands beside the weights: the bias of the first layer, the bounds of clips."""  # noqa: E501
        bias = self.first.bias(graph)
        if bias is not None and bias.any():
            self.first.set_bias(graph, bias / factor, "equalized")
        for node, repeat in self.clips:
            _bound(graph, node, np.repeat(factor, repeat))
        for node, repeat in self.gates:
            _scale(graph, node, np.repeat(factor, repeat))


def pairs_of(graph: Graph, passed: Passed) -> list[Pair]:
    """All pairs, in the order of the graph."""
    return [
        pair for node in graph.nodes if (pair := _pair(graph, node, passed)) is not None
    ]


def layers_of(pairs: list[Pair]) -> dict[str, Layer]:
    """Every layer of some pairs once, by the name of its node."""
    return {
        layer.node.name: layer
        for pair in pairs
        for layer in (pair.first, *(r.layer for r in pair.readers))
    }


def _pair(graph: Graph, node: Node, passed: Passed) -> Pair | None:  # noqa: C901
    """A layer and those that alone read it, through operators that factors pass."""
    first = Layer.of(graph, node)
    if (
        first is None
        or first.bias(graph) is None
        or len(graph.consumers(node.input(1))) > 1
    ):
        return None
    channels = first.outputs(graph)
    spatial = node.kind in SPATIAL
    readers = list[Reader]()
    clips, gates = list[tuple[Node, int]](), list[tuple[Node, int]]()
    todo = [(node.outputs[0], 0, 1)]
    while todo:
        tensor, offset, repeat = todo.pop()
        consumers = graph.consumers(tensor)
        if graph.is_output(tensor) or graph.captured(tensor) or not consumers:
            return None
        shape = graph.shape(tensor)
        second = (
            spatial or len(shape or ()) == _MATRIX
        )  # the axis of the channels; else it is the last one
        whole = second and _width(shape) == channels * repeat
        gate = _gate(graph, tensor, consumers) if passed.gates and whole else None
        if gate is not None:
            gates.append((gate[0], repeat))
            todo.append((gate[1].outputs[0], offset, repeat))
            continue
        for reader in consumers:
            layer = Layer.of(graph, reader)
            if (
                layer is not None
                and reader.inputs.count(tensor) == 1
                and reader.input(0) == tensor
            ):
                alike = (
                    spatial == (reader.kind in SPATIAL) or len(shape or ()) == _MATRIX
                )
                shared = len(graph.consumers(reader.input(1))) > 1
                if (
                    not alike
                    or shared
                    or not _fits(graph, layer, offset, channels * repeat)
                ):
                    return None
                readers.append(Reader(layer, offset, repeat))
                continue
            if not second and reader.kind not in _ELEMENTWISE:
                return None
            after = _behind(graph, reader, tensor, offset, repeat)
            if (
                after is None
                and passed.clips
                and whole
                and upper_bound(graph, reader) is not None
            ):
                clips.append((reader, repeat))
                after = offset, repeat
            if after is None:
                return None
            todo.append((reader.outputs[0], *after))
    return Pair(first, channels, tuple(readers), tuple(clips), tuple(gates))


def _width(shape: Sequence[int | str | None] | None) -> int | None:
    """The size of the second axis, where it is known."""
    size = shape[1] if shape is not None and len(shape) > 1 else None
    return size if isinstance(size, int) else None


def _fits(graph: Graph, layer: Layer, offset: int, count: int) -> bool:
    groups, _, inputs = layer.shape(graph)[:3]
    return offset + count <= groups * inputs


def _behind(
    graph: Graph,
    node: Node,
    tensor: str,
    offset: int,
    repeat: int,
) -> tuple[int, int] | None:
    """Where the channels lie behind an operator, and how often each is repeated.

    None if factors do not pass.
    """
    if any(graph.consumers(name) for name in node.outputs[1:]):
        return None
    shape = graph.shape(tensor)
    if (
        node.kind in _COMMUTING
        or _is_relu(graph, node)
        or _pads_zeros(graph, node, shape)
    ):
        return (
            (offset, repeat)
            if node.kind != "PRelu" or node.input(0) == tensor
            else None
        )
    if (
        node.kind in ("Resize", "Upsample")
        and node.input(0) == tensor
        and shape is not None
    ):
        return (
            (offset, repeat)
            if _width(graph.shape(node.outputs[0])) == _width(shape) is not None
            else None
        )
    if (
        node.kind == "Concat"
        and node.attribute("axis") == 1
        and node.inputs.count(tensor) == 1
    ):
        widths = [
            _width(graph.shape(name))
            for name in node.inputs[: node.inputs.index(tensor)]
        ]
        known = [width for width in widths if width is not None]
        if len(known) == len(widths):
            return offset + sum(known), repeat
    if node.kind == "Flatten" and node.attribute("axis", 1) == 1 and shape is not None:
        area = shape[2:]
        if all(isinstance(dim, int) for dim in area):
            size = int(
                np.prod([dim for dim in area if isinstance(dim, int)], initial=1),
            )
            return offset * size, repeat * size
    return None


def upper_bound(graph: Graph, node: Node) -> float | None:
    """The upper bound of a Clip whose lower one is zero; None if it is none."""
    if node.kind != "Clip" or graph.elem_type(node.outputs[0]) != TensorProto.FLOAT:
        return None
    low, high = clip_bounds(graph, node) or (-np.inf, np.inf)
    return high if low == 0 < high < np.inf else None


def _bound(graph: Graph, node: Node, factor: Doubles) -> None:
    """Write a Clip as a Relu and a Min, its upper bound divided by a factor for each channel."""
    high = upper_bound(graph, node)
    assert high is not None
    source, result = node.inputs[0], node.outputs[0]
    rank = len(graph.shape(source) or ())
    shape = (1, factor.size, *[1] * (rank - 2))
    bounds = graph.add_constant(
        f"{result}_bounds",
        (high / factor).astype(np.float32).reshape(shape),
    )
    positive = graph.fresh(f"{result}_positive")
    graph.remove([node])
    graph.add("Relu", [source], [positive], name=f"{node.name}_Relu")
    graph.add("Min", [positive, bounds], [result], name=f"{node.name}_Min")


def _gate(graph: Graph, tensor: str, consumers: list[Node]) -> tuple[Node, Node] | None:
    """The Sigmoid and the Mul of x * sigmoid(x), if nothing else reads x."""
    gates = [node for node in consumers if node.kind in ("Sigmoid", "HardSigmoid")]
    products = [node for node in consumers if node.kind == "Mul"]
    if (
        len(consumers) != 2
        or not gates
        or not products
        or graph.is_output(gates[0].outputs[0])
    ):
        return None
    pair = {tensor, gates[0].outputs[0]}
    alone = graph.consumers(gates[0].outputs[0]) == products
    return (
        (gates[0], products[0]) if alone and set(products[0].inputs) == pair else None
    )


def _scale(graph: Graph, node: Node, factor: Doubles) -> None:
    """Let a function read its input times a factor for each channel."""
    source = node.input(0)
    shape = (1, factor.size, *[1] * (len(graph.shape(source) or ()) - 2))
    factors = graph.add_constant(
        f"{node.outputs[0]}_factors",
        factor.astype(np.float32).reshape(shape),
    )
    scaled = graph.fresh(f"{node.outputs[0]}_scaled")
    graph.add("Mul", [source, factors], [scaled], name=f"{node.name}_Mul")
    graph.set_input(node, 0, scaled)


def _is_relu(graph: Graph, node: Node) -> bool:
    """Whether a Clip is a Relu."""
    return node.kind == "Clip" and clip_bounds(graph, node) == (0.0, np.inf)


def _pads_zeros(graph: Graph, node: Node, shape: object) -> bool:
    """Whether a Pad fills up with zeros, or with values of the same channel."""
    if node.kind != "Pad":
        return False
    pads = (
        graph.constant(node.input(1))
        if node.input(1)
        else np.asarray(node.attribute("pads", ()))
    )
    if pads is None or pads.size < 4 or node.input(3):
        return False
    rank = pads.size // 2
    if pads.reshape(2, rank)[:, :2].any():
        return False
    value = (
        graph.constant(node.input(2))
        if node.input(2)
        else np.asarray(node.attribute("value", 0.0))
    )
    return node.attribute("mode", "constant") != "constant" or (
        value is not None and not value.any()
    )
