"""Find pairs of layers between which channels can be rescaled.

If the result of a layer reaches the next layers through operators that commute with a positive
factor, a channel may be divided by any factor in the first layer and multiplied by it in the
others: the function stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import private
from quark_onnx.graph.matching import keeps_range, setting
from quark_onnx.graph.shapes import known_sizes
from quark_onnx.patterns.activation import gated
from quark_onnx.patterns.clip_bounds import clip_bounds
from quark_onnx.patterns.conv_and_gemm import MATRIX, SPATIAL, Layer, reads_activation

Doubles = NDArray[np.float64]

#: Operators that commute with a positive factor per channel, along any axis.
_ELEMENTWISE = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "Abs", "Neg"},
)
#: Operators that commute with a positive factor per channel, along the second axis.
_COMMUTING = _ELEMENTWISE | {
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "GlobalMaxPool",
}


@dataclass(frozen=True)
class Passed:
    """Functions that factors may pass with a correction: clips with an upper bound, gates."""

    clips: bool
    gates: bool


@dataclass(frozen=True)
class ChannelReader:
    """A layer that reads channels as inputs from ``offset`` on, repeated ``repeat`` times."""

    layer: Layer
    offset: int
    repeat: int

    def span(self, channels: int) -> slice:
        """Return the inputs of the layer that are the channels."""
        return slice(self.offset, self.offset + channels * self.repeat)


@dataclass(frozen=True)
class ChannelPair:
    """A layer, the readers of the channels, and the functions between.

    Attributes:
        first: the layer that computes the channels.
        channels: number of channels.
        readers: the layers that read the channels.
        clips: clips with an upper bound between them, and the repetitions of the channels there.
        gates: gates between them, and the repetitions of the channels there.
    """

    first: Layer
    channels: int
    readers: tuple[ChannelReader, ...]
    clips: tuple[tuple[Node, int], ...] = ()
    gates: tuple[tuple[Node, int], ...] = ()

    def scale_weights(self, weights: dict[str, Doubles], factor: Doubles) -> None:
        """Divide the channels by factors, in weights by node name.

        Args:
            weights: weights in the layout of ``Layer.weight``, by node name, with those of the
                pair's layers; these entries are replaced.
            factor: positive factors, (channels,).
        """
        # Weights are (groups, outputs / groups, inputs / groups, kernel): factors of outputs
        # first, factors of inputs for the readers.
        name = self.first.node.name
        weight = weights[name]
        divisors = factor.reshape(*weight.shape[:2], *[1] * (weight.ndim - 2))
        weights[name] = weight / divisors
        self.scale_readers(weights, factor)

    def scale_readers(self, weights: dict[str, Doubles], factor: Doubles) -> None:
        """Multiply the inputs of the readers by factors; arguments as ``scale_weights``."""
        for reader in self.readers:
            weight = weights[reader.layer.node.name]
            # One factor per input channel of the reader, 1 outside of the span.
            factors = np.ones(weight.shape[0] * weight.shape[2])
            factors[reader.span(self.channels)] = np.repeat(factor, reader.repeat)
            # (groups, 1, inputs / groups, 1, ...): inputs count group by group.
            shape = (weight.shape[0], 1, weight.shape[2], *[1] * (weight.ndim - 3))
            weights[reader.layer.node.name] = weight * factors.reshape(shape)

    def gated_product(self, graph: Graph) -> Node | None:
        """Return the product of the first layer's result and a gate, if factors pass no other."""
        if self.clips or len(self.gates) != 1:
            return None
        match = gated(graph, self.first.node.outputs[0])
        return None if match is None else match.nodes[0]

    def rescale_rest(
        self,
        graph: Graph,
        factor: Doubles,
        *,
        gates_by_layers: bool,
    ) -> None:
        """Divide the bias of the first layer and the bounds of clips, and correct gates.

        Args:
            graph: the graph with the pair.
            factor: factor of each channel.
            gates_by_layers: correct the gates of images by depthwise convolutions, not by products.
        """
        bias = self.first.bias(graph)
        # A bias of zeros is the same after the division.
        if bias is not None and bias.any():
            self.first.set_bias(graph, bias / factor, "equalized")
        for node, repeat in self.clips:
            _bound(graph, node, np.repeat(factor, repeat))
        for node, repeat in self.gates:
            by_layer = gates_by_layers and self.first.node.kind in SPATIAL
            _scale(graph, node, np.repeat(factor, repeat), by_layer=by_layer)


