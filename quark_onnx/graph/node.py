"""Node: an operator of a graph, with dictionary-like attributes."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableSequence,
    Sequence,
)
from functools import cache
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, OperatorSetIdProto, defs, helper

#: The two names of the standard operator set.
STANDARD_DOMAINS = ("", "ai.onnx")
#: Largest version that onnx and onnxruntime hold, in a signed 32-bit integer: as the version of a
#: look-up, it finds the newest schema.
LARGEST_VERSION = 2**31 - 1
#: First opset at which a Softmax normalizes along a single axis.
_SINGLE_AXIS_OPSET = 13
#: Operators of ONNX and of vendors that quantize with a given scale, and that dequantize.
QUANTIZE = frozenset(
    {"QuantizeLinear", "ExtendedQuantizeLinear", "VitisQuantizeLinear"},
)
DEQUANTIZE = frozenset(
    {"DequantizeLinear", "ExtendedDequantizeLinear", "VitisDequantizeLinear"},
)
#: Types of attributes that hold graphs.
_GRAPHS = frozenset({AttributeProto.GRAPH, AttributeProto.GRAPHS})
#: Prefix of the doc_string of a node that a rewrite has created for float arithmetic.
_STAYS_FLOAT = "stays float: "


def normalized_domain(domain: str) -> str:
    """Return the name of a domain, with one name for the standard domain: the empty one."""
    return "" if domain in STANDARD_DOMAINS else domain


def standard_opset(imports: Iterable[OperatorSetIdProto]) -> int:
    """Return the version of the standard operator set among imports; 0 if it is not imported."""
    version = 0
    for entry in imports:
        if entry.domain in STANDARD_DOMAINS:
            version = max(version, entry.version)
    return version


def imported_domains(imports: Iterable[OperatorSetIdProto]) -> set[str]:
    """Return the domains among imports, with one name for the standard domain."""
    return {normalized_domain(entry.domain) for entry in imports}


class Node:
    """An operator, compared by identity; the verbs of ``Graph`` change its edges.

    Attributes:
        inputs: tensor names; an empty name is an omitted optional input.
        outputs: tensor names; an empty name is an omitted optional output.
        captures: names that subgraphs of this node read from outer graphs.
    """

    __slots__ = ("_proto", "captures", "inputs", "name", "outputs")

    def __init__(self, proto: NodeProto) -> None:
        self._proto = proto
        self.name: str = proto.name
        self.inputs: tuple[str, ...] = tuple(proto.input)
        self.outputs: tuple[str, ...] = tuple(proto.output)
        # dict.fromkeys keeps the first of equal names, in a deterministic order.
        self.captures: tuple[str, ...] = tuple(dict.fromkeys(_captured(proto)))

    @property
    def op_type(self) -> str:
        """Type of the operator, without the domain."""
        return self._proto.op_type

    @property
    def domain(self) -> str:
        """Domain of the operator, empty for the standard domain."""
        return normalized_domain(self._proto.domain)

    @property
    def kind(self) -> str:
        """Type of the operator, with a non-standard domain: the key of the rules."""
        # Without the other properties, since every step reads this for every node.
        proto = self._proto
        domain, op_type = proto.domain, proto.op_type
        if domain in STANDARD_DOMAINS:
            return op_type
        return f"{domain}::{op_type}"

    @property
    def operands(self) -> list[str]:
        """Names of the inputs that are not omitted."""
        return [name for name in self.inputs if name]

    @property
    def results(self) -> list[str]:
        """Names of the outputs that are not omitted."""
        return [name for name in self.outputs if name]

    @property
    def reads(self) -> list[str]:
        """Names of all tensors that are read, by the operator or by its subgraphs."""
        return [*self.operands, *self.captures]

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute; ``default`` if absent.

        Args:
            name: name of the attribute.
            default: value of an absent attribute; ONNX's default is not looked up.
        """
        for attribute in self._proto.attribute:
            if attribute.name == name:
                value = helper.get_attribute_value(attribute)
                # AttributeProto.s holds bytes, which nobody checks for UTF-8.
                if isinstance(value, bytes):
                    return value.decode(errors="backslashreplace")
                return value
        return default

    @property
    def attributes(self) -> dict[str, Any]:
        """Values of the attributes by name; a text is the bytes that the file holds."""
        return {
            attribute.name: helper.get_attribute_value(attribute)
            for attribute in self._proto.attribute
        }

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Return the names of attributes that the node does not have."""
        present = {attribute.name for attribute in self._proto.attribute}
        return [name for name in names if name not in present]

    def set_attribute(self, name: str, value: Any) -> None:
        """Set the value of an attribute."""
        self.drop_attribute(name)
        self._proto.attribute.append(helper.make_attribute(name, value))

    def drop_attribute(self, name: str) -> None:
        """Remove an attribute, if present."""
        kept = [
            attribute for attribute in self._proto.attribute if attribute.name != name
        ]
        del self._proto.attribute[:]
        self._proto.attribute.extend(kept)

    def rename(self, op_type: str, domain: str = "") -> None:
        """Become a different operator with equal inputs."""
        self._proto.op_type = op_type
        self._proto.domain = domain

    def set_body(self, attribute: str, place: int, body: GraphProto) -> None:
        """Replace a subgraph; ``place`` is the index in an attribute with several.

        Args:
            attribute: name of an attribute that holds graphs.
            place: index of the graph in the attribute; 0 for one that holds a single graph.
            body: the new graph, which is copied.
        """
        for candidate in self._proto.attribute:
            if candidate.name == attribute:
                graphs_in(candidate)[place].CopyFrom(body)
        # The new body may read other tensors of outer graphs.
        self.captures = tuple(dict.fromkeys(_captured(self._proto)))

    @property
    def has_subgraph(self) -> bool:
        """Whether an attribute holds a graph."""
        return any(attribute.type in _GRAPHS for attribute in self._proto.attribute)

    def input(self, index: int) -> str:
        """Return the name of an input, empty if omitted."""
        if index < len(self.inputs):
            return self.inputs[index]
        return ""

    def output(self, index: int) -> str:
        """Return the name of an output, empty if omitted."""
        if index < len(self.outputs):
            return self.outputs[index]
        return ""

    @property
    def float_reason(self) -> str:
        """Reason of a rewrite to keep the node float where possible; otherwise empty."""
        text = self._proto.doc_string
        if text.startswith(_STAYS_FLOAT):
            return text.removeprefix(_STAYS_FLOAT)
        return ""

    def stay_float(self, reason: str) -> None:
        """Mark the node to stay float, in the doc_string, which survives conversions.

        Args:
            reason: why the node stays float, for the report.
        """
        self._proto.doc_string = _STAYS_FLOAT + reason

    def to_proto(
        self,
        form: Callable[[NodeProto], NodeProto] = lambda proto: proto,
    ) -> NodeProto:
        """Return the node as protobuf.

        Args:
            form: leaves out attributes before the copy.
        """
        # A copy with the present name and edges, which live outside of the protobuf message.
        proto = onnx.NodeProto()
        proto.CopyFrom(form(self._proto))
        proto.name = self.name
        del proto.input[:]
        del proto.output[:]
        proto.input.extend(self.inputs)
        proto.output.extend(self.outputs)
        return proto

    def __repr__(self) -> str:
        return f"{self.kind} {self.name!r}"


@cache
def schema_of(op_type: str, version: int, domain: str = "") -> defs.OpSchema | None:
    """Return the newest definition of an operator up to a version; None without one."""
    try:
        return defs.get_schema(op_type, version, domain)
    except defs.SchemaError:
        return None


def softmax_axis(node: Node, opset: int) -> int:
    """Return the axis of a Softmax.

    Before opset 13 a Softmax ran over all axes from this one on, by default from the second one.

    Args:
        node: a Softmax, with or without the attribute ``axis``.
        opset: version of the standard operator set.

    Returns:
        The axis as the attribute has it, negative if counted from the end.
    """
    return int(node.attribute("axis", -1 if opset >= _SINGLE_AXIS_OPSET else 1))


def subgraphs(proto: NodeProto) -> list[GraphProto]:
    """Return the graphs among a node's attributes."""
    graphs = list[GraphProto]()
    for attribute in proto.attribute:
        graphs += graphs_in(attribute)
    return graphs


