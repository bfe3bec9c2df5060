"""Functions that exporters write as several operators, although runtimes have one for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.matching import reduced_axes
from quark_onnx.graph.node import Node
from quark_onnx.graph.pattern import Match, Pattern, op, scalar, tensor
from quark_onnx.patterns.gelu import GELU, TANH_GELU
from quark_onnx.patterns.norms import normalized

_X = tensor("x")
_CONSTANT = tensor(where=Graph.is_constant)


@dataclass(frozen=True)
class Composite:
    """A function in several operators.

    Attributes:
        function: name of what the operators compute.
        nodes: the operators.
        over_channels: whether this is a normalization over one axis, as that of layers.
    """

    function: str
    nodes: tuple[Node, ...]
    over_channels: bool = False


def composites(graph: Graph) -> list[Composite]:
    """Return the functions in several operators, without common operators."""
    result = list[Composite]()
    taken = set[Node]()
    # From the end: a normalization ends in its shift, and is one without it, too.
    for node in reversed(graph.nodes_of(_LAST)):
        if node in taken:
            continue
        composite = next(_ending_in(graph, node), None)
        if composite is not None and taken.isdisjoint(composite.nodes):
            result.append(composite)
            taken.update(composite.nodes)
    return result


def _ending_in(graph: Graph, node: Node) -> Iterator[Composite]:
    """Yield the functions whose result a node computes."""
    for function, pattern in _PATTERNS.items():
        match = pattern.match(graph, node.outputs[0])
        if match is not None:
            yield Composite(function, match.nodes, _is_over_one_axis(graph, match))


def _is_over_one_axis(graph: Graph, match: Match) -> bool:
    """Return whether a normalization to unit variance runs over a single axis."""
    squares = match.tensors.get("mean of squares")
    mean = graph.producer(squares) if squares else None
    return mean is not None and len(reduced_axes(graph, mean)) == 1


def _affine(pattern: Pattern) -> Pattern:
    """Return the pattern of a tensor that may be scaled and shifted by constants."""
    scaled = pattern * _CONSTANT
    return scaled + _CONSTANT | pattern + _CONSTANT | scaled | pattern


def _moments() -> Pattern:
    """Return the pattern of a normalization as TensorFlow writes it.

    ``x * a + (shift - mean * a)`` with ``a = scale / sqrt(variance + epsilon)``.
    """
    mean = op("ReduceMean", _X).named("mean")
    difference = (_X - mean | mean - _X).named("difference")
    square = difference * difference | op("Pow", difference, 2)
    squares = op("ReduceMean", square).named("mean of squares")
    inverse = _inverse(op("Sqrt", squares + scalar()))
    factor = (inverse * _CONSTANT | inverse).named("factor")
    moved = mean * factor
    return _X * factor + (_CONSTANT - moved) | _X * factor - moved


def _unit_length() -> Pattern:
    """Return the pattern of a tensor divided by its L2 norm."""
    square = _X * _X | op("Pow", _X, 2)
    total = op("ReduceSum", square) | op("ReduceSumSquare", _X)
    length = op("ReduceL2", _X) | op("Sqrt", _bounded(total))
    divisor = _bounded(length)
    spread = divisor | op("Expand", divisor)
    return _X / spread | _X * _inverse(spread) | _X * op("Expand", _inverse(divisor))


def _bounded(pattern: Pattern) -> Pattern:
    """Return the pattern of a tensor that may be kept from 0."""
    bounds = op("Clip", pattern) | op("Max", pattern, scalar()) | pattern + scalar()
    return bounds | pattern


def _inverse(pattern: Pattern) -> Pattern:
    return op("Reciprocal", pattern) | 1 / pattern


_PATTERNS = {
    "normalization": _affine(normalized(lambda graph, node: True)) | _moments(),
    "division by the L2 norm": _unit_length(),
    "Gelu": GELU | TANH_GELU,
}
#: Operators that a pattern ends in.
_LAST = ("Add", "Mul", "Div", "Sub")
