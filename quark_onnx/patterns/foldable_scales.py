"""Find the constants into which positive factors per channel of a tensor can be folded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput, private
from quark_onnx.graph.matching import is_along_last_axis
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

        Args:
            graph: the graph, which is changed in place.
            key: suffix of the changed constant's name.
            factor: factors of the tensor, (channels,).
        """
        if self.stored.node.kind in _ARITHMETIC:
            self.stored.node.stay_float(_FLOAT)
        if self.inverse:
            factor = 1 / factor
        self.stored.scale(graph, key, factor)


def absorb(
    graph: Graph,
    tensor: str,
    size: int,
    readers: int = 1,
) -> list[Fold] | None:
    """Return the constants whose multiplication multiplies a tensor per channel.

    None if there are none.

    Args:
        graph: the model.
        tensor: name of the tensor.
        size: number of channels along its last axis.
        readers: number of readers, all of which are prepared for the factors.
    """
    # A Shape reads no value, and needs no preparation.
    nodes = [reader for reader in graph.consumers(tensor) if reader.kind != "Shape"]
    if len(nodes) != readers or not private(graph, tensor):
        return None
    node = graph.producer(tensor)
    # Further results, such as a Dropout's mask, do not carry the channels.
    if node is None or tensor != node.outputs[0]:
        return None
    layer = Linear.of(graph, node)
    if layer is not None:
        return _product(graph, layer, size)
    if node.kind not in _FOLDED:
        return None
    return _FOLDED[node.kind](graph, node, size)


def _through(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """Return the constants of the input of an operator that leaves channels in place."""
    return absorb(graph, node.inputs[0], size)


def _rearranged(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """Return the constants of the input of a Reshape or Transpose.

    None, too, if the last axis changes.
    """
    if node.kind == "Transpose":
        is_kept = last_stays(node)
    else:
        is_kept = width(graph, node.inputs[0]) == size == width(graph, node.outputs[0])
    return _through(graph, node, size) if is_kept else None


def _sum(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """Return the constants of the summands; None if a summand has none."""
    # A factor of a sum is a factor of both summands.
    first = _operand(graph, node, 0, size)
    second = _operand(graph, node, 1, size)
    if first is None or second is None:
        return None
    return first + second


def _affine(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """Return scale and shift of a normalization over the last axis.

    None for another axis, and if scale or shift is no vector of the channels.
    """
    if not is_along_last_axis(graph, node, -1):
        return None
    vectors = [
        ConstantInput(node, index) for index in SCALE[node.kind] if node.input(index)
    ]
    for vector in vectors:
        if vector.sizes(graph) != (size,) or not vector.spread(graph, size):
            return None
    return [Fold(vector) for vector in vectors]


def _product(graph: Graph, layer: Linear, size: int) -> list[Fold] | None:
    """Return weight and bias of a layer.

    None if the layer has another number of outputs, or shares its weight.
    """
    node = layer.node
    # Another layer with the same weight would get the factors as well.
    if layer.outputs != size or len(graph.consumers(node.input(1))) != 1:
        return None
    folds = [Fold(layer.weight[1])]
    if node.input(2):
        folds.append(Fold(ConstantInput(node, 2)))
    return folds


def _factor(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """Return a constant factor of a Mul; otherwise the constants of a computed one.

    None if neither operand has such constants.
    """
    if width(graph, node.outputs[0]) != size:
        return None
    # A factor of one operand is enough; a constant operand needs no further search.
    for index in (1, 0):
        stored = ConstantInput(node, index)
        if stored.spread(graph, size):
            return [Fold(stored)]
    second = _operand(graph, node, 1, size)
    if second is not None:
        return second
    return _operand(graph, node, 0, size)


def _quotient(graph: Graph, node: Node, size: int) -> list[Fold] | None:
    """Return the constant divisor of a Div; otherwise the constants of the dividend.

    None if the divisor is computed, and the dividend has no such constants.
    """
    if width(graph, node.outputs[0]) != size:
        return None
    divisor = ConstantInput(node, 1)
    if divisor.spread(graph, size):
        return [Fold(divisor, inverse=True)]
    return _operand(graph, node, 0, size)


def _operand(graph: Graph, node: Node, index: int, size: int) -> list[Fold] | None:
    """Return the folds of an operand with all channels, or of a constant.

    None for an operand without such constants, broadcast along the channels, or read twice.
    """
    stored = ConstantInput(node, index)
    name = node.inputs[index]
    if stored.spread(graph, size):
        return [Fold(stored)]
    # An operand that is broadcast along the channels, or read twice, has no factor per channel.
    if width(graph, name) != size or node.inputs.count(name) != 1:
        return None
    return absorb(graph, name, size)


#: Operators, and the constants into which factors of the result can be folded.
_FOLDED: dict[str, Callable[[Graph, Node, int], list[Fold] | None]] = {
    **dict.fromkeys(SCALE, _affine),
    **dict.fromkeys(_COMMUTING, _through),
    "Reshape": _rearranged,
    "Transpose": _rearranged,
    "Mul": _factor,
    "Div": _quotient,
    "Add": _sum,
    "Sub": _sum,
}
