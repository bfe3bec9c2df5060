"""dynamic: keep a scale that is computed at each run only where an integer operator uses it."""

from __future__ import annotations

from collections.abc import Collection

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.bodies import bodies, put_back
from quark_onnx.graph.node import DEQUANTIZE
from quark_onnx.plan.existing import existing


def quantized_before(graph: Graph, where: str = "") -> frozenset[str]:
    """Return the names of nodes that touched codes before this run, those in bodies included.

    Args:
        where: prefix of the names; a node of a body has the path to the body in front of its name,
            as in ``fuse``.
    """
    names = {where + name for name in existing(graph, keep=True)}
    for body in bodies(graph):
        inner = Graph(body.model)
        names |= quantized_before(inner, f"{where}{body.node.name}/{body.attribute}/")
    return frozenset(names)


def read_floats(graph: Graph, before: Collection[str], where: str = "") -> list[str]:
    """Remove in place each DynamicQuantizeLinear -> DequantizeLinear pair that remains after
    fusing; return notes.

    A float operator behind such a pair gains nothing: it computes as before, and rounds on top of
    that.

    Args:
        before: nodes that touched codes before this run; their pairs stay.
        where: prefix of the names of nodes, as in ``quantized_before``.
    """
    notes = list[str]()
    for node in list(graph.nodes):
        if node.op_type != "DynamicQuantizeLinear" or where + node.name in before:
            continue
        readers = _float_readers(graph, node)
        for pair in graph.consumers(node.outputs[0]):
            if pair.op_type in DEQUANTIZE:
                graph.replace_uses(pair.outputs[0], node.inputs[0])
        notes += [
            f"{where}{name} reads float activations: no integer operator was written for it"
            for name in readers
        ]
    graph.drop_unused()
    for body in list(bodies(graph)):
        inner = Graph(body.model)
        inner.reserve(graph.names)
        found = read_floats(inner, before, f"{where}{body.node.name}/{body.attribute}/")
        if found:
            put_back(graph, body, inner)
            notes += found
    return notes


def _float_readers(graph: Graph, node: Node) -> list[str]:
    """Return the names of the nodes that read the dequantized result of a DynamicQuantizeLinear."""
    pairs = [
        reader
        for reader in graph.consumers(node.outputs[0])
        if reader.op_type in DEQUANTIZE
    ]
    return [
        reader.name for pair in pairs for reader in graph.consumers(pair.outputs[0])
    ]
