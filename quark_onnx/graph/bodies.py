"""Extract the bodies of If, Loop and Scan as models, and put changed bodies back.

Tensors that a body captures from outer graphs are inputs of the model, or copies if they are
constant, so that a captured weight is recognised as a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx
from onnx import (
    GraphProto,
    ModelProto,
    TensorProto,
    ValueInfoProto,
    helper,
)

from calibrators.onnx_runtime.tensors import tensor_bytes
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node, defined_names, graphs_in
from quark_onnx.graph.shapes import LARGE, ir_version_for


@dataclass(frozen=True)
class Body:
    """A subgraph among the attributes of a node.

    Attributes:
        node: node with the body.
        attribute: name of the attribute.
        place: index of the body in an attribute that holds several.
        model: the body as a model.
        borrowed: names of captured inputs and constants of the model.
    """

    node: Node
    attribute: str
    place: int
    model: ModelProto
    borrowed: frozenset[str]


def bodies(graph: Graph, *nodes: Node, weights: bool = True) -> Iterator[Body]:
    """Yield the subgraphs of nodes, not recursively.

    Args:
        graph: the graph.
        *nodes: nodes of the graph; all of them by default.
        weights: copy large captured constants; otherwise they are inputs of the model.
    """
    for node in nodes or graph.nodes:
        if node.has_subgraph:
            for attribute in node.to_proto().attribute:
                for place, body in enumerate(graphs_in(attribute)):
                    yield _taken_out(graph, node, attribute.name, place, body, weights)


def _taken_out(  # noqa: PLR0913  the position of a body in a graph
    graph: Graph,
    node: Node,
    attribute: str,
    place: int,
    body: GraphProto,
    weights: bool,
) -> Body:
    """Return a subgraph as a model of its own.

    Args:
        place: index of the subgraph in the attribute.
        body: the subgraph, which is copied.
        weights: copy large captured constants; otherwise they are inputs of the model.

    Returns:
        The body. Captured constants are initializers of its model, other captured tensors inputs.
    """
    proto = GraphProto()
    proto.CopyFrom(body)
    proto.name = proto.name or "body"
    # ``captures`` lists what any body of the node reads; this body may define the name itself.
    borrowed = _reads(proto).intersection(node.captures) - defined_names(proto)
    _declare(graph, node, proto)
    for name in node.captures:
        if name not in borrowed:
            continue
        if graph.is_constant(name) and (
            weights or tensor_bytes(graph.initializers[name]) <= LARGE
        ):
            proto.initializer.append(graph.initializers[name])
        else:
            proto.input.append(_value(graph, name))
    model = graph.shell()
    model.graph.CopyFrom(proto)
    # Until IR version 3 every initializer had to be an input as well.
    model.ir_version = max(ir_version_for(model), 4)
    return Body(node, attribute, place, model, frozenset(borrowed))


def _declare(graph: Graph, node: Node, body: GraphProto) -> None:
    """Declare missing types of a body's inputs, as the types of the node's inputs.

    Args:
        body: a copy of the body, which is changed in place.
    """
    kinds = [graph.elem_type(name) for name in node.inputs]
    if node.kind == "Loop":
        # Trip count and condition of a Loop may be omitted; the body takes a number and a
        # condition.
        kinds[:2] = [TensorProto.INT64, TensorProto.BOOL]
    for value, kind in zip(body.input, kinds, strict=False):
        if kind and not value.type.WhichOneof("value"):
            value.type.tensor_type.elem_type = kind


def _reads(body: GraphProto) -> set[str]:
    """Return the names of the tensors that a body and the bodies in it read."""
    names = {value.name for value in body.output}
    for proto in body.node:
        names.update(Node(proto).reads)
    return names


def _value(graph: Graph, name: str) -> ValueInfoProto:
    """Return the declaration of a tensor, by name alone if the type is unknown."""
    kind = graph.elem_type(name)
    shape = graph.shape(name)
    if not kind:
        return onnx.ValueInfoProto(name=name)
    return helper.make_tensor_value_info(name, kind, shape)


def put_back(graph: Graph, body: Body, changed: Graph) -> None:
    """Replace a body by a changed version, and import its domains.

    Args:
        graph: the graph with the node of the body, changed in place.
        body: the body as ``bodies`` yielded it. Replacing another body of the same attribute in
            between is allowed, as the position counts.
        changed: the new body, derived from ``body.model``. Its inputs and initializers of borrowed
            names are dropped: the body reads the tensors of the outer graph again.
    """
    model = changed.to_model()
    proto = GraphProto()
    proto.CopyFrom(model.graph)
    # Captured tensors are read from the outer graph by their names again.
    inputs = [value for value in proto.input if value.name not in body.borrowed]
    initializers = [
        tensor for tensor in proto.initializer if tensor.name not in body.borrowed
    ]
    del proto.input[:]
    del proto.initializer[:]
    del proto.value_info[:]
    proto.input.extend(inputs)
    proto.initializer.extend(initializers)
    graph.set_body(body.node, body.attribute, body.place, proto)
    for entry in model.opset_import:
        graph.import_domain(entry.domain, entry.version)


#: Bodies of graphs, extracted as graphs.
Extracted = dict[Graph, list[tuple[Body, Graph]]]


def in_bodies(
    graph: Graph,
    rewrite: Callable[[Graph], int],
    extracted: Extracted | None = None,
) -> int:
    """Rewrite the bodies of a graph's nodes in place, without nested ones.

    Args:
        graph: the graph.
        rewrite: changes a body, extracted as a graph, and returns the number of rewrites.
        extracted: bodies that earlier calls extracted, and that no rewrite has outdated since; new
            ones are added. After a rewrite it is empty. None to extract them here.

    Returns:
        The number of rewrites.
    """
    count = 0
    extracted = {} if extracted is None else extracted
    if graph not in extracted:
        # Before the first change: putting a body back changes the attributes of the node.
        extracted[graph] = [
            (body, Graph(body.model, store=graph.store)) for body in bodies(graph)
        ]
    for body, inner in extracted[graph]:
        # A tensor of a body must not hide one of an outer graph.
        inner.reserve(graph.names)
        rewrites = rewrite(inner)
        if rewrites:
            put_back(graph, body, inner)
            count += rewrites
    if count:
        extracted.clear()
    return count