def pairs_of(graph: Graph, passed: Passed) -> list[ChannelPair]:
    """Return the pairs in graph order.

    Args:
        graph: the graph.
        passed: functions between layers that factors may pass.
    """
    pairs = [_pair(graph, node, passed) for node in graph.nodes]
    return [pair for pair in pairs if pair is not None]


def layers_of(pairs: list[ChannelPair]) -> dict[str, Layer]:
    """Return the distinct layers of some pairs, by node name."""
    layers = {}
    for pair in pairs:
        layers[pair.first.node.name] = pair.first
        for reader in pair.readers:
            layers[reader.layer.node.name] = reader.layer
    return layers


def _pair(graph: Graph, node: Node, passed: Passed) -> ChannelPair | None:
    """Return the pair from a node on; None if factors cannot pass."""
    first = Layer.of(graph, node)
    if first is None or first.bias(graph) is None:
        return None
    # Another layer with the same weight would be rescaled, too.
    if len(graph.consumers(node.input(1))) != 1:
        return None
    return _PairSearch(graph, first, passed).run()


@dataclass(frozen=True)
class _Channels:
    """The channels of a layer in a tensor: from ``offset`` on, each repeated ``repeat`` times."""

    tensor: str
    offset: int = 0
    repeat: int = 1


class _PairSearch:
    """Search for the readers of a layer's channels, through operators that factors pass."""

    def __init__(self, graph: Graph, first: Layer, passed: Passed) -> None:
        self.graph = graph
        self.first = first
        self.passed = passed
        self.channels = first.outputs(graph)
        self.spatial = first.node.kind in SPATIAL
        self.readers = list[ChannelReader]()
        self.clips = list[tuple[Node, int]]()
        self.gates = list[tuple[Node, int]]()
        self.todo = [_Channels(first.node.outputs[0])]

    def run(self) -> ChannelPair | None:
        """Return the pair; None if factors cannot pass."""
        while self.todo:
            if not self._visit(self.todo.pop()):
                return None
        return ChannelPair(
            self.first,
            self.channels,
            tuple(self.readers),
            tuple(self.clips),
            tuple(self.gates),
        )

    def _visit(self, at: _Channels) -> bool:
        """Follow the channels in a tensor to all of its readers.

        Return False if a reader cannot take factors, or if the tensor is an output or read by a
        body.
        """
        consumers = self.graph.consumers(at.tensor)
        if not consumers or not private(self.graph, at.tensor):
            return False
        # Both readers of a gated tensor are passed at once, the gate with a correction.
        if self.passed.gates and self._fills(at) and self._pass_gate(at):
            return True
        return all(self._follow(reader, at) for reader in consumers)

    def _follow(self, node: Node, at: _Channels) -> bool:
        """Follow the channels to one reader; return False if it cannot take factors."""
        layer = Layer.of(self.graph, node)
        if layer is not None and reads_activation(node, at.tensor):
            return self._read(layer, at)
        return self._pass(node, at)

    def _pass_gate(self, at: _Channels) -> bool:
        """Follow the channels through x * sigmoid(x); return False for other readers.

        Args:
            at: channels that fill a tensor.
        """
        match = gated(self.graph, at.tensor)
        if match is None:
            return False
        product, gate = match.nodes
        self.gates.append((gate, at.repeat))
        self.todo.append(replace(at, tensor=product.outputs[0]))
        return True

    def _along_second_axis(self, tensor: str) -> bool:
        """Return whether channels lie along axis 1, as in images and matrices; else the last."""
        return self.spatial or len(self.graph.sizes(tensor)) == MATRIX

    def _fills(self, at: _Channels) -> bool:
        """Return whether the channels are all of a tensor's, along the second axis."""
        count = self.channels * at.repeat
        if not self._along_second_axis(at.tensor):
            return False
        return _width(self.graph.shape(at.tensor)) == count

    def _read(self, layer: Layer, at: _Channels) -> bool:
        """Add a layer whose activation is a tensor; return False if its inputs cannot be scaled."""
        # The second axis of a matrix is the last one, so that either kind of layer reads
        # channels.
        matrix = len(self.graph.sizes(at.tensor)) == MATRIX
        same_axis = self.spatial == (layer.node.kind in SPATIAL)
        if not same_axis and not matrix:
            return False
        # A shared weight would be rescaled for its other layers, too.
        if len(self.graph.consumers(layer.node.input(1))) != 1:
            return False
        # Too few inputs: the shape of the tensor is not what the layer reads.
        groups, _, inputs = layer.shape(self.graph)[:3]
        if at.offset + self.channels * at.repeat > groups * inputs:
            return False
        self.readers.append(ChannelReader(layer, at.offset, at.repeat))
        return True

    def _pass(self, node: Node, at: _Channels) -> bool:
        """Follow the channels through an operator; return False if factors cannot pass.

        Args:
            node: a reader of the tensor that is not a layer with the tensor as activation.
            at: the channels in the tensor.
        """
        if node.kind not in _ELEMENTWISE and not self._along_second_axis(at.tensor):
            return False
        after = _behind(self.graph, node, at)
        # A Clip with an upper bound gets one bound per channel instead.
        if after is None:
            if not self.passed.clips or not self._fills(at):
                return False
            if upper_bound(self.graph, node) is None:
                return False
            self.clips.append((node, at.repeat))
            after = replace(at, tensor=node.outputs[0])
        self.todo.append(after)
        return True


