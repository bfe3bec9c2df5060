"""Bring a model to another version of the standard operator set."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    defs,
    helper,
    version_converter,
)

from calibrators.onnx_runtime.session import tensor_bytes
from quark_onnx.errors import ModelError
from quark_onnx.graph import Graph, Node, gather_constants
from quark_onnx.graph.node import STANDARD_DOMAINS, inner_nodes, subgraphs

logger = logging.getLogger(__name__)

#: Initializers above this size in bytes travel around the converter, which serializes the model
#: several times.
_LARGE = 4096
#: Where operators are during a conversion that onnx does not define.
_HIDDEN = "quark_onnx.hidden"


def raise_opset(model: ModelProto, opset: int) -> ModelProto | None:
    """``model`` at a higher opset, None if onnx's converter cannot convert it."""
    try:
        return to_opset(model, opset)
    except ModelError as error:
        logger.debug("%s", error)
        return None


def at_opset(graph: Graph, version: int) -> Graph:
    """A graph at an opset, higher or lower.

    Raises:
        ModelError: onnx's converter cannot convert it, and operators differ in more than the types
            that they take.
    """
    model = graph.to_model()
    try:
        converted = to_opset(model, version)
    except (
        ModelError
    ):  # onnx has few adapters downwards, also where a version but added types
        nodes = [
            node
            for node in (*graph.nodes, *inner_nodes(graph.nodes))
            if node.domain in STANDARD_DOMAINS
        ]
        if not all(_alike(node, graph.opset, version) for node in nodes):
            raise
        converted = _declared(model, version)
    return Graph.of(converted, graph.store)


def to_opset(model: ModelProto, opset: int) -> ModelProto:
    """``model`` at a higher or a lower opset.

    Raises:
        ModelError: onnx's converter cannot convert it.
    """
    light = ModelProto()
    light.CopyFrom(model)
    heavy = {
        tensor.name: tensor
        for tensor in model.graph.initializer
        if tensor_bytes(tensor) > _LARGE
    }
    declared = {value.name for value in light.graph.input}
    kept = [tensor for tensor in light.graph.initializer if tensor.name not in heavy]
    del light.graph.initializer[:]
    light.graph.initializer.extend(kept)
    added = [name for name in heavy if name not in declared]
    light.graph.input.extend(
        helper.make_tensor_value_info(n, heavy[n].data_type, heavy[n].dims)
        for n in added
    )
    hidden = _hide_runtime_operators(light)
    try:
        converted = version_converter.convert_version(light, opset)
    except Exception as error:  # the converter raises several unrelated types
        raise ModelError(
            f"onnx cannot convert the model to opset {opset}: {error}",
        ) from error
    if hidden:
        _show_runtime_operators(converted.graph)
    result = ModelProto()
    result.CopyFrom(model)
    result.graph.CopyFrom(converted.graph)
    del (
        result.graph.input[:],
        result.graph.output[:],
    )  # the converter writes inferred shapes into them
    result.graph.input.extend(model.graph.input)
    result.graph.output.extend(model.graph.output)
    result.graph.initializer.extend(heavy.values())
    del result.opset_import[
        :
    ]  # before types and shapes are inferred: rules differ from opset to opset
    result.opset_import.extend(_raised(model.opset_import, opset))
    graph = Graph(result)
    graph.require(opset)
    # What was an attribute, as the bounds of Clip, has become a Constant node.
    gather_constants(graph, keep_inputs=True)
    return graph.to_model()


def _hide_runtime_operators(model: ModelProto) -> bool:
    """Move operators that onnx does not define at the model's opset to a domain that its converter
    leaves alone.

    onnxruntime has operators of its own in the standard domain, at every opset:
    SimplifiedLayerNormalization, and LayerNormalization before opset 17, as its transformer
    optimizer and onnxruntime-genai's model builder write them.
    """
    version = max(
        (
            entry.version
            for entry in model.opset_import
            if entry.domain in STANDARD_DOMAINS
        ),
        default=0,
    )
    hidden = False
    for node in _nodes(model.graph) if version else ():
        if node.domain in STANDARD_DOMAINS and not _is_defined(node.op_type, version):
            node.domain = _HIDDEN
            hidden = True
    if hidden:
        model.opset_import.append(helper.make_opsetid(_HIDDEN, 1))
    return hidden


def _show_runtime_operators(graph: GraphProto) -> None:
    """Move the operators back that `_hide_runtime_operators` has moved."""
    for node in _nodes(graph):
        if node.domain == _HIDDEN:
            node.domain = ""


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of a graph and of the bodies in it."""
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from _nodes(body)


def _is_defined(op_type: str, version: int) -> bool:
    try:
        defs.get_schema(op_type, version, "")
    except defs.SchemaError:
        return False
    return True


def _raised(
    imports: Iterable[OperatorSetIdProto],
    opset: int,
) -> Iterator[OperatorSetIdProto]:
    for entry in imports:
        yield helper.make_opsetid(
            entry.domain,
            opset if entry.domain in STANDARD_DOMAINS else entry.version,
        )


def _alike(node: Node, *versions: int) -> bool:
    """Whether an operator is defined alike at two opsets, but for types and for attributes that the
    node leaves out.
    """
    try:
        old, new = (
            defs.get_schema(node.op_type, version, "") for version in sorted(versions)
        )
    except defs.SchemaError:
        return False
    added = new.attributes.keys() - old.attributes.keys()
    if (
        any(node.attribute(name) is not None for name in added)
        or old.attributes.keys() - new.attributes.keys()
    ):
        return False
    defaults = [
        {name: str(each.attributes[name].default_value) for name in old.attributes}
        for each in (old, new)
    ]
    formals = [
        [(each.name, each.option) for each in (*schema.inputs, *schema.outputs)]
        for schema in (old, new)
    ]
    return defaults[0] == defaults[1] and formals[0] == formals[1]


def _declared(model: ModelProto, version: int) -> ModelProto:
    """The model that declares another opset.

    Whether it has the types is seen when it is checked.
    """
    result = ModelProto()
    result.CopyFrom(model)
    for entry in result.opset_import:
        if entry.domain in STANDARD_DOMAINS:
            entry.version = version
    return result
