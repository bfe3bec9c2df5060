"""Model-local functions, written out where they are called."""

from __future__ import annotations

import logging

from onnx import ModelProto, inliner

from quark_onnx.errors import ModelError
from quark_onnx.functions import DOMAINS
from quark_onnx.graph.fields import check_fields

logger = logging.getLogger(__name__)


def inlined(model: ModelProto) -> ModelProto:
    """``model`` without functions of its own; ``model`` itself if it has none.

    Those that stand for number formats stay: they are what tells that a model is quantized.

    Raises:
        ModelError: a function cannot be written out, as one that calls itself.
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
    del light.graph.initializer[
        :
    ]  # the inliner serializes the model, and has no use for weights
    try:
        result = inliner.inline_selected_functions(light, formats, exclude=True)
    except Exception as error:  # the inliner raises several unrelated types
        raise ModelError(
            f"the functions of the model cannot be written out: {error}",
        ) from error
    result.graph.initializer.extend(model.graph.initializer)
    check_fields(result)  # a call leaves out inputs that the body needs
    return result