def _width(shape: Sequence[int | str | None] | None) -> int | None:
    """Return the size of the second axis; None if it or the rank is unknown."""
    if shape is None or len(shape) < 2:
        return None
    size = shape[1]
    return size if isinstance(size, int) else None


def _behind(graph: Graph, node: Node, at: _Channels) -> _Channels | None:
    """Return the channels in the first result of a reader; None if factors do not pass."""
    # Further results, such as the indices of a MaxPool or a mask, are read by nobody.
    if any(graph.consumers(name) for name in node.outputs[1:]):
        return None
    if node.kind in _FOLLOWED:
        followed = _FOLLOWED[node.kind](graph, node, at)
    else:
        followed = at if node.kind in _COMMUTING else None
    return None if followed is None else replace(followed, tensor=node.outputs[0])


def _follow_concat(graph: Graph, node: Node, at: _Channels) -> _Channels | None:
    """Count the channels that a Concat puts before these.

    None if the axis is another one, the tensor is joined twice, or a width is unknown.
    """
    # Channels that occur twice have two offsets.
    if node.attribute("axis") != 1 or node.inputs.count(at.tensor) != 1:
        return None
    before = node.inputs[: node.inputs.index(at.tensor)]
    widths = known_sizes([_width(graph.shape(name)) for name in before])
    if widths is None:
        return None
    return replace(at, offset=at.offset + sum(widths))


def _follow_flatten(graph: Graph, node: Node, at: _Channels) -> _Channels | None:
    """Repeat each channel as often as it has values, in neighbouring columns.

    None if the axis is another one, or the size of a channel is unknown.
    """
    shape = graph.shape(at.tensor)
    if node.attribute("axis", 1) != 1 or shape is None:
        return None
    # Flatten turns (N, C, H, W) into (N, C * H * W): channel c owns H * W columns in a row.
    sizes = known_sizes(shape[2:])
    if sizes is None:
        return None
    area = int(np.prod(sizes, initial=1))
    return replace(at, offset=at.offset * area, repeat=at.repeat * area)


def _follow_resize(graph: Graph, node: Node, at: _Channels) -> _Channels | None:
    """Pass a Resize or Upsample that leaves the channels as they are."""
    width = _width(graph.shape(at.tensor))
    if width is None or node.input(0) != at.tensor:
        return None
    # A Resize of the channels would mix them.
    return at if _width(graph.shape(node.outputs[0])) == width else None


def _follow_prelu(graph: Graph, node: Node, at: _Channels) -> _Channels | None:
    """Pass a PRelu whose input, and not its slope, has the channels."""
    return at if node.input(0) == at.tensor else None


def _follow_relu(graph: Graph, node: Node, at: _Channels) -> _Channels | None:
    """Pass a Clip that is a Relu."""
    return at if clip_bounds(graph, node) == (0.0, np.inf) else None


