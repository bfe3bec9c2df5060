"""Dynamic scales, kept only for integer operators."""

from __future__ import annotations

from collections.abc import Collection

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.bodies import bodies, put_back
from quark_onnx.graph.node import DEQUANTIZE
from quark_onnx.plan.existing import existing


def quantized_before(graph: Graph, where: str = "") -> frozenset[str]:
    """Return the names of nodes on codes before this run, bodies included.

    Args:
        graph: the graph.
        where: prefix of the names: the path to the body of a node, as in ``fuse``.
    """
    names = {where + name for name in existing(graph, keep=True)}
    for body in bodies(graph):
        inner = Graph(body.model)
        names |= quantized_before(inner, f"{where}{body.node.name}/{body.attribute}/")
    return frozenset(names)


def read_floats(graph: Graph, before: Collection[str], where: str = "") -> list[str]:
    """Remove the unfused DynamicQuantizeLinear -> DequantizeLinear pairs.

    A float operator after such a pair gains nothing: it computes as before, with additional
    rounding. The graph is changed in place.

    Args:
        graph: the graph.
        before: nodes that computed with codes before this run; their pairs stay.
        where: prefix of node names, as in ``quantized_before``.

    Returns:
        Notes for the report.
    """
    notes = list[str]()
    for node in list(graph.nodes):
        if node.op_type != "DynamicQuantizeLinear" or where + node.name in before:
            continue
        readers = _float_readers(graph, node)
        # Integer operators read the codes directly; the remaining readers read the dequantized
        # values.
        for pair in graph.consumers(node.outputs[0]):
            if pair.op_type in DEQUANTIZE:
                graph.replace_uses(pair.outputs[0], node.inputs[0])
        notes += [
            f"{where}{name} reads float activations: no integer operator was written for it"
            for name in readers
        ]
    # Pairs without readers go, and so does DynamicQuantizeLinear where no integer operator is left.
    graph.drop_unused()
    for body in list(bodies(graph)):
        inner = Graph(body.model)
        inner.reserve(graph.names)
        prefix = f"{where}{body.node.name}/{body.attribute}/"
        if inner_notes := read_floats(inner, before, prefix):
            put_back(graph, body, inner)
            notes += inner_notes
    return notes


def _float_readers(graph: Graph, node: Node) -> list[str]:
    """Return the consumers of the dequantized result of a DynamicQuantizeLinear."""
    return [
        reader.name
        for pair in graph.consumers(node.outputs[0])
        if pair.op_type in DEQUANTIZE
        for reader in graph.consumers(pair.outputs[0])
    ]
