"""Recognise normalizations over the last axis or over images, fused or decomposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose, prod

from quark_onnx.graph.constant_input import ConstantInput
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.matching import (
    constant_number,
    constant_operand,
    is_along_last_axis,
    reduced_axes,
)
from quark_onnx.graph.node import Node
from quark_onnx.graph.pattern import Match, Pattern, op, scalar, tensor
from quark_onnx.graph.shapes import known_sizes

#: Normalizations, with the indices of scale and, if supported, shift among their inputs.
SCALE = {
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "com.microsoft::SkipLayerNormalization": (2, 3),
    "com.microsoft::SkipSimplifiedLayerNormalization": (2,),
}
#: Of these, operators that add up their first two inputs and a bias, with the index of the bias.
_ADDING = {
    "com.microsoft::SkipLayerNormalization": 4,
    "com.microsoft::SkipSimplifiedLayerNormalization": 3,
}
#: Normalizations that subtract the mean.
_CENTERING = ("LayerNormalization", "SkipLayerNormalization")


@dataclass(frozen=True)
class Norm:
    """A normalization to unit variance or unit root mean square.

    Attributes:
        name: name of a node, for messages.
        sources: the normalized tensor; of several tensors, their sum is normalized. The last one
            may be an output that holds the sum.
        result: the normalized tensor, scaled and shifted.
        nodes: the nodes that read the sources.
        centered: the mean is subtracted first.
        scale: constant factor, or None.
        shift: constant summand, or None.
        bias: constant that is added to the sources, or None.
        bare: the tensor before scale and shift, if it has a name.
        epsilon: summand of the mean of the squares.
    """

    name: str
    sources: tuple[str, ...]
    result: str
    nodes: frozenset[Node]
    centered: bool
    scale: ConstantInput | None
    shift: ConstantInput | None
    bias: ConstantInput | None = None
    bare: str = ""
    epsilon: float = 0.0


@dataclass(frozen=True)
class _Axes:
    """The axes of a mean.

    Attributes:
        of: returns the axes for a rank; none if there is no such mean.
        channels: returns whether a constant of a shape has a value per channel of a tensor of a
            rank.
    """

    of: Callable[[int], tuple[int, ...]]
    channels: Callable[[Sequence[object], int], bool]

    def are_reduced(self, graph: Graph, node: Node) -> bool:
        """Return whether a reduction runs over the axes, and keeps them with size 1."""
        # For an unknown rank the last axis is -1, as ``reduced_axes`` leaves it.
        wanted = self.of(len(graph.sizes(node.inputs[0])))
        is_kept = bool(node.attribute("keepdims", 1))
        return is_kept and bool(wanted) and reduced_axes(graph, node) == {*wanted}


def _unchanged(pattern: Pattern) -> Pattern:
    return pattern


def normalized(
    are_reduced: Callable[[Graph, Node], bool],
    between: Callable[[Pattern], Pattern] = _unchanged,
) -> Pattern:
    """Return the pattern of a normalized tensor x, which is centered first or not.

    Exporters write ``v / sqrt(variance + epsilon)`` in the forms below, with up to two summands.

    Args:
        are_reduced: returns whether a reduction has the axes of the normalization.
        between: returns the pattern of a statistic on the way to its reader, which may move it.
    """
    x = tensor("x")
    mean = mean_of(x, are_reduced).named("mean")
    centered = (x - between(mean)).named("v")
    # Where other nodes read the mean, the centered tensor is the source of the normalization.
    v = (x - between(mean) | x).named("v")
    squares = mean_of(square_of(v), are_reduced).named("mean of squares")
    # torch.std subtracts the mean for itself.
    again = (x - between(mean_of(x, are_reduced))).named("centered again")
    deviation = mean_of(square_of(again), are_reduced).named("mean of squares")
    moment = mean_of(square_of(x), are_reduced).named("mean of squares")
    variance = deviation | difference_of_moments(moment, mean)
    return _divided(v, squares, between) | _divided(centered, variance, between)


def _divided(
    v: Pattern, variance: Pattern, between: Callable[[Pattern], Pattern]
) -> Pattern:
    """Return the pattern of a tensor divided by the root of a variance."""
    moved = between(variance)
    shifted = moved + scalar("epsilon")
    shifted = moved | shifted | shifted + scalar("more epsilon")
    root = op("Sqrt", shifted)
    inverse = op("Reciprocal", root) | 1 / root | op("Pow", shifted, -0.5)
    return v / between(root) | v * between(inverse)


def square_of(pattern: Pattern) -> Pattern:
    """Return the pattern of the square of a tensor, which has a name."""
    return pattern * pattern | op("Pow", pattern, 2)


def mean_of(pattern: Pattern, are_reduced: Callable[[Graph, Node], bool]) -> Pattern:
    """Return the pattern of a mean: an operator, or a sum divided by the number of elements."""
    total = op("ReduceSum", pattern, where=are_reduced)
    divided = op(("Mul", "Div"), total, scalar(), where=_divides_by_count)
    return op("ReduceMean", pattern, where=are_reduced) | divided


def difference_of_moments(moment: Pattern, mean: Pattern) -> Pattern:
    """Return the pattern of a variance, the mean of squares less the squared mean.

    Rounding can make the difference negative, against which some exporters bound it.
    """
    difference = moment - square_of(mean)
    return op("Max", difference, 0) | op("Relu", difference) | difference


def _divides_by_count(graph: Graph, node: Node) -> bool:
    """Return whether a node divides a ReduceSum by the number of the elements it adds up."""
    total, number = node.inputs
    if graph.is_constant(total):
        total, number = number, total
    factor = constant_number(graph, number)
    reduction = graph.producer(total)
    if not factor or reduction is None:
        return False
    if node.kind == "Div":
        factor = 1 / factor
    sizes = graph.sizes(reduction.inputs[0])
    axes = reduced_axes(graph, reduction)
    if not sizes or not axes:
        return False
    added = known_sizes([sizes[axis] for axis in axes])
    # The reciprocal was rounded, to float16 at worst.
    return added is not None and isclose(factor * prod(added), 1, rel_tol=1e-3)


#: The mean of a tensor over any axes.
MEAN = mean_of(tensor(), lambda graph, node: True)
_LAST = _Axes(lambda rank: (rank - 1,), lambda shape, rank: len(shape) == 1)
_IMAGE = _Axes(
    lambda rank: tuple(range(2, rank)) if rank > 3 else (),
    lambda shape, rank: (
        rank - 1 <= len(shape) <= rank
        and all(size == 1 for size in (*shape[: 1 - rank], *shape[2 - rank :]))
    ),
)
#: Operators that divide by the root.
_LAST_NODES = ("Mul", "Div")
_NORMALIZED_LAST = normalized(_LAST.are_reduced)
_NORMALIZED_IMAGE = normalized(_IMAGE.are_reduced)


def norms(graph: Graph) -> list[Norm]:
    """Return the normalizations over the last axis of a graph."""
    candidates = []
    for node in graph.nodes:
        if node.kind in SCALE:
            candidates.append(_operator(graph, node))
        elif node.kind in _LAST_NODES:
            candidates.append(_decomposed(graph, node, _NORMALIZED_LAST, _LAST))
    return [candidate for candidate in candidates if candidate is not None]


def image_norms(graph: Graph) -> list[Norm]:
    """Return the decomposed normalizations over images, per channel."""
    candidates = [
        _decomposed(graph, node, _NORMALIZED_IMAGE, _IMAGE)
        for node in graph.nodes_of(_LAST_NODES)
    ]
    return [candidate for candidate in candidates if candidate is not None]


def _operator(graph: Graph, node: Node) -> Norm | None:
    """Return the normalization of an operator of ``SCALE`` with constant parameters.

    None for another axis, computed parameters, or statistics that other nodes read.
    """
    if not is_along_last_axis(graph, node, -1):
        return None
    sources = node.inputs[:1]
    statistics = node.outputs[1:]
    if node.kind in _ADDING:
        # the last output is the sum of the sources, which other nodes may read
        sources = (*node.inputs[:2], *filter(None, node.outputs[3:4]))
        statistics = node.outputs[1:3]
    # Readers of the mean or the deviation would lose them with the normalization.
    if any(_is_used(graph, name) for name in statistics):
        return None
    stored = [_parameter(node, index) for index in SCALE[node.kind]]
    # RMS normalizations have no shift.
    scale, shift = (*stored, None)[:2]
    bias = _parameter(node, _ADDING.get(node.kind))
    for parameter in (scale, shift, bias):
        if parameter and not graph.is_constant(node.input(parameter.index)):
            return None
    return Norm(
        node.name,
        sources,
        node.outputs[0],
        frozenset({node}),
        # ``op_type`` is the kind without a domain, as in _CENTERING.
        node.op_type in _CENTERING,
        scale,
        shift,
        bias,
        epsilon=float(node.attribute("epsilon", 1e-5)),
    )


def _parameter(node: Node, index: int | None) -> ConstantInput | None:
    """Return an input; None if it is omitted, or if the operator has no such input."""
    if index is None or not node.input(index):
        return None
    return ConstantInput(node, index)


def _is_used(graph: Graph, tensor: str) -> bool:
    """Return whether a tensor is read or an output; False for an omitted result."""
    if not tensor:
        return False
    return bool(graph.consumers(tensor)) or graph.is_output(tensor)


def _decomposed(graph: Graph, node: Node, pattern: Pattern, axes: _Axes) -> Norm | None:
    """Return the decomposed normalization whose last node is the given one.

    Args:
        node: a Mul or Div, which may be the last node of ``pattern``.
        pattern: the pattern of a normalized tensor without scale and shift.
        axes: the axes of the pattern's means.

    Returns:
        The normalization, with a constant scale and shift after the node; None without a match.
    """
    bare = node.outputs[0]
    # The readers of inner tensors are checked by ``match``: none outside of the formula.
    match = pattern.match(graph, bare)
    if match is None:
        return None
    source = match["x"]
    squares = graph.producer(match["mean of squares"])
    assert squares is not None
    scale, scaled = _constant(graph, bare, "Mul", axes)
    shift, shifted = _constant(graph, scaled, "Add", axes)
    return Norm(
        squares.name,
        (source,),
        shifted,
        # Centered: ReduceMean and Sub read the source; otherwise the square and the quotient do.
        frozenset(member for member in match.nodes if source in member.inputs),
        match["v"] != source,
        scale,
        shift,
        bare=bare,
        epsilon=_epsilon(graph, match),
    )


def _epsilon(graph: Graph, match: Match) -> float:
    """Return the sum of the constants that are added to the mean of squares."""
    summands = [
        constant_number(graph, match[name])
        for name in ("epsilon", "more epsilon")
        if name in match.tensors
    ]
    # None for other constants than of one element, which the pattern does not match.
    return sum((summand for summand in summands if summand is not None), 0.0)


def _constant(
    graph: Graph, tensor: str, kind: str, axes: _Axes
) -> tuple[ConstantInput | None, str]:
    """Return the constant that the only reader combines with a tensor, and the result.

    Without such a reader: None, and the tensor.

    Args:
        kind: "Mul" for a scale, "Add" for a shift.
        axes: the axes of the normalization, which decide the possible shapes of the constant.
    """
    # The Mul, and then the Add, belong to the normalization only as its sole readers.
    stored = constant_operand(graph, tensor, kind)
    rank = len(graph.sizes(tensor))
    if stored is None or not axes.channels(stored.sizes(graph), rank):
        return None, tensor
    return stored, stored.node.outputs[0]