def graphs_in(attribute: AttributeProto) -> Sequence[GraphProto]:
    """Return the graphs that an attribute holds."""
    if attribute.type == AttributeProto.GRAPH:
        return [attribute.g]
    return attribute.graphs


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and the graphs in its nodes at any depth, each before its own bodies."""
    yield graph
    for body in bodies_of(graph.node):
        yield from all_graphs(body)


def bodies_of(nodes: Iterable[NodeProto]) -> Iterator[GraphProto]:
    """Yield the graphs among the attributes of nodes, without the graphs inside these."""
    for node in nodes:
        yield from subgraphs(node)


def attributes_of(nodes: Iterable[NodeProto]) -> Iterator[AttributeProto]:
    """Yield the attributes of nodes, without those of nodes in bodies."""
    for node in nodes:
        yield from node.attribute


def rename_entries(names: MutableSequence[str], new: Mapping[str, str]) -> None:
    """Replace names in a list of inputs or outputs in place; other names stay.

    Args:
        names: the inputs or outputs of a node.
        new: new names by present name.
    """
    for index, name in enumerate(names):
        names[index] = new.get(name, name)


def nested_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes, each followed by the nodes in its bodies at any depth."""
    for node in nodes:
        yield node
        for body in subgraphs(node):
            yield from nested_nodes(body.node)


