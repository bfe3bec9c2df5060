"""``convert_nchw_to_nhwc`` changes the layout of the interface alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from quark_onnx.common.errors import ConfigError
from quark_onnx.onnx import Config, ModelQuantizer, QuantizationConfig, RandomDataReader
from quark_onnx.onnx.tools.table import main
from quark_onnx.onnx.utils.model_utils import convert_nchw_to_nhwc
from tests.models import normal, parse, weight
from tests.quark_onnx.amd_quark.networks import transformer


def images() -> onnx.ModelProto:
    """A convolution with images as inputs and outputs."""
    return parse(
        """g (float[2,4,8,8] x) => (float[2,6,8,8] y) {
            a = Conv <pads = [1,1,1,1]> (x, k, b)
            y = Relu (a)
        }""",
        k=weight(6, 4, 3, 3),
        b=normal(6, scale=0.1),
    )


def outputs(model: onnx.ModelProto | Path, x: Any) -> Any:
    """Return the first output."""
    source = model if isinstance(model, Path) else model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(source, options, providers)
    return session.run(None, {"x": x})[0]


def quantized(path: Path, *, last: bool) -> None:
    """Quantize the model, with or without a change of layout."""
    config = QuantizationConfig(convert_nchw_to_nhwc=last)
    reader = RandomDataReader(images())
    ModelQuantizer(Config(config)).quantize_model(images(), path, reader)


def test_a_quantized_model_takes_images_with_channels_last(tmp_path: Path) -> None:
    quantized(tmp_path / "first.onnx", last=False)
    quantized(tmp_path / "last.onnx", last=True)
    x = normal(2, 4, 8, 8)
    expected = outputs(tmp_path / "first.onnx", x)
    found = outputs(tmp_path / "last.onnx", x.transpose(0, 2, 3, 1).copy())
    assert np.array_equal(found, expected.transpose(0, 2, 3, 1))


def test_the_tool_and_the_function(tmp_path: Path) -> None:
    onnx.save(images(), tmp_path / "model.onnx")
    paths = [str(tmp_path / "model.onnx"), str(tmp_path / "last.onnx")]
    assert main("convert_nchw_to_nhwc", paths) == 0
    x = normal(2, 4, 8, 8)
    expected = outputs(images(), x).transpose(0, 2, 3, 1)
    turned = x.transpose(0, 2, 3, 1).copy()
    assert np.array_equal(outputs(tmp_path / "last.onnx", turned), expected)
    assert np.array_equal(outputs(convert_nchw_to_nhwc(images()), turned), expected)
    with pytest.raises(ConfigError, match="no input or output of four dimensions"):
        convert_nchw_to_nhwc(transformer())
