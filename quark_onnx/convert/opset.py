"""opset: another version of the standard operator set."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import ModelProto, defs

from quark_onnx.convert.base import Settings, conversion
from quark_onnx.errors import ConfigError, ModelError
from quark_onnx.graph import Graph
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
        if not all(_alike(node.op_type, graph.opset, version) for node in nodes):
            raise
        converted = _declared(model, version)
    return Graph.of(converted, graph.store), [f"opset {graph.opset} became {version}"]


def _alike(op_type: str, first: int, second: int) -> bool:
    """Whether an operator has the same attributes, inputs and outputs at two opsets."""
    try:
        forms = [_form(defs.get_schema(op_type, version, "")) for version in (first, second)]
    except defs.SchemaError:
        return False
    return forms[0] == forms[1]


def _form(schema: Any) -> tuple[object, ...]:
    """All of a definition but the types."""
    attributes = {name: each.default_value.SerializeToString() for name, each in schema.attributes.items()}
    formals = [[(each.name, each.option) for each in side] for side in (schema.inputs, schema.outputs)]
    return attributes, formals


def _declared(model: ModelProto, version: int) -> ModelProto:
    """The model that declares another opset.

    Raises:
        ModelError: it uses a type that the opset has not.
    """
    result = ModelProto()
    result.CopyFrom(model)
    for entry in result.opset_import:
        if entry.domain in STANDARD_DOMAINS:
            entry.version = version
    light = ModelProto()
    light.CopyFrom(result)
    try:
        onnx.shape_inference.infer_shapes(light, check_type=True, strict_mode=True)
    except Exception as error:  # several unrelated types
        raise ModelError(f"the model cannot be brought to opset {version}: {error}") from error
    return result
