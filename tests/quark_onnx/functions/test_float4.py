"""Pairs of FLOAT4E2M1 as functions, against ml_dtypes and the ONNX reference evaluator."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, QuantizationSpec, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.functions import float4

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
VALUES = np.float32(
    [0, 0.1, *TIES, *np.nextafter(TIES, 0), *np.nextafter(TIES, 9), 6, 7, 1e30, np.inf]
)


def pairs(scale: np.ndarray, shape: tuple[int, ...], axis: int = 1) -> onnx.ModelProto:
    nodes = [
        helper.make_node(
            float4.QUANTIZE, ["x", "s"], ["q"], domain=float4.DOMAIN, axis=axis
        ),
        helper.make_node(
            float4.DEQUANTIZE, ["q", "s"], ["y"], domain=float4.DOMAIN, axis=axis
        ),
    ]
    constants = [numpy_helper.from_array(np.asarray(scale), "s")]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(float4.DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=11)
    model.functions.extend(float4.definitions(nodes, 23))
    return model


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3, 1e-30])
def test_ties_ends_and_zeros(scale: float) -> None:
    x = np.concatenate([VALUES, -VALUES]) * np.float32(scale)
    model = pairs(np.float32(scale), x.shape)
    onnx.checker.check_model(model, full_check=True)
    [found] = open_session(model).run(None, {"x": x})
    steps = (
        (x / np.float32(scale))
        .clip(-6, 6)
        .astype(ml_dtypes.float4_e2m1fn)
        .astype(np.float32)
    )
    np.testing.assert_array_equal(found, steps * np.float32(scale))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 5), 0), ((3, 5), 1), ((2, 3, 4), 1), ((2, 0, 4), 2), ((), 0)],
)
def test_scales_of_channels(shape: tuple[int, ...], axis: int) -> None:
    scale = np.float32(np.linspace(0.2, 2, shape[axis])) if shape else np.float32(0.7)
    x = np.asarray(4 * np.random.default_rng(0).normal(size=shape), np.float32)
    [found] = open_session(pairs(scale, shape, axis)).run(None, {"x": x})
    spread = (
        scale.reshape([-1 if place == axis else 1 for place in range(len(shape))])
        if shape
        else scale
    )
    steps = (x / spread).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(found, steps * spread)


def net() -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 16] x) => (float[N, 8] y) { h = MatMul (x, w)  r = Relu (h)  y = MatMul (r, v) }"""  # noqa: E501
    )
    random = np.random.default_rng(0)
    for name, shape in {"w": (16, 24), "v": (24, 8)}.items():
        model.graph.initializer.append(
            numpy_helper.from_array(random.normal(size=shape).astype("f"), name)
        )
    return model, [{"x": random.normal(size=(4, 16)).astype("f")} for _ in range(4)]


def test_without_functions_the_pairs_are_those_of_onnx_and_compute_the_same() -> None:
    model, data = net()
    config = QConfig.of("FP4E2M1")
    runs, standard = (
        quantize(model, data, config.with_(functions=flag)).model
        for flag in (True, False)
    )
    assert {t.data_type for t in standard.graph.initializer} == {
        TensorProto.FLOAT,
        TensorProto.FLOAT4E2M1,
    }
    assert not standard.functions
    assert {entry.domain for entry in standard.opset_import} == {""}
    onnx.checker.check_model(standard, full_check=True)
    [expected] = ReferenceEvaluator(standard).run(None, data[0])
    [found] = open_session(runs).run(None, data[0])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_blocks_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="fp4e2m1 has no blocks"):
        QuantizationSpec("fp4e2m1", block_size=16)
