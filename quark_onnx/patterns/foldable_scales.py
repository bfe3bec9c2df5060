"""Find the constants into which positive factors per channel of a tensor can be folded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quark_onnx.common.conditions import only_if, otherwise, required
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


@otherwise(None)
def absorb(
    graph: Graph,
    tensor: str,
    size: int,
    readers: int = 1,
) -> list[Fold]:
    """Return the constants whose multiplication multiplies a tensor per channel.

    None if there are none.

    Args:
        graph: the model.
        tensor: name of the tensor.
        size: number of channels along its last axis.
        readers: number of readers, all of which are prepared for the factors.
    """
    # A Shape reads no value, and needs no preparation.
    known = [reader for reader in graph.consumers(tensor) if reader.kind != "Shape"]
    only_if(len(known) == readers and private(graph, tensor))
    node = required(graph.producer(tensor))
    # Further results, such as a Dropout's mask, do not carry the channels.
    only_if(tensor == node.outputs[0])
    if Linear.of(graph, node) is not None:
        return _product(graph, node, size)
    return required(_FOLDED.get(node.kind))(graph, node, size)


def _through(graph: Graph, node: Node, size: int) -> list[Fold]:
    """Return the constants of the input of an operator that leaves channels in place.

    Args:
        graph: the graph.
        node: an operator that commutes with positive factors.
        size: number of channels.

    Raises:
        UnmetError: there are none.
    """
    return required(absorb(graph, node.inputs[0], size))


def _rearranged(graph: Graph, node: Node, size: int) -> list[Fold]:
    """Return the constants of the input of a rearrangement that leaves the last axis unchanged.

    Args:
        graph: the graph.
        node: a Reshape or Transpose.
        size: number of channels.

    Raises:
        UnmetError: the last axis changes, or there are no constants.
    """
    if node.kind == "Transpose":
        only_if(last_stays(node))
    else:
        only_if(width(graph, node.inputs[0]) == size)
        only_if(width(graph, node.outputs[0]) == size)
    return _through(graph, node, size)


def _sum(graph: Graph, node: Node, size: int) -> list[Fold]:
    """Return the constants of the summands.

    Args:
        graph: the graph.
        node: an Add or Sub.
        size: number of channels.

    Raises:
        UnmetError: a summand has no such constants.
    """
    # A factor of a sum is a factor of both summands.
    first = _operand(graph, node, 0, size)
    second = _operand(graph, node, 1, size)
    return required(first) + required(second)


def _affine(graph: Graph, node: Node, size: int) -> list[Fold]:
    """Return scale and shift of a normalization over the last axis.

    Args:
        graph: the graph.
        node: a normalization of ``SCALE``.
        size: number of channels.

    Raises:
        UnmetError: the axis is another one, or scale or shift is no vector of the channels.
    """
    only_if(is_along_last_axis(graph, node, -1))
    vectors = [
        ConstantInput(node, place) for place in filter(node.input, SCALE[node.kind])
    ]
    for vector in vectors:
        only_if(vector.sizes(graph) == (size,) and vector.spread(graph, size))
    return list(map(Fold, vectors))


def _product(graph: Graph, node: Node, size: int) -> list[Fold]:
    """Return weight and bias of a layer with an unshared weight.

    Args:
        graph: the graph.
        node: a MatMul or Gemm.
        size: number of channels.

    Raises:
        UnmetError: the layer has another number of outputs, or shares its weight.
    """
    layer = required(Linear.of(graph, node))
    only_if(layer.outputs == size)
    # Another layer with the same weight would get the factors as well.
    only_if(len(graph.consumers(node.input(1))) == 1)
    folds = [Fold(layer.weight[1])]
    if node.input(2):
        folds.append(Fold(ConstantInput(node, 2)))
    return folds


def _factor(graph: Graph, node: Node, size: int) -> list[Fold]:
    """Return a constant factor; otherwise the constants of a computed one.

    Args:
        graph: the graph.
        node: a Mul.
        size: number of channels.

    Raises:
        UnmetError: neither operand has such constants.
    """
    only_if(width(graph, node.outputs[0]) == size)
    # A factor of one operand is enough; a constant operand needs no further search.
    for place in (1, 0):
        stored = ConstantInput(node, place)
        if stored.spread(graph, size):
            return [Fold(stored)]
    second = _operand(graph, node, 1, size)
    if second is not None:
        return second
    return required(_operand(graph, node, 0, size))


def _quotient(graph: Graph, node: Node, size: int) -> list[Fold]:
    """Return a constant divisor; otherwise the constants of the dividend.

    Args:
        graph: the graph.
        node: a Div.
        size: number of channels.

    Raises:
        UnmetError: the divisor is computed, and the dividend has no such constants.
    """
    only_if(width(graph, node.outputs[0]) == size)
    divisor = ConstantInput(node, 1)
    if divisor.spread(graph, size):
        return [Fold(divisor, inverse=True)]
    return required(_operand(graph, node, 0, size))


@otherwise(None)
def _operand(
    graph: Graph,
    node: Node,
    place: int,
    size: int,
) -> list[Fold]:
    """Return the folds of an operand with all channels, or of a constant.

    Args:
        graph: the graph.
        node: the operator.
        place: index of the operand.
        size: number of channels.

    Returns:
        None for an operand without such constants, broadcast along the channels, or read twice.
    """
    stored = ConstantInput(node, place)
    name = node.inputs[place]
    if stored.spread(graph, size):
        return [Fold(stored)]
    # An operand that is broadcast along the channels, or read twice, has no factor per channel.
    only_if(width(graph, name) == size and node.inputs.count(name) == 1)
    return required(absorb(graph, name, size))


#: Operators, and the constants into which factors of the result can be folded.
_FOLDED: dict[str, Callable[[Graph, Node, int], list[Fold]]] = {
    **dict.fromkeys(SCALE, _affine),
    **dict.fromkeys(_COMMUTING, _through),
    "Reshape": _rearranged,
    "Transpose": _rearranged,
    "Mul": _factor,
    "Div": _quotient,
    "Add": _sum,
    "Sub": _sum,
}
