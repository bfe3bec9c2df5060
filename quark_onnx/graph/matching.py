"""Match small patterns of nodes: sole readers, other operands, constant numbers."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np

from quark_onnx.graph.constant_input import ConstantInput, private
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node


def only_reader(graph: Graph, tensor: str) -> Node | None:
    """Return the node that alone reads a tensor; the tensor may be an output as well."""
    readers = graph.consumers(tensor)
    return readers[0] if len(readers) == 1 else None


def only_use(graph: Graph, tensor: str, kind: str) -> Node | None:
    """Return the only reader of a tensor if it is of a kind, and if nothing else needs the tensor.

    A pass may change the tensor together with this reader: it is no output, no body reads it, and
    the reader reads it once.

    Args:
        graph: the graph.
        tensor: name of the tensor.
        kind: ``Node.kind`` of the reader.
    """
    node = only_reader(graph, tensor)
    if node is None or node.kind != kind or node.inputs.count(tensor) != 1:
        return None
    return node if private(graph, tensor) else None


def alone_reads(graph: Graph, node: Node, tensor: str) -> bool:
    """Return whether a node is the only reader of a tensor, which is no output of the graph."""
    return graph.consumers(tensor) == [node] and not graph.is_output(tensor)


def other_input(node: Node, tensor: str) -> str:
    """Return the operand of a node of two operands that is not the given one.

    Args:
        node: a node of exactly two inputs.
        tensor: name of one of them.
    """
    return node.inputs[1 - node.inputs.index(tensor)]


def constant_number(graph: Graph, tensor: str) -> float | None:
    """Return the value of a constant of one element, of any rank; None for other tensors."""
    value = graph.constant(tensor)
    if value is None or value.size != 1:
        return None
    return float(value.reshape(()))


def setting(
    graph: Graph, node: Node, name: str, place: int, default: Any = None
) -> Any:
    """Return a setting that is an attribute in early opsets and an input in later ones.

    An omitted setting has the default; a computed one is None.

    Args:
        graph: the graph.
        node: the node.
        name: name of the attribute.
        place: index of the input.
        default: value if the node has neither.

    Returns:
        An array for an input, the attribute's value otherwise.
    """
    if node.input(place):
        return graph.constant(node.input(place))
    return node.attribute(name, default)


def reduced_axes(graph: Graph, node: Node) -> Set[int]:
    """Return the axes of a reduction, counted from the front; empty if computed, or for all axes.

    Negative axes of an unknown rank stay negative.

    Args:
        graph: the graph.
        node: a reduction, with axes as an attribute or an input.
    """
    given = setting(graph, node, "axes", 1, ())
    if given is None:
        return set()
    axes = np.ravel(given).astype(int)
    rank = len(graph.sizes(node.inputs[0]))
    # ``sizes`` is empty for an unknown rank.
    if rank:
        axes = axes % rank
    return set(axes.tolist())


def is_along_last_axis(graph: Graph, node: Node, default: int) -> bool:
    """Return whether the attribute ``axis`` of a node is the last axis of its first input.

    Args:
        graph: the graph.
        node: any node.
        default: axis if the attribute is absent.
    """
    # For an unknown rank, -1 is compared with -1.
    rank = len(graph.sizes(node.input(0)))
    return node.attribute("axis", default) in (-1, rank - 1)


def constant_operand(graph: Graph, tensor: str, kind: str) -> ConstantInput | None:
    """Return the constant operand of the only reader of a tensor; otherwise None.

    Args:
        graph: the graph.
        tensor: name of the tensor.
        kind: an operator with two operands, such as Add.
    """
    node = only_use(graph, tensor, kind)
    if node is None or not graph.is_constant(other_input(node, tensor)):
        return None
    return ConstantInput(node, 1 - node.inputs.index(tensor))


def keeps_range(graph: Graph, pad: Node) -> bool:
    """Return whether a Pad adds zeros, or values of the tensor itself."""
    if pad.attribute("mode", "constant") != "constant":
        return True
    value = setting(graph, pad, "value", 2, 0.0)
    return value is not None and not np.any(value)


def counts_padding(node: Node) -> bool:
    """Return whether an AveragePool has padding, and counts its zeros."""
    pads = node.attribute("auto_pad", "NOTSET").startswith("SAME") or any(
        node.attribute("pads", [])
    )
    return pads and bool(node.attribute("count_include_pad", 0))