def _follow_pad(graph: Graph, node: Node, at: _Channels) -> _Channels | None:
    """Pass a Pad that adds zeros, or values of the same channel.

    None if the padding is computed, adds channels, or has other values.
    """
    if node.input(3):
        return None
    pads = np.asarray(setting(graph, node, "pads", 1, ()))
    rank = pads.size // 2
    # Computed pads are None, of size 1. Padded channels would shift the others.
    if rank < 2 or pads.reshape(2, rank)[:, :2].any():
        return None
    return at if keeps_range(graph, node) else None


#: Operators that move channels, or that factors pass on some conditions only.
_FOLLOWED: dict[str, Callable[[Graph, Node, _Channels], _Channels | None]] = {
    "Concat": _follow_concat,
    "Flatten": _follow_flatten,
    "Resize": _follow_resize,
    "Upsample": _follow_resize,
    "PRelu": _follow_prelu,
    "Clip": _follow_relu,
    "Pad": _follow_pad,
}


def upper_bound(graph: Graph, node: Node) -> float | None:
    """Return the upper bound of a Clip with lower bound zero; otherwise None."""
    if node.kind != "Clip" or graph.elem_type(node.outputs[0]) != TensorProto.FLOAT:
        return None
    low, high = clip_bounds(graph, node) or (-np.inf, np.inf)
    return high if low == 0 < high < np.inf else None


def _bound(graph: Graph, node: Node, factor: Doubles) -> None:
    """Replace a Clip by a Relu and a Min, with its upper bound divided by a factor per channel.

    Args:
        graph: the graph, which is changed in place.
        node: a Clip from zero to a finite bound, on channels along the second axis.
        factor: positive factors, one per channel of the input.
    """
    high = upper_bound(graph, node)
    assert high is not None
    source = node.inputs[0]
    result = node.outputs[0]
    rank = len(graph.sizes(source))
    shape = (1, factor.size, *[1] * (rank - 2))
    bounds = graph.add_constant(
        f"{result}_bounds",
        # min(relu(x), high) / factor is min(relu(x / factor), high / factor) for a positive
        # factor.
        (high / factor).astype(np.float32).reshape(shape),
    )
    graph.remove([node])
    positive = graph.compute(
        "Relu", [source], f"{result}_positive", name=f"{node.name}_Relu"
    )
    graph.add("Min", [positive, bounds], [result], name=f"{node.name}_Min")


def divide_result(graph: Graph, node: Node, factor: Doubles) -> None:
    """Insert a Mul by the inverse of a factor per channel after a node.

    Args:
        graph: the graph, which is changed in place.
        node: the node; its result has channels along the second axis.
        factor: positive factors, one per channel of the result.
    """
    result = node.outputs[0]
    shape = (1, factor.size, *[1] * (len(graph.sizes(result)) - 2))
    factors = graph.add_constant(
        f"{result}_factors", (1 / factor).astype(np.float32).reshape(shape)
    )
    undivided = graph.fresh(f"{result}_undivided")
    graph.set_output(node, 0, undivided)
    graph.add("Mul", [undivided, factors], [result], name=f"{node.name}_factors")


def _scale(
    graph: Graph,
    node: Node,
    factor: Doubles,
    *,
    by_layer: bool,
) -> None:
    """Multiply the input of a function by a factor per channel.

    The operator is a Mul, or a depthwise Conv of kernel size 1. Where weights have a scale per
    channel, the quantized Conv has the exact factors, and onnxruntime computes it two to five times
    as fast as the product, which broadcasts its constant (1.32, AVX512-VNNI).

    Args:
        graph: the graph, which is changed in place.
        node: the function; its first input has channels along the second axis.
        factor: positive factors, one per channel of the input.
        by_layer: insert a depthwise Conv, not a Mul; the input is an image then.
    """
    source = node.input(0)
    rank = len(graph.sizes(source))
    # Conv weight (C, 1, 1, 1), one filter per group; factor of a Mul (1, C, 1, 1).
    before, after = (0, 1) if by_layer else (1, 0)
    shape = (*[1] * before, factor.size, *[1] * (rank - 2 + after))
    factors = graph.add_constant(
        f"{node.outputs[0]}_factors",
        factor.astype(np.float32).reshape(shape),
    )
    kind = "Conv" if by_layer else "Mul"
    attributes: dict[str, Any] = {"group": factor.size} if by_layer else {}
    scaled = graph.compute(
        kind,
        [source, factors],
        f"{node.outputs[0]}_scaled",
        name=f"{node.name}_{kind}",
        **attributes,
    )
    graph.set_input(node, 0, scaled)
