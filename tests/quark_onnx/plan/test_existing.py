"""A model that is quantized already is refused, in whatever format; or completed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ModelError
from quark_onnx.common.registry import PRESETS

DATA = [
    {"x": np.random.default_rng(seed).normal(size=(4, 32)).astype(np.float32)}
    for seed in range(4)
]
#: A cast to 16 bits and back may be anybody's.
TOLD = sorted(set(PRESETS) - {"BF16", "FP16"})


def net() -> ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 32] x) => (float[N, 32] y) {
            [first] h = MatMul (x, w)
            [second] r = Relu (h)
            [third] y = MatMul (r, v)
        }""")
    for seed, name in enumerate("wv"):
        array = np.random.default_rng(seed).normal(size=(32, 32)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("preset", TOLD)
def test_what_is_quantized_is_not_quantized_again(preset: str) -> None:
    config = QConfig.of(preset).with_(nodes="first")
    once = quantize(net(), DATA if config.measures else None, config).model
    with pytest.raises(
        ModelError, match=r"the model is quantized already: it has [123] "
    ):
        quantize(once, DATA, "A8W8")
    twice = quantize(once, DATA, QConfig.of("A8W8").with_(keep_existing=True))
    assert {function.name for function in twice.model.functions} == {
        function.name for function in once.functions
    }
    assert any(t.name.startswith("v_quantized") for t in twice.model.graph.initializer)
    assert twice.report.worst_sqnr > 30, "beside the model that was quantized in part"
