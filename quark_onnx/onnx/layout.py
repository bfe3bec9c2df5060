"""Models with channels last, as AMD Quark converts them."""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto

from quark_onnx.common.errors import ConfigError
from quark_onnx.files.io import load
from quark_onnx.graph import Graph
from quark_onnx.graph.channels import channels_last


def convert_nchw_to_nhwc(model: str | Path | ModelProto) -> ModelProto:
    """Return the model with the channels of its four-dimensional inputs and outputs last.

    Args:
        model: path of a model, or a ModelProto, which is not changed.

    Raises:
        ConfigError: the model has no such input or output.
    """
    result, names = channels_last(Graph.of(load(model)))
    if not names:
        raise ConfigError(
            "convert_nchw_to_nhwc: the model has no input or output of four dimensions;"
            " leave it out"
        )
    return result.to_model()
