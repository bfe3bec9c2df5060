"""Node: one operator of the graph, with its attributes read like a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, helper

#: The two spellings of the standard operator set.
STANDARD_DOMAINS = ("", "ai.onnx")
_SINGLE_AXIS_OPSET = 13
#: Operators that write codes under a given scale, and that read them, as ONNX and the vendors call
#: them.
QUANTIZE = frozenset(
    {"QuantizeLinear", "ExtendedQuantizeLinear", "VitisQuantizeLinear"},
)
DEQUANTIZE = frozenset(
    {"DequantizeLinear", "ExtendedDequantizeLinear", "VitisDequantizeLinear"},
)
#: How the text of a node begins that a rewrite has made for float arithmetic.
_STAYS_FLOAT = "stays float: "


class Node:
    """An operator.

    It is compared by identity; its edges are changed by the verbs of ``Graph`` alone.

    Attributes:
        inputs, outputs: tensor names; an empty name is an omitted optional one.
        captures: names that subgraphs of this node read from the graphs around them.
    """

    __slots__ = ("_proto", "captures", "inputs", "name", "outputs")

    def __init__(self, proto: NodeProto) -> None:
        self._proto = proto
        self.name: str = proto.name
        self.inputs: tuple[str, ...] = tuple(proto.input)
        self.outputs: tuple[str, ...] = tuple(proto.output)
        self.captures: tuple[str, ...] = tuple(dict.fromkeys(_captured(proto)))

    @property
    def op_type(self) -> str:
        return self._proto.op_type

    @property
    def domain(self) -> str:
        return "" if self._proto.domain in STANDARD_DOMAINS else self._proto.domain

    @property
    def kind(self) -> str:
        """The operator type, with its domain where that is not the standard one.

        The key of the rules.
        """
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    def attribute(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, ``default`` if the node has none of that name."""
        for attribute in self._proto.attribute:
            if attribute.name == name:
                value = helper.get_attribute_value(attribute)
                return (
                    value.decode(errors="backslashreplace")
                    if isinstance(value, bytes)
                    else value
                )
        return default

    def set_attribute(self, name: str, value: Any) -> None:
        self.drop_attribute(name)
        self._proto.attribute.append(helper.make_attribute(name, value))

    def drop_attribute(self, name: str) -> None:
        kept = [
            attribute for attribute in self._proto.attribute if attribute.name != name
        ]
        del self._proto.attribute[:]
        self._proto.attribute.extend(kept)

    def rename(self, op_type: str, domain: str = "") -> None:
        """Become an operator that takes the same inputs."""
        self._proto.op_type, self._proto.domain = op_type, domain

    def set_body(self, attribute: str, place: int, body: GraphProto) -> None:
        """Replace a subgraph; ``place`` counts where the attribute holds several."""
        for candidate in self._proto.attribute:
            if candidate.name == attribute:
                single = candidate.type == AttributeProto.GRAPH
                (candidate.g if single else candidate.graphs[place]).CopyFrom(body)
        self.captures = tuple(dict.fromkeys(_captured(self._proto)))

    @property
    def has_subgraph(self) -> bool:
        return any(
            a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS)
            for a in self._proto.attribute
        )

    def input(self, index: int) -> str:
        """Name of an input, empty if it is omitted."""
        return self.inputs[index] if index < len(self.inputs) else ""

    @property
    def float_reason(self) -> str:
        """Why the node is to stay float where there is float arithmetic, if a rewrite says so.

        Else empty.
        """
        text = self._proto.doc_string
        return text.removeprefix(_STAYS_FLOAT) if text.startswith(_STAYS_FLOAT) else ""

    def stay_float(self, reason: str) -> None:
        """Say that the node is to stay float, in the text that travels with it through copies and
        converters.
        """
        self._proto.doc_string = _STAYS_FLOAT + reason

    def to_proto(self) -> NodeProto:
        proto = onnx.NodeProto()
        proto.CopyFrom(self._proto)
        proto.name = self.name
        del proto.input[:], proto.output[:]
        proto.input.extend(self.inputs)
        proto.output.extend(self.outputs)
        return proto

    def __repr__(self) -> str:
        return f"{self.kind} {self.name!r}"


def softmax_axis(node: Node, opset: int) -> int:
    """The axis of a Softmax.

    Before opset 13 it ran over all axes from there on, the second one unless it is said.
    """
    return int(node.attribute("axis", -1 if opset >= _SINGLE_AXIS_OPSET else 1))


def subgraphs(proto: NodeProto) -> list[GraphProto]:
    """The graphs among a node's attributes."""
    return [
        graph
        for attribute in proto.attribute
        for graph in (
            [attribute.g]
            if attribute.type == AttributeProto.GRAPH
            else attribute.graphs
        )
    ]


def inner_nodes(nodes: Iterable[Node]) -> list[Node]:
    """The nodes in the subgraphs of these, however deep.

    Those without a name get that which a graph gives them.
    """
    found, todo = list[Node](), [node.to_proto() for node in nodes if node.has_subgraph]
    while todo:
        for graph in subgraphs(todo.pop()):
            todo += graph.node
            found += map(Node, graph.node)
    for node in found:
        node.name = node.name or f"{node.op_type}_{next(iter(node.outputs), '')}"
    return found


def _captured(proto: NodeProto) -> list[str]:
    """Names read inside the subgraphs of a node but not defined there."""
    names: list[str] = []
    for graph in subgraphs(proto):
        known = {value.name for value in graph.input} | {
            tensor.name for tensor in graph.initializer
        }
        known |= {sparse.values.name for sparse in graph.sparse_initializer}
        known |= {name for node in graph.node for name in node.output}
        used = [name for node in graph.node for name in (*node.input, *_captured(node))]
        used += [value.name for value in graph.output]
        names += [name for name in used if name and name not in known]
    return names


def name_apart(nodes: Iterable[Node], fresh: Callable[[str], str]) -> None:
    """Nodes are told apart by name, so each gets one of its own."""
    seen: set[str] = set()
    for node in nodes:
        if not node.name or node.name in seen:
            node.name = fresh(
                node.name or f"{node.op_type}_{next(iter(node.outputs), '')}",
            )
        seen.add(node.name)


def sparse_names(graph: GraphProto) -> frozenset[str]:
    """The sparse constants of a graph: initializers, and what Constant nodes hold."""
    names = {sparse.values.name for sparse in graph.sparse_initializer}
    for node in graph.node:
        if any(attribute.name == "sparse_value" for attribute in node.attribute):
            names.update(node.output)
    return frozenset(names)


def all_names(graph: GraphProto) -> set[str]:
    """Every tensor and node name in a graph and its subgraphs."""
    names = {
        value.name
        for part in (graph.input, graph.output, graph.value_info)
        for value in part
    }
    names |= {tensor.name for tensor in graph.initializer}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    for node in graph.node:
        names |= {node.name, *node.input, *node.output}
        for inner in subgraphs(node):
            names |= all_names(inner)
    return names - {""}
