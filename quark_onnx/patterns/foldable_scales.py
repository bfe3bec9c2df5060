"""Find the constants into which positive factors per channel of a tensor can be folded."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput, private
from quark_onnx.patterns.linear import Floats, Linear, last_stays, width
from quark_onnx.patterns.norms import SCALE

_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
_FLOAT = (
    "one of its operands is a constant with factors for each channel, which few codes"
    " do not tell apart"
)
#: Unary operators that commute with a positive factor per channel.
_COMMUTING = frozenset({"Relu", "LeakyRelu", "Identity", "Dropout"})


@dataclass(frozen=True)
class Fold:
    """A constant to multiply by factors; ``inverse`` to divide it."""

    stored: ConstantInput
    inverse: bool = False

    def apply(self, graph: Graph, key: str, factor: Floats) -> None:
        """Multiply the constant, and keep an arithmetic node float.

        A per-tensor scale for the factors would round small ones to zero.
        """
        if self.stored.node.kind in _ARITHMETIC:
            self.stored.node.stay_float(_FLOAT)
        if self.inverse:
            factor = 1 / factor
        self.stored.scale(graph, key, factor)


def absorb(graph: Graph, tensor: str, size: int, readers: int = 1) -> list[Fold] | None:
    """Return the constants whose multiplication multiplies a tensor per channel.

    None if there are none.

    Args:
        graph: the model.
        tensor: name of the tensor.
        size: number of channels along its last axis.
        readers: number of readers, all of which are prepared for the factors.
    """
    node = graph.producer(tensor)
    known = [reader for reader in graph.consumers(tensor) if reader.kind != "Shape"]
    if node is None or tensor != node.outputs[0]:
        return None
    if len(known) != readers or not private(graph, tensor):
        return None
    layer = Linear.of(graph, node)
    if node.kind in SCALE:
        return _affine(graph, node, size)
    if layer is not None:
        return _product(graph, layer, size)
    if node.kind in _COMMUTING or _keeps_last_axis(graph, node, size):
        return absorb(graph, node.inputs[0], size)
    combine = _COMBINING.get(node.kind)
    return combine(graph, node, size) if combine is not None else None


def _sum(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """Return the constants of the summands, or None."""
    first = _operand(graph, node, 0, size)
    second = _operand(graph, node, 1, size)
    if first is None or second is None:
        return None
    return first + second


def _affine(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """Return scale and shift of a normalization over the last axis, or None."""
    rank = len(graph.sizes(node.input(0)))
    if node.attribute("axis", -1) not in (-1, rank - 1):
        return None
    folds = list[Fold]()
    for place in SCALE[node.kind]:
        name = node.input(place)
        vector = ConstantInput(node, place)
        if not name:
            continue
        if graph.shape(name) != (size,) or not vector.spread(graph, size):
            return None
        folds.append(Fold(vector))
    return folds


def _product(graph: Graph, layer: Linear, size: int) -> list[Fold] | None:
    """Return weight and bias of a layer; None for a shared weight."""
    if layer.outputs != size or len(graph.consumers(layer.node.input(1))) > 1:
        return None
    folds = [Fold(layer.weight[1])]
    if layer.node.input(2):
        folds.append(Fold(ConstantInput(layer.node, 2)))
    return folds


def _factor(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """Return a constant factor or divisor; otherwise a computed factor, or the dividend."""
    if width(graph, node.outputs[0]) != size:
        return None
    divides = node.kind == "Div"
    constants = (1,) if divides else (1, 0)
    computed = (0,) if divides else (1, 0)
    for place in constants:
        stored = ConstantInput(node, place)
        if stored.spread(graph, size):
            return [Fold(stored, inverse=divides)]
    for place in computed:
        folds = _operand(graph, node, place, size)
        if folds is not None:
            return folds
    return None


def _operand(graph: Graph, node: Node, place: int, size: int) -> list[Fold] | None:
    """Return the folds of an operand with all channels, or of a constant."""
    stored = ConstantInput(node, place)
    name = node.inputs[place]
    if stored.spread(graph, size):
        return [Fold(stored)]
    if width(graph, name) != size or node.inputs.count(name) > 1:
        return None
    return absorb(graph, name, size)


def _keeps_last_axis(graph: Graph, node: Node, size: int) -> bool:
    """Return whether a rearrangement leaves the last axis unchanged."""
    if node.kind == "Transpose":
        return last_stays(node)
    if node.kind != "Reshape":
        return False
    before = width(graph, node.inputs[0])
    after = width(graph, node.outputs[0])
    return before == size == after


#: Arithmetic on two operands, and the constants into which factors of the result can be folded.
_COMBINING = {"Mul": _factor, "Div": _factor, "Add": _sum, "Sub": _sum}
