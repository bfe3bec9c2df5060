"""Inline model-local functions."""

from __future__ import annotations

from collections.abc import Collection

from onnx import ModelProto, inliner

from quark_onnx.check.fields import check_fields
from quark_onnx.common.errors import ModelError
from quark_onnx.functions import DOMAINS
from quark_onnx.graph.node import nested_nodes


class InliningError(ModelError):
    """onnx cannot inline the functions of a model."""


def inlined(model: ModelProto) -> ModelProto:
    """Return ``model`` without functions; uncopied if unchanged.

    Functions of number formats stay: they identify a quantized model.

    Raises:
        InliningError: a function cannot be inlined, such as a recursive one.
        ModelError: a field of the inlined nodes has an invalid value.
    """
    formats = [
        (function.domain, function.name)
        for function in model.functions
        if function.domain in DOMAINS
    ]
    if len(formats) == len(model.functions):
        return model
    light = ModelProto()
    light.CopyFrom(model)
    # The inliner serializes the model, and does not need weights.
    del light.graph.initializer[:]
    _give_defaults(light, formats)
    try:
        result = inliner.inline_selected_functions(light, formats, exclude=True)
    except Exception as error:  # the inliner raises several unrelated types
        raise InliningError(
            f"the functions of the model cannot be written out: {error}",
        ) from error
    result.graph.initializer.extend(model.graph.initializer)
    # A call may omit inputs that the body needs, and decides the values of attributes.
    check_fields(result)
    return result


def _give_defaults(model: ModelProto, formats: Collection[tuple[str, str]]) -> None:
    """Write the default attributes of functions into their calls, in place.

    onnx's inliner knows the attributes of a call alone.

    Args:
        formats: domains and names of functions that are not inlined.
    """
    defaults = {
        (function.domain, function.name, function.overload): function.attribute_proto
        for function in model.functions
        if function.attribute_proto and (function.domain, function.name) not in formats
    }
    if not defaults:
        return
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nested_nodes(nodes):
            key = (node.domain, node.op_type, node.overload)
            given = {attribute.name for attribute in node.attribute}
            for attribute in defaults.get(key, ()):
                if attribute.name not in given:
                    node.attribute.append(attribute)
