"""BiasAbsorption: what a Relu always lets pass moves behind it, and the model computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import BiasAbsorption, QConfig, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.graph import Graph

RANDOM = np.random.default_rng(7)
BIAS = np.float32([5, 40, 0, -3, 9, 0])
CONSTANTS = {
    "k": RANDOM.normal(size=(6, 3, 1, 1)).astype(np.float32) * 0.1,
    "b": BIAS,
    "l": RANDOM.normal(size=(4, 6, 3, 3)).astype(np.float32),
    "d": RANDOM.normal(size=(6, 1, 3, 3)).astype(np.float32),
    "g": RANDOM.normal(size=(6, 2)).astype(np.float32),
    "h": RANDOM.normal(size=(3, 6)).astype(np.float32),
}
CONV = "a = Conv (x, k, b) r = Relu (a) "
ABSORBED = {
    "conv": CONV + "y = Conv (r, l)",
    "depthwise": CONV + "y = Conv <group = 6> (r, d)",
    "two readers": CONV + "p = Conv (r, l) q = Conv (r, l) y = Add (p, q)",
    "gemm": "a = Gemm <transB = 1> (x, h2, b) r = Relu (a) y = Gemm (r, g)",
}
LEFT = {
    "padded": CONV + "y = Conv <pads = [1, 1, 1, 1]> (r, l)",
    "same": CONV + 'y = Conv <auto_pad = "SAME_UPPER"> (r, l)',
    "another activation": "a = Conv (x, k, b) r = Sigmoid (a) y = Conv (r, l)",
    "no layer behind": CONV + "y = Exp (r)",
    "bias of no place": CONV + "t = Reshape (r, flat) y = MatMul (t, g)",
}


def model_of(text: str) -> tuple[ModelProto, list[dict[str, np.ndarray[Any, Any]]]]:
    constants = {
        **CONSTANTS,
        "h2": CONSTANTS["h"].T[:, :3] * np.float32(0.1),
        "flat": np.int64([-1, 6]),
    }
    shape = (2, 3) if "h2" in text else (2, 3, 8, 8)
    used = {
        name: value
        for name, value in constants.items()
        if f" {name}," in text or f" {name})" in text
    }
    dims = ",".join(map(str, shape))
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[{dims}] x) => (y) {{ {text} }}'
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(v), name) for name, v in used.items()
    )
    model.graph.output[0].type.tensor_type.elem_type = 1
    data = [
        {"x": np.random.default_rng(seed).normal(size=shape).astype(np.float32)}
        for seed in range(4)
    ]
    return model, data


@pytest.mark.parametrize("name", ABSORBED)
def test_the_function_stays_and_the_range_shrinks(name: str) -> None:
    model, data = model_of(ABSORBED[name])
    graph = Graph.of(model)
    assert BiasAbsorption()(graph, data) == 1
    for feeds in data:
        [found], [expected] = (
            open_session(each).run(None, feeds) for each in (graph.to_model(), model)
        )
        np.testing.assert_allclose(
            found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max()
        )
    bias = graph.constant(graph.nodes[0].input(2))
    assert bias is not None
    assert (
        (bias <= BIAS).all()
        and bias[1] < 10
        and (bias[[2, 3, 5]] == BIAS[[2, 3, 5]]).all()
    )


@pytest.mark.parametrize("name", LEFT)
def test_what_would_not_stay_is_left_alone(name: str) -> None:
    model, data = model_of(LEFT[name])
    assert BiasAbsorption()(Graph.of(model), data) == 0


def test_a_smaller_range_is_a_better_model() -> None:
    model, data = model_of(ABSORBED["conv"])
    plain, better = (
        quantize(
            model, data, QConfig.of("A8W8").with_(calibrator="minmax", optimizers=each)
        )
        for each in ((), ("bias_absorption",))
    )
    assert "bias_absorption: 1" in better.report.notes
    assert better.report.worst_sqnr > plain.report.worst_sqnr + 3


def test_settings() -> None:
    assert QConfig(optimizers="bias_absorption:margin=0").optimizers == (
        BiasAbsorption(margin=0),
    )
    with pytest.raises(ConfigError, match="margin of bias_absorption is 2"):
        BiasAbsorption(margin=2)
