"""Inline model-local functions."""

from __future__ import annotations

import logging

from onnx import ModelProto, inliner

from quark_onnx.check.fields import check_fields
from quark_onnx.common.errors import ModelError
from quark_onnx.functions import DOMAINS

logger = logging.getLogger(__name__)


def inlined(model: ModelProto) -> ModelProto:
    """Return ``model`` without functions; uncopied if unchanged.

    Functions of number formats stay: they identify a quantized model.

    Raises:
        ModelError: a function cannot be inlined, such as a recursive one.
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
    try:
        result = inliner.inline_selected_functions(light, formats, exclude=True)
    except Exception as error:  # the inliner raises several unrelated types
        raise ModelError(
            f"the functions of the model cannot be written out: {error}",
        ) from error
    result.graph.initializer.extend(model.graph.initializer)
    # A call may omit inputs that the body needs.
    check_fields(result)
    return result
