"""Convert a model to another version of the standard operator set."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from onnx import (
    GraphProto,
    ModelProto,
    OperatorSetIdProto,
    defs,
    helper,
)

from calibrators.errors import RuntimeCrash
from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Graph, Node, gather_constants
from quark_onnx.graph.native import convert_version
from quark_onnx.graph.node import (
    STANDARD_DOMAINS,
    inner_nodes,
    nested_nodes,
    schema_of,
    standard_opset,
)
from quark_onnx.graph.shapes import add_initializers

logger = logging.getLogger(__name__)

#: Domain of operators without an ONNX definition during a conversion.
_HIDDEN = "quark_onnx.hidden"


def raise_opset(model: ModelProto, opset: int) -> ModelProto | None:
    """Return ``model`` at a higher opset, None if onnx's converter fails."""
    try:
        return to_opset(model, opset)
    except ModelError as error:
        logger.debug("%s", error)
        return None


def at_opset(graph: Graph, version: int) -> Graph:
    """Return a graph at another opset, higher or lower.

    Raises:
        ModelError: onnx's converter cannot convert it, and operators differ in more than their
            types.
    """
    model = graph.to_model()
    try:
        converted = to_opset(model, version)
    except ModelError:
        # onnx has few adapters to lower versions, even if a version only added types.
        # A node that means the same at both versions needs no adapter, only another declaration.
        for node in (*graph.nodes, *inner_nodes(graph.nodes)):
            if not node.domain and not _alike(node, graph.opset, version):
                raise
        converted = _declared(model, version)
    return Graph.of(converted, graph.store)


def to_opset(model: ModelProto, opset: int) -> ModelProto:
    """Return ``model`` at another opset, higher or lower.

    Raises:
        ModelError: onnx's converter cannot convert it.
    """
    light = ModelProto()
    light.CopyFrom(model)
    # The copy has the small constants alone, which adapters may read (axes, shapes).
    del light.graph.initializer[:]
    large = add_initializers(light.graph, model.graph.initializer)
    hidden = _hide_runtime_operators(light)
    try:
        converted = convert_version(light, opset)
    except RuntimeCrash:
        raise
    except Exception as error:  # the converter raises several unrelated types
        raise ModelError(
            f"onnx cannot convert the model to opset {opset}: {error}",
        ) from error
    if hidden:
        _show_runtime_operators(converted.graph)
    result = ModelProto()
    result.CopyFrom(model)
    # Functions, metadata and imports of other domains are those of the model.
    result.graph.CopyFrom(converted.graph)
    # The converter writes inferred shapes into inputs and outputs: the originals return.
    del result.graph.input[:]
    del result.graph.output[:]
    result.graph.input.extend(model.graph.input)
    result.graph.output.extend(model.graph.output)
    result.graph.initializer.extend(large)
    # Declared before types and shapes are inferred, as the rules differ between opsets.
    del result.opset_import[:]
    result.opset_import.extend(_raised(model.opset_import, opset))
    graph = Graph(result)
    graph.require(opset)
    # Former attributes, such as the bounds of Clip, have become Constant nodes.
    gather_constants(graph, keep_inputs=True)
    return graph.to_model()


def _hide_runtime_operators(model: ModelProto) -> bool:
    """Move operators without an ONNX definition to a domain that the converter ignores.

    onnxruntime has operators of its own in the standard domain, at every opset:
    SimplifiedLayerNormalization, and LayerNormalization before opset 17, as its transformer
    optimizer and onnxruntime-genai's model builder write them.
    """
    version = standard_opset(model.opset_import)
    hidden = False
    for node in nested_nodes(model.graph.node) if version else ():
        if node.domain in STANDARD_DOMAINS and schema_of(node.op_type, version) is None:
            node.domain = _HIDDEN
            hidden = True
    if hidden:
        model.opset_import.append(helper.make_opsetid(_HIDDEN, 1))
    return hidden


def _show_runtime_operators(graph: GraphProto) -> None:
    """Move operators back to the standard domain after a conversion."""
    for node in nested_nodes(graph.node):
        if node.domain == _HIDDEN:
            node.domain = ""


def _raised(
    imports: Iterable[OperatorSetIdProto], opset: int
) -> Iterator[OperatorSetIdProto]:
    for entry in imports:
        yield helper.make_opsetid(
            entry.domain,
            opset if entry.domain in STANDARD_DOMAINS else entry.version,
        )


def _alike(node: Node, *versions: int) -> bool:
    """Return whether two opsets define an operator equally, apart from types.

    Attributes that the node omits may differ, too.
    """
    old, new = (schema_of(node.op_type, version) for version in sorted(versions))
    if old is None or new is None:
        return False
    # An attribute that only the newer version knows would be invalid, or lost.
    added = new.attributes.keys() - old.attributes.keys()
    if len(node.lacking(added)) < len(added):
        return False
    if old.attributes.keys() - new.attributes.keys():
        return False
    # A changed default changes the meaning of a node that omits the attribute.
    for name in old.attributes:
        default = old.attributes[name].default_value
        if str(default) != str(new.attributes[name].default_value):
            return False
    return _formals(old) == _formals(new)


def _formals(schema: defs.OpSchema) -> list[tuple[str, object]]:
    """Return names and options of inputs and outputs."""
    return [
        (formal.name, formal.option) for formal in (*schema.inputs, *schema.outputs)
    ]


def _declared(model: ModelProto, version: int) -> ModelProto:
    """Return the model with another declared opset.

    The types are checked when the model is checked.
    """
    result = ModelProto()
    result.CopyFrom(model)
    for entry in result.opset_import:
        if entry.domain in STANDARD_DOMAINS:
            entry.version = version
    return result