def results_of(nodes: Iterable[NodeProto]) -> list[str]:
    """Return the names of the results of nodes, without omitted ones."""
    return [name for node in nodes for name in node.output if name]


def makers_of(nodes: Iterable[NodeProto]) -> dict[str, NodeProto]:
    """Return the nodes by the names of their results."""
    makers = dict[str, NodeProto]()
    for node in nodes:
        makers.update(dict.fromkeys(node.output, node))
    return makers


def read_by(nodes: Iterable[NodeProto]) -> set[str]:
    """Return the names of the inputs of nodes; an omitted input has an empty name."""
    return {name for node in nodes for name in node.input}


def described(node: NodeProto) -> str:
    """Return a node's name and operator for messages; an unnamed node has its first result."""
    return f"node {node.name or next(filter(None, node.output), '')!r} ({node.op_type})"


def sparse_values(graph: GraphProto) -> Iterator[str]:
    """Yield the names of the sparse initializers of a graph."""
    for sparse in graph.sparse_initializer:
        yield sparse.values.name


def defined_names(graph: GraphProto) -> set[str]:
    """Return the names of inputs, initializers and results of nodes."""
    names = {value.name for value in graph.input}
    names.update(tensor.name for tensor in graph.initializer)
    names.update(name for node in graph.node for name in node.output)
    return names


def kinds_of(nodes: Iterable[Node]) -> set[str]:
    """Return the kinds of nodes."""
    return {node.kind for node in nodes}


def inner_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes in the subgraphs of nodes, at any depth.

    Nodes without a name get one, as in a graph.
    """
    inner = list[Node]()
    # A stack instead of recursion; the copies keep the protobuf messages of callers unchanged.
    todo = [node.to_proto() for node in nodes if node.has_subgraph]
    while todo:
        for graph in subgraphs(todo.pop()):
            todo += graph.node
            inner += map(Node, graph.node)
    for node in inner:
        node.name = node.name or f"{node.op_type}_{next(iter(node.outputs), '')}"
    return inner


def _captured(proto: NodeProto) -> list[str]:
    """Return the names that subgraphs of a node read, but do not define."""
    names: list[str] = []
    for graph in subgraphs(proto):
        # An empty name is an omitted input.
        defined = {"", *defined_names(graph), *sparse_values(graph)}
        used = list[str]()
        for node in graph.node:
            # Names that an inner body reads, and this body does not define, come from further
            # outside.
            used += [*node.input, *_captured(node)]
        used += [value.name for value in graph.output]
        names += [name for name in used if name not in defined]
    return names


def name_apart(nodes: Iterable[Node], fresh: Callable[[str], str]) -> None:
    """Give nodes unique names.

    Args:
        nodes: the nodes in order; the first of several with a name keeps it.
        fresh: returns an unused name for a preferred one.
    """
    seen: set[str] = set()
    for node in nodes:
        if not node.name or node.name in seen:
            node.name = fresh(
                node.name or f"{node.op_type}_{next(iter(node.outputs), '')}",
            )
        seen.add(node.name)


def sparse_names(graph: GraphProto) -> frozenset[str]:
    """Return the names of the sparse constants of a graph."""
    names = set(sparse_values(graph))
    # A Constant node may hold a sparse tensor instead of a dense one.
    for node in graph.node:
        if any(attribute.name == "sparse_value" for attribute in node.attribute):
            names.update(node.output)
    return frozenset(names)


def all_names(graph: GraphProto) -> set[str]:
    """Return every tensor and node name in a graph and its subgraphs."""
    names = defined_names(graph)
    names.update(value.name for value in (*graph.output, *graph.value_info))
    names.update(node.name for node in graph.node)
    names.update(sparse_values(graph), read_by(graph.node))
    for inner in bodies_of(graph.node):
        names |= all_names(inner)
    return names - {""}
