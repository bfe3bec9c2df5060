"""The bodies of If, Loop and Scan, each taken out as a model of its own and put back.

What a body reads from around it is an input of that model, and a copy if it is constant, so that a
weight which a body shares with its surroundings is a weight there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    TensorProto,
    ValueInfoProto,
    helper,
)

from calibrators.onnx_runtime.session import tensor_bytes
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node
from quark_onnx.graph.shapes import LARGE, ir_version_for


@dataclass(frozen=True)
class Body:
    """A subgraph among the attributes of a node.

    Attributes:
        node: that has it.
        attribute: its name; ``place`` counts where the attribute holds several.
        model: it as a model.
        borrowed: what the model has of the surroundings: names of inputs and of constants.
    """

    node: Node
    attribute: str
    place: int
    model: ModelProto
    borrowed: frozenset[str]


def bodies(graph: Graph, *nodes: Node, weights: bool = True) -> Iterator[Body]:
    """The subgraphs of a graph's nodes, or of some of them; not those inside them.

    Args:
        weights: large constants of the surroundings are copied; without them they are inputs of the
            model.
    """
    for node in nodes or graph.nodes:
        for attribute in node.to_proto().attribute if node.has_subgraph else ():
            single = attribute.type == AttributeProto.GRAPH
            for place, body in enumerate([attribute.g] if single else attribute.graphs):
                yield _taken_out(graph, node, attribute.name, place, body, weights)


def _taken_out(  # noqa: PLR0913
    graph: Graph,
    node: Node,
    attribute: str,
    place: int,
    body: GraphProto,
    weights: bool,
) -> Body:
    proto = GraphProto()
    proto.CopyFrom(body)
    proto.name = proto.name or "body"
    own = {value.name for value in proto.input} | {
        tensor.name for tensor in proto.initializer
    }
    own |= {name for inner in proto.node for name in inner.output}
    _declare(graph, node, proto)
    borrowed = set[str]()
    for name in node.captures:
        if name in own or not _reads(proto, name):
            continue
        borrowed.add(name)
        if graph.is_constant(name) and (
            weights or tensor_bytes(graph.initializers[name]) <= LARGE
        ):
            proto.initializer.append(graph.initializers[name])
        else:
            proto.input.append(_value(graph, name))
    model = graph.shell()
    model.graph.CopyFrom(proto)
    model.ir_version = max(ir_version_for(model), 4)
    return Body(node, attribute, place, model, frozenset(borrowed))


def _declare(graph: Graph, node: Node, body: GraphProto) -> None:
    """Give a body's own inputs the types of what the node reads, where they have none."""
    kinds = [graph.elem_type(name) for name in node.inputs]
    if node.kind == "Loop":
        kinds[:2] = [TensorProto.INT64, TensorProto.BOOL]
    for value, kind in zip(body.input, kinds, strict=False):
        if kind and not value.type.WhichOneof("value"):
            value.type.tensor_type.elem_type = kind


def _reads(body: GraphProto, name: str) -> bool:
    outputs = any(value.name == name for value in body.output)
    return outputs or any(
        name in Node(inner).inputs or name in Node(inner).captures
        for inner in body.node
    )


def _value(graph: Graph, name: str) -> ValueInfoProto:
    kind, shape = graph.elem_type(name), graph.shape(name)
    if not kind:
        return onnx.ValueInfoProto(name=name)
    return helper.make_tensor_value_info(name, kind, shape)


def put_back(graph: Graph, body: Body, changed: Graph) -> None:
    """Let ``changed``, made from ``body.model``, take the place of the body."""
    model = changed.to_model()
    proto = GraphProto()
    proto.CopyFrom(model.graph)
    inputs = [value for value in proto.input if value.name not in body.borrowed]
    initializers = [
        tensor for tensor in proto.initializer if tensor.name not in body.borrowed
    ]
    del proto.input[:], proto.initializer[:], proto.value_info[:]
    proto.input.extend(inputs)
    proto.initializer.extend(initializers)
    graph.set_body(body.node, body.attribute, body.place, proto)
    for entry in model.opset_import:
        graph.import_domain(entry.domain, entry.version)


def in_bodies(graph: Graph, rewrite: Callable[[Graph], int]) -> int:
    """Rewrite the bodies of a graph's nodes in place, not those inside them.

    Return how many places were rewritten.

    Args:
        graph: the graph.
        rewrite: changes a body, taken out as a graph of its own, and returns at how many places.
    """
    count = 0
    for body in list(bodies(graph)):
        inner = Graph(body.model, store=graph.store)
        inner.reserve(graph.names)
        inside = rewrite(inner)
        if inside:
            put_back(graph, body, inner)
            count += inside
    return count
