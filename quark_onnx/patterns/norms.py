"""Recognise normalizations over the last axis or over images, fused or decomposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quark_onnx.containers import excluding, present
from quark_onnx.graph.constant_input import ConstantInput, is_number, private
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.matching import (
    alone_reads,
    constant_number,
    only_reader,
    only_use,
    reduced_axes,
)
from quark_onnx.graph.node import Node

#: Normalizations, with the indices of scale and, if supported, shift among their inputs.
SCALE = {
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "com.microsoft::SkipLayerNormalization": (2, 3),
    "com.microsoft::SkipSimplifiedLayerNormalization": (2,),
}
_SKIP = "com.microsoft::Skip"


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


_LAST = _Axes(
    lambda rank: (rank - 1,),
    lambda shape, rank: len(shape) == 1,
)
_IMAGE = _Axes(
    lambda rank: tuple(range(2, rank)) if rank > 3 else (),
    lambda shape, rank: (
        rank - 1 <= len(shape) <= rank
        and all(size == 1 for size in (*shape[: 1 - rank], *shape[2 - rank :]))
    ),
)


def norms(graph: Graph) -> list[Norm]:
    """Return the normalizations over the last axis of a graph."""
    candidates = []
    for node in graph.nodes:
        if node.kind in SCALE:
            candidates.append(_operator(graph, node))
        else:
            candidates.append(_parts(graph, node, _LAST))
    return present(candidates)


def image_norms(graph: Graph) -> list[Norm]:
    """Return the decomposed normalizations over images, per channel."""
    candidates = [_parts(graph, node, _IMAGE) for node in graph.nodes]
    return present(candidates)


def _operator(graph: Graph, node: Node) -> Norm | None:
    rank = len(graph.sizes(node.input(0)))
    last = node.attribute("axis", -1) in (-1, rank - 1)
    places = list(filter(node.input, SCALE[node.kind]))
    stored = [ConstantInput(node, place) for place in places]
    sources = node.inputs[:1]
    statistics = node.outputs[1:]
    bias = None
    if node.kind.startswith(_SKIP):
        # the last output is the sum of the sources, which other nodes may read
        sources = (*node.inputs[:2], *filter(None, node.outputs[3:4]))
        statistics = node.outputs[1:3]
        # Inputs in com.microsoft: input, skip, gamma, beta and bias; the simplified form has no
        # beta.
        place = 4 if node.kind.endswith("SkipLayerNormalization") else 3
        if node.input(place):
            bias = ConstantInput(node, place)
            places.append(place)
    constant = all(graph.is_constant(node.input(place)) for place in places)
    # Readers of the mean or the deviation would lose them with the normalization.
    if not last or not constant or any(_is_used(graph, name) for name in statistics):
        return None
    scale, shift = (*stored, None, None)[:2]
    return Norm(
        node.name,
        sources,
        node.outputs[0],
        frozenset({node}),
        node.op_type in ("LayerNormalization", "SkipLayerNormalization"),
        scale,
        shift,
        bias,
        epsilon=float(node.attribute("epsilon", 1e-5)),
    )


def _is_used(graph: Graph, tensor: str) -> bool:
    if not tensor:
        return False
    return bool(graph.consumers(tensor)) or graph.is_output(tensor)


def _parts(graph: Graph, mean: Node, axes: _Axes) -> Norm | None:
    """Return the decomposed normalization whose mean of squares a node computes."""
    if mean.kind != "ReduceMean" or not _is_over(graph, mean, axes):
        return None
    square = graph.producer(mean.inputs[0])
    if square is None or not _squares(graph, square):
        return None
    value = square.inputs[0]
    root, inner, epsilon = _root(graph, mean)
    result = _normalizing(graph, root, value)
    if root is None or result is None:
        return None
    source, nodes, centered = _center(graph, value, axes)
    # Tensors that exist only inside of the normalization: another reader would see them vanish.
    inner = [*inner, square.outputs[0], root.outputs[0]]
    if centered:
        inner.append(value)
    if not _is_closed(
        graph,
        inner,
        {square, mean, result, *nodes},
    ):
        return None
    bare = result.outputs[0]
    scale, scaled = _constant(graph, bare, "Mul", axes)
    shift, shifted = _constant(graph, scaled, "Add", axes)
    return Norm(
        mean.name,
        (source,),
        shifted,
        frozenset(nodes if centered else (square, result)),
        centered,
        scale,
        shift,
        bare=bare,
        epsilon=epsilon,
    )


def _normalizing(graph: Graph, root: Node | None, value: str) -> Node | None:
    """Return the node that divides a tensor by a root, or None."""
    if root is None:
        return None
    for node in graph.consumers(root.outputs[0]):
        if node.kind in ("Mul", "Div") and value in node.inputs:
            return node if _divides_by(node, root, value) else None
    return None


def _divides_by(node: Node, root: Node, value: str) -> bool:
    """Return whether a node divides a tensor by a root, or multiplies it by the inverse of one."""
    if node.inputs.count(value) != 1:
        return False
    if root.kind == "Sqrt":
        return node.kind == "Div" and node.inputs[0] == value
    return node.kind == "Mul"


def _is_closed(graph: Graph, inner: list[str], members: set[Node]) -> bool:
    """Return whether the nodes of a normalization are the only readers of its tensors."""
    for tensor in inner:
        for reader in graph.consumers(tensor):
            if reader not in members and not _between(graph, reader, inner):
                return False
    return all(private(graph, tensor) for tensor in inner)


def _is_over(graph: Graph, node: Node, axes: _Axes) -> bool:
    reduced = reduced_axes(graph, node)
    wanted = axes.of(len(graph.sizes(node.inputs[0])))
    is_kept = bool(node.attribute("keepdims", 1))
    return is_kept and reduced == {*wanted} and bool(reduced)


def _squares(graph: Graph, node: Node) -> bool:
    if node.kind == "Pow":
        return is_number(graph, node.inputs[1], 2)
    return node.kind == "Mul" and node.inputs[0] == node.inputs[1]


def _root(graph: Graph, mean: Node) -> tuple[Node | None, list[str], float]:
    """Return the node that computes the root of a mean plus epsilon, or the inverse.

    Further results are the tensors between, and epsilon. The node is None if there is none.
    """
    path = [mean.outputs[0]]
    epsilon = 0.0
    # Up to two summands before the root.
    for _ in range(3):
        node = only_reader(graph, path[-1])
        if node is None:
            break
        if node.kind == "Sqrt":
            path.append(node.outputs[0])
            return _inverse(graph, path[-1]) or node, path, epsilon
        if _is_inverse_root(graph, node, path[-1]):
            return node, path, epsilon
        summand = _summand(graph, node, path)
        if summand is None:
            break
        path.append(node.outputs[0])
        epsilon += summand
    return None, path, epsilon


def _summand(graph: Graph, node: Node, path: list[str]) -> float | None:
    """Return the constant number that an Add adds to the last tensor, or None."""
    others = excluding(node.inputs, path)
    if node.kind != "Add" or len(others) != 1:
        return None
    return constant_number(graph, others[0])


def _is_inverse_root(graph: Graph, node: Node, tensor: str) -> bool:
    if node.kind != "Pow" or node.inputs[0] != tensor:
        return False
    return is_number(graph, node.inputs[1], -0.5)


def _inverse(graph: Graph, tensor: str) -> Node | None:
    """Return the only reader of a tensor if it computes the inverse, or None."""
    node = only_reader(graph, tensor)
    if node is None:
        return None
    inverts = node.kind == "Reciprocal" or _one_over(graph, node, tensor)
    return node if inverts else None


def _one_over(graph: Graph, node: Node, tensor: str) -> bool:
    return (
        node.kind == "Div"
        and node.inputs[1] == tensor
        and is_number(graph, node.inputs[0], 1)
    )


def _center(graph: Graph, value: str, axes: _Axes) -> tuple[str, set[Node], bool]:
    """Return the tensor before centering, the nodes that read the tensor, and True.

    Without such a subtraction: the tensor itself, no nodes, and False.
    """
    not_centered = (value, set[Node](), False)
    node = graph.producer_of_kind(value, {"Sub"})
    if node is None:
        return not_centered
    mean = graph.producer_of_kind(node.inputs[1], {"ReduceMean"})
    if mean is None or not _is_over(graph, mean, axes):
        return not_centered
    result = mean.outputs[0]
    if mean.inputs[0] != node.inputs[0] or graph.captured(result):
        return not_centered
    if not alone_reads(graph, node, result):
        return not_centered
    return node.inputs[0], {node, mean}, True


def _between(graph: Graph, reader: Node, inner: list[str]) -> bool:
    """Return whether a node computes inner tensors only."""
    return all(name in inner for name in reader.outputs)


def _constant(
    graph: Graph,
    tensor: str,
    kind: str,
    axes: _Axes,
) -> tuple[ConstantInput | None, str]:
    """Return the constant that the only reader combines with a tensor, and the result.

    Without such a reader: None, and the tensor.
    """
    node = only_use(graph, tensor, kind)
    if node is None:
        return None, tensor
    stored = ConstantInput(node, 1 - node.inputs.index(tensor))
    name = node.inputs[stored.index]
    rank = len(graph.sizes(tensor))
    if graph.is_constant(name) and axes.channels(graph.sizes(name), rank):
        return stored, node.outputs[0]
    return None, tensor
