"""Normalizations over the last axis or over images, as one operator or in parts, as exporters write
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quark_onnx.graph.constant_input import ConstantInput, is_number, private
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node

#: Normalizations, where the scale stands among their inputs, and the shift, if they may have one.
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
        name: of a node, for messages.
        sources: what is normalized; of several tensors, their sum. The last one may be an output
            that holds the sum.
        result: the normalized tensor, scaled and shifted.
        nodes: those that read the sources.
        centered: the mean is subtracted first. scale, shift: the constants that it is multiplied
        by, and that are added; None where there are none. bias: a constant that is added to the
        sources. bare: the tensor before scale and shift, where it has a name. epsilon: what is
        added to the mean of the squares.
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
    """What a mean is over.

    Attributes:
        of: the axes, of a tensor's rank; none where there is no such mean.
        channels: whether a constant of a shape has a number for each channel of a tensor of a rank.
    """

    of: Callable[[int], tuple[int, ...]]
    channels: Callable[[Sequence[object], int], bool]


_LAST = _Axes(lambda rank: (rank - 1,), lambda shape, rank: len(shape) == 1)
_IMAGE = _Axes(
    lambda rank: tuple(range(2, rank)) if rank > 3 else (),
    lambda shape, rank: (
        rank - 1 <= len(shape) <= rank
        and all(size == 1 for size in (*shape[: 1 - rank], *shape[2 - rank :]))
    ),
)


def norms(graph: Graph) -> list[Norm]:
    """The normalizations over the last axis of a graph."""
    found = (
        _operator(graph, node) if node.kind in SCALE else _parts(graph, node, _LAST)
        for node in graph.nodes
    )
    return [norm for norm in found if norm is not None]


def image_norms(graph: Graph) -> list[Norm]:
    """The normalizations over images, channel by channel, that are written in parts."""
    return [
        norm
        for node in graph.nodes
        if (norm := _parts(graph, node, _IMAGE)) is not None
    ]


def _operator(graph: Graph, node: Node) -> Norm | None:
    rank = len(graph.shape(node.input(0)) or ())
    skip = node.kind.startswith(_SKIP)
    places = [place for place in SCALE[node.kind] if node.input(place)]
    last = node.attribute("axis", -1) in (-1, rank - 1)
    statistics = node.outputs[1:3] if skip else node.outputs[1:]
    if not last or not all(graph.is_constant(node.input(place)) for place in places):
        return None
    if any(
        graph.consumers(name) or graph.is_output(name) for name in statistics if name
    ):
        return None
    stored = [ConstantInput(node, place) for place in places]
    more = 4 if node.kind.endswith("SkipLayerNormalization") else 3
    bias = ConstantInput(node, more) if skip and node.input(more) else None
    if bias is not None and not graph.is_constant(node.input(more)):
        return None
    sources = (
        (*node.inputs[:2], *filter(None, node.outputs[3:4]))
        if skip
        else node.inputs[:1]
    )
    centered = node.op_type in ("LayerNormalization", "SkipLayerNormalization")
    scale, shift = (*stored, None, None)[:2]
    epsilon = float(node.attribute("epsilon", 1e-5))
    return Norm(
        node.name,
        sources,
        node.outputs[0],
        frozenset({node}),
        centered,
        scale,
        shift,
        bias,
        epsilon=epsilon,
    )


def _parts(graph: Graph, mean: Node, axes: _Axes) -> Norm | None:  # noqa: PLR0911
    """The normalization whose mean of squares this node computes."""
    if mean.kind != "ReduceMean" or not _is_over(graph, mean, axes):
        return None
    square = graph.producer(mean.inputs[0])
    if square is None or not _squares(graph, square):
        return None
    value = square.inputs[0]
    root, inner, epsilon = _root(graph, mean)
    if root is None:
        return None
    result = next(
        (
            n
            for n in graph.consumers(root.outputs[0])
            if n.kind in ("Mul", "Div") and value in n.inputs
        ),
        None,
    )
    if (
        result is None
        or (result.kind == "Div") != (root.kind == "Sqrt")
        or result.inputs.count(value) != 1
    ):
        return None
    if result.kind == "Div" and result.inputs[0] != value:
        return None
    source, nodes, centered = _center(graph, value, axes)
    inner = [*inner, square.outputs[0], root.outputs[0], *([value] if centered else [])]
    members = {square, mean, result, *nodes}
    if any(
        reader not in members and not _between(graph, reader, inner)
        for t in inner
        for reader in graph.consumers(t)
    ):
        return None
    if not all(private(graph, tensor) for tensor in inner):
        return None
    bare = result.outputs[0]
    scale, scaled = _constant(graph, bare, "Mul", axes)
    shift, shifted = _constant(graph, scaled, "Add", axes)
    own = frozenset(nodes) if centered else frozenset({square, result})
    return Norm(
        mean.name,
        (source,),
        shifted,
        own,
        centered,
        scale,
        shift,
        bare=bare,
        epsilon=epsilon,
    )


def _is_over(graph: Graph, node: Node, axes: _Axes) -> bool:
    given = graph.constant(node.input(1)) if node.input(1) else node.attribute("axes")
    rank = len(graph.shape(node.inputs[0]) or ())
    wanted, kept = axes.of(rank), bool(node.attribute("keepdims", 1))
    if given is None or not kept or not wanted:
        return False
    return sorted(
        axis % rank if rank else axis for axis in np.asarray(given).ravel().tolist()
    ) == list(wanted)


def _squares(graph: Graph, node: Node) -> bool:
    if node.kind == "Pow":
        return is_number(graph, node.inputs[1], 2)
    return node.kind == "Mul" and node.inputs[0] == node.inputs[1]


def _root(graph: Graph, mean: Node) -> tuple[Node | None, list[str], float]:
    """The node that computes the root of a mean plus epsilon, or one over it.

    The tensors on the way; epsilon.
    """
    way, node, reciprocal, epsilon = [mean.outputs[0]], mean, False, 0.0
    for _ in range(3):
        readers = graph.consumers(node.outputs[0])
        if len(readers) != 1:
            break
        node = readers[0]
        others = [name for name in node.inputs if name not in way]
        known = graph.constant(others[0]) if len(others) == 1 else None
        single = known is not None and known.size == 1
        if node.kind == "Add" and single:
            assert known is not None
            way.append(node.outputs[0])
            epsilon += float(known.reshape(()))
        elif (
            node.kind == "Pow"
            and node.inputs[0] == way[-1]
            and is_number(graph, node.inputs[1], -0.5)
        ):
            return node, way, epsilon
        elif node.kind == "Sqrt":
            way.append(node.outputs[0])
            behind = graph.consumers(node.outputs[0])
            inverse = behind[0] if len(behind) == 1 else None
            reciprocal = inverse is not None and (
                inverse.kind == "Reciprocal" or _one_over(graph, inverse, way[-1])
            )
            return (inverse if reciprocal else node), way, epsilon
        else:
            break
    return None, way, epsilon


def _one_over(graph: Graph, node: Node, tensor: str) -> bool:
    return (
        node.kind == "Div"
        and node.inputs[1] == tensor
        and is_number(graph, node.inputs[0], 1)
    )


def _center(graph: Graph, value: str, axes: _Axes) -> tuple[str, set[Node], bool]:
    """What the mean is subtracted from to get a tensor, the nodes that read it, and whether there
    is such a thing.
    """
    node = graph.producer(value)
    mean = (
        graph.producer(node.inputs[1])
        if node is not None and node.kind == "Sub"
        else None
    )
    if (
        node is None
        or mean is None
        or mean.kind != "ReduceMean"
        or not _is_over(graph, mean, axes)
    ):
        return value, set(), False
    alone = graph.consumers(mean.outputs[0]) == [node] and private(
        graph,
        mean.outputs[0],
    )
    if mean.inputs[0] != node.inputs[0] or not alone:
        return value, set(), False
    return node.inputs[0], {node, mean}, True


def _between(graph: Graph, reader: Node, inner: list[str]) -> bool:
    """Whether a node computes nothing but one of the tensors on the way."""
    return all(name in inner for name in reader.outputs)


def _constant(
    graph: Graph,
    tensor: str,
    kind: str,
    axes: _Axes,
) -> tuple[ConstantInput | None, str]:
    """The constant vector that a tensor is combined with before anything else reads it, and the
    result.
    """
    readers = graph.consumers(tensor)
    if len(readers) != 1 or readers[0].kind != kind or not private(graph, tensor):
        return None, tensor
    node = readers[0]
    stored = ConstantInput(node, 1 - node.inputs.index(tensor))
    name, rank = node.inputs[stored.index], len(graph.shape(tensor) or ())
    if not graph.is_constant(name) or not axes.channels(graph.shape(name) or (), rank):
        return None, tensor
    return stored, node.outputs[0]
