"""Match small patterns of nodes: sole readers, other operands, constant numbers."""

from __future__ import annotations

from quark_onnx.graph.constant_input import private
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
    """
    node = only_reader(graph, tensor)
    if node is None or node.kind != kind or node.inputs.count(tensor) != 1:
        return None
    return node if private(graph, tensor) else None


def other_input(node: Node, tensor: str) -> str:
    """Return the operand of a node of two operands that is not the given one."""
    return node.inputs[1 - node.inputs.index(tensor)]


def constant_number(graph: Graph, tensor: str) -> float | None:
    """Return the value of a constant of one element, of any rank; None for other tensors."""
    value = graph.constant(tensor)
    if value is None or value.size != 1:
        return None
    return float(value.reshape(()))
