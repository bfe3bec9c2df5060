"""opset: another version of the standard operator set."""

from __future__ import annotations

from onnx import ModelProto, defs

from quark_onnx.convert.base import Settings, conversion
from quark_onnx.errors import ConfigError, ModelError
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import STANDARD_DOMAINS, inner_nodes
from quark_onnx.passes import to_opset


@conversion("opset", keeps="exactly", reads=["opset"])
def opset(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """The version of the standard operator set that --opset says, higher or lower."""
    if settings.opset is None:
        raise ConfigError("the conversion opset needs the version to convert to (--opset 17)")
    if not 1 <= settings.opset <= defs.onnx_opset_version():
        raise ConfigError(f"opset is {settings.opset}; the installed onnx knows 1 to {defs.onnx_opset_version()}")
    return at_opset(graph, settings.opset)


def at_opset(graph: Graph, version: int) -> tuple[Graph, list[str]]:
    """A graph at an opset, and what was done about it.

    Raises:
        ModelError: onnx's converter cannot convert it, and operators differ in more than the types that they take.
    """
    if version == graph.opset:
        return graph, []
    model = graph.to_model()
    try:
        converted = to_opset(model, version)
    except ModelError:  # onnx has few adapters downwards, also where a version but added types
        nodes = [node for node in (*graph.nodes, *inner_nodes(graph.nodes)) if not node.domain]
        if not all(_alike(node, graph.opset, version) for node in nodes):
            raise
        converted = _declared(model, version)
    return Graph.of(converted, graph.store), [f"opset {graph.opset} became {version}"]


def _alike(node: Node, *versions: int) -> bool:
    """Whether an operator is defined alike at two opsets, but for types and for attributes that the node leaves out."""
    try:
        old, new = (defs.get_schema(node.op_type, version, "") for version in sorted(versions))
    except defs.SchemaError:
        return False
    added = new.attributes.keys() - old.attributes.keys()
    if any(node.attribute(name) is not None for name in added) or old.attributes.keys() - new.attributes.keys():
        return False
    defaults = [{name: str(each.attributes[name].default_value) for name in old.attributes} for each in (old, new)]
    formals = [[(each.name, each.option) for each in (*schema.inputs, *schema.outputs)] for schema in (old, new)]
    return defaults[0] == defaults[1] and formals[0] == formals[1]


def _declared(model: ModelProto, version: int) -> ModelProto:
    """The model that declares another opset; whether it has the types is seen when it is checked."""
    result = ModelProto()
    result.CopyFrom(model)
    for entry in result.opset_import:
        if entry.domain in STANDARD_DOMAINS:
            entry.version = version
    return result
