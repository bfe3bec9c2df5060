"""Functions that exporters write as several operators, although runtimes have one for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.matching import reduced_axes
from quark_onnx.graph.node import Node
from quark_onnx.graph.pattern import Match, Pattern, op, scalar, tensor
from quark_onnx.patterns.gelu import GELU, TANH_GELU
from quark_onnx.patterns.norms import (
    difference_of_moments,
    mean_of,
    normalized,
    square_of,
)

_X = tensor("x")
_CONSTANT = tensor(where=Graph.is_constant)
#: Operators that give a statistic the shape of what it is combined with.
_MOVING = frozenset({"Expand", "Reshape", "Squeeze", "Unsqueeze"})
_REDUCING = ("ReduceMean", "ReduceSum")


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
    patterns = {
        function: pattern
        for function, (pattern, needed) in _PATTERNS.items()
        if graph.nodes_of(needed)
    }
    result = list[Composite]()
    taken = set[Node]()
    # From the end: a normalization ends in its shift, and is one without it, too.
    for node in reversed(graph.nodes_of(_LAST)):
        if node in taken:
            continue
        composite = next(_ending_in(graph, node, patterns), None)
        if composite is not None and taken.isdisjoint(composite.nodes):
            result.append(composite)
            taken.update(composite.nodes)
    return result


def _ending_in(
    graph: Graph, node: Node, patterns: Mapping[str, Pattern]
) -> Iterator[Composite]:
    """Yield the functions whose result a node computes."""
    for function, pattern in patterns.items():
        match = pattern.match(graph, node.outputs[0])
        if match is not None:
            yield Composite(function, match.nodes, _is_over_one_axis(graph, match))


def _is_over_one_axis(graph: Graph, match: Match) -> bool:
    """Return whether a normalization to unit variance runs over a single axis."""
    reductions = [node for node in match.nodes if node.kind in _REDUCING]
    return "mean of squares" in match.tensors and all(
        len(reduced_axes(graph, node)) == 1 for node in reductions
    )


def _any_axes(graph: Graph, node: Node) -> bool:
    return True


def _affine(pattern: Pattern) -> Pattern:
    """Return the pattern of a tensor that may be scaled and shifted by constants."""
    scaled = pattern * _CONSTANT
    return scaled + _CONSTANT | pattern + _CONSTANT | scaled | pattern


def _step(pattern: Pattern) -> Pattern:
    """Return the pattern of a statistic that one operator moves, bounds or scales."""
    bounded = op({"Clip", "Relu"}, pattern) | op({"Max", "Min"}, pattern, scalar())
    scaled = pattern * _CONSTANT | pattern / _CONSTANT
    return op(_MOVING, pattern) | bounded | scaled | pattern + scalar()


def _between(pattern: Pattern) -> Pattern:
    """Return the pattern of a statistic that up to three operators move, bound or scale."""
    once = _step(pattern)
    twice = _step(once)
    return pattern | once | twice | _step(twice)


def _moments() -> Pattern:
    """Return the pattern of a normalization as TensorFlow writes it.

    ``x * a + (shift - mean * a)`` with ``a = scale / sqrt(variance + epsilon)``.
    """
    mean = mean_of(_X, _any_axes).named("mean")
    difference = (_X - mean | mean - _X).named("difference")
    squares = mean_of(square_of(difference), _any_axes).named("mean of squares")
    moment = mean_of(square_of(_X), _any_axes).named("mean of squares")
    variance = squares | difference_of_moments(moment, mean)
    inverse = _inverse(op("Sqrt", variance + scalar()))
    factor = (inverse * _CONSTANT | inverse).named("factor")
    moved = mean * factor
    return _X * factor + (_CONSTANT - moved) | _X * factor - moved


def _unit_length() -> Pattern:
    """Return the pattern of a tensor divided by its L2 norm."""
    total = op("ReduceSum", square_of(_X)) | op("ReduceSumSquare", _X)
    length = op("ReduceL2", _X) | op("Sqrt", _bounded(total))
    divisor = _bounded(length)
    spread = divisor | op("Expand", divisor)
    return _X / spread | _X * _inverse(spread) | _X * op("Expand", _inverse(divisor))


def _softmax() -> Pattern:
    """Return the pattern of exp(x - max(x)) divided by its sum."""
    shifted = _X - _between(op("ReduceMax", _X)) | _X
    exponentials = op("Exp", shifted).named("exponentials")
    total = _between(op("ReduceSum", exponentials))
    return exponentials / total | exponentials * _inverse(total)


def _bounded(pattern: Pattern) -> Pattern:
    """Return the pattern of a tensor that may be kept from 0."""
    bounds = op("Clip", pattern) | op("Max", pattern, scalar()) | pattern + scalar()
    return bounds | pattern


def _inverse(pattern: Pattern) -> Pattern:
    return op("Reciprocal", pattern) | 1 / pattern


#: The pattern of each function, and operators of which it has one: most graphs have none of them,
#: and matching takes long.
_PATTERNS = {
    "normalization": (
        _affine(normalized(_any_axes, _between)) | _moments(),
        ("Sqrt", "Pow"),
    ),
    "division by the L2 norm": (
        _unit_length(),
        ("ReduceL2", "ReduceSum", "ReduceSumSquare"),
    ),
    "Softmax": (_softmax(), ("Exp",)),
    "Gelu": (GELU | TANH_GELU, ("Erf", "Tanh")),
}
#: Operators that a pattern ends in.
_LAST = ("Add", "Mul", "Div", "Sub")
