"""Where a positive factor for each channel of a tensor can be folded into the constants that it is
computed with.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput, private
from quark_onnx.patterns.linear import Floats, Linear, last_stays, width
from quark_onnx.patterns.norms import SCALE

#: Operators of one input that commute with a positive factor for each channel.
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
_FLOAT = (
    "one of its operands is a constant with factors for each channel, which few codes"
    " do not tell apart"
)
_COMMUTING = frozenset({"Relu", "LeakyRelu", "Identity", "Dropout"})


@dataclass(frozen=True)
class Fold:
    """A constant that takes the factor in; ``inverse`` where it is divided by."""

    stored: ConstantInput
    inverse: bool = False

    def apply(self, graph: Graph, key: str, factor: Floats) -> None:
        """Multiply.

        One scale for all of the factors would round the small ones away, so that the node stays
        float.
        """
        if self.stored.node.kind in _ARITHMETIC:
            self.stored.node.stay_float(_FLOAT)
        self.stored.scale(graph, key, 1 / factor if self.inverse else factor)


def absorb(graph: Graph, tensor: str, size: int, readers: int = 1) -> list[Fold] | None:  # noqa: PLR0911
    """The constants to multiply for each channel of a tensor to be multiplied.

    None if that cannot be.

    Args:
        size: how many channels lie along its last axis.
        readers: how many nodes read it, all of them prepared for it.
    """
    node = graph.producer(tensor)
    known = [reader for reader in graph.consumers(tensor) if reader.kind != "Shape"]
    if (
        node is None
        or len(known) != readers
        or not private(graph, tensor)
        or tensor != node.outputs[0]
    ):
        return None
    if node.kind in SCALE:
        return _affine(graph, node, size)
    layer = Linear.of(graph, node)
    if layer is not None:
        return _product(graph, layer, size)
    if node.kind in _COMMUTING or _keeps_last_axis(graph, node, size):
        return absorb(graph, node.inputs[0], size)
    if node.kind in ("Mul", "Div"):
        return _factor(graph, node, size)
    if node.kind in ("Add", "Sub"):
        parts = [_operand(graph, node, place, size) for place in (0, 1)]
        return (
            None
            if any(part is None for part in parts)
            else [fold for part in parts for fold in part or ()]
        )
    return None


def _affine(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """Scale and shift of a normalization over the last axis."""
    places = [place for place in SCALE[node.kind] if node.input(place)]
    found = [ConstantInput(node, place) for place in places]
    rank = len(graph.shape(node.input(0)) or ())
    last = node.attribute("axis", -1) in (-1, rank - 1)
    fits = all(
        graph.shape(node.input(place)) == (size,) and part.spread(graph, size)
        for place, part in zip(places, found, strict=True)
    )
    return [Fold(part) for part in found] if last and fits else None


def _product(graph: Graph, layer: Linear, size: int) -> list[Fold] | None:
    """Weight and bias of a layer; a weight that others read as well would be stored twice."""
    if layer.outputs != size or len(graph.consumers(layer.node.input(1))) > 1:
        return None
    own = [ConstantInput(layer.node, 2)] if layer.node.input(2) else []
    return [Fold(stored) for stored in (layer.weight[1], *own)]


def _factor(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """A constant factor or divisor; else one of the factors, or the dividend."""
    if width(graph, node.outputs[0]) != size:
        return None
    for place in (1, 0):
        stored = ConstantInput(node, place)
        if stored.spread(graph, size) and (place == 1 or node.kind == "Mul"):
            return [Fold(stored, inverse=node.kind == "Div")]
    for place in (1, 0) if node.kind == "Mul" else (0,):
        found = _operand(graph, node, place, size)
        if found is not None:
            return found
    return None


def _operand(graph: Graph, node: Node, place: int, size: int) -> list[Fold] | None:
    """An operand that has all of the channels, or a constant."""
    stored, name = ConstantInput(node, place), node.inputs[place]
    if stored.spread(graph, size):
        return [Fold(stored)]
    if width(graph, name) != size or node.inputs.count(name) > 1:
        return None
    return absorb(graph, name, size)


def _keeps_last_axis(graph: Graph, node: Node, size: int) -> bool:
    """Whether a rearrangement leaves the last axis as it is."""
    if node.kind == "Transpose":
        return last_stays(node)
    return node.kind == "Reshape" and width(graph, node.inputs[0]) == size == width(
        graph,
        node.outputs[0],
    )
