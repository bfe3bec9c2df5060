"""small_products: chains of small products keep the scales of their results in OpenVINO."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, compare, on_engine, quantize
from quark_onnx.graph import Graph
from quark_onnx.patterns.openvino_faults import unscaled_products
from tests.models import kinds, normal, parse, run, samples

OPENVINO = QConfig.of("A8W8").with_(target="openvino")


def chain(text: str, rows: str = "1") -> ModelProto:
    return parse(
        f"g (float[{rows},12] x) => (float[{rows},8] y) {{ {text} }}",
        **{
            name: value
            for name, value in {
                "w": normal(12, 16) / 4,
                "u": normal(16, 8, seed=1) / 4,
                "wide": normal(12, 257) / 4,
                "tall": normal(257, 8, seed=1) / 16,
                "b": normal(16, seed=2),
                "zeros": np.zeros(16, np.float32),
                "low": np.float32(-0.5),
                "high": np.float32(0.5),
            }.items()
            if f"{name})" in text or f"{name}," in text
        },
    )


BOUNDED = {
    "alone": "h = MatMul (x, w) y = MatMul (h, u)",
    "Relu": "h = MatMul (x, w) r = Relu (h) y = MatMul (r, u)",
    "Clip": "h = MatMul (x, w) r = Clip (h, low, high) y = MatMul (r, u)",
    "sign": "h = MatMul (x, w) r = Neg (h) y = MatMul (r, u)",
    "Gemm": "h = Gemm (x, w, zeros) r = Relu (h) y = Gemm (r, u)",
    "sum": "h = MatMul (x, w) s = Add (h, low) r = Relu (s) y = MatMul (r, u)",
}
AS_THEY_ARE = {
    "bias": ("h = MatMul (x, w) s = Add (h, b) r = Relu (s) y = MatMul (r, u)", "1"),
    "bias of Gemm": ("h = Gemm (x, w, b) r = Relu (h) y = Gemm (r, u)", "1"),
    "sizes": ("h = MatMul (x, wide) r = Relu (h) y = MatMul (r, tall)", "1"),
    "rows": ("h = MatMul (x, w) r = Relu (h) y = MatMul (r, u)", "9"),
    "open": ("h = MatMul (x, w) r = Relu (h) y = MatMul (r, u)", "N"),
}


@pytest.mark.parametrize("case", BOUNDED)
def test_small_products_are_bounded_without_effect(case: str) -> None:
    model = chain(BOUNDED[case])
    data = samples(model, 4)
    result = quantize(model, data, OPENVINO)
    assert any("1 Max without effect is" in note for note in result.report.notes)
    bounded = result.model
    graph = Graph.of(bounded)
    (bound,) = graph.nodes_of({"Max"})
    assert graph.bypass(bound)
    for feeds in data:
        same = run(graph.to_model(), feeds)[0]
        np.testing.assert_array_equal(run(bounded, feeds)[0], same)


@pytest.mark.parametrize("case", AS_THEY_ARE)
def test_other_products_stay(case: str) -> None:
    model = chain(*AS_THEY_ARE[case])
    written = quantize(model, samples(model, 4), OPENVINO).model
    assert kinds(written).count("Max") == 0


def test_sizes_of_a_result_may_be_declared_by_name() -> None:
    model = chain(BOUNDED["Relu"])
    for dimension in model.graph.output[0].type.tensor_type.shape.dim:
        dimension.dim_param = "size"
    written = quantize(model, samples(model, 4), OPENVINO).model
    assert kinds(written).count("Max") == 1


def test_a_product_with_an_empty_sum_is_no_error() -> None:
    """A bias without values has no smallest and no greatest one."""
    model = parse(
        """g (float[1,4] x) => (float[1,0] y) {
            v = DequantizeLinear (w, scale)  h = Gemm (x, v, b)
            q = QuantizeLinear (h, scale)  d = DequantizeLinear (q, scale)
            k = DequantizeLinear (u, scale)  y = Gemm (d, k, b)
        }""",
        w=np.zeros((4, 0), np.uint8),
        u=np.zeros((0, 0), np.uint8),
        b=np.zeros(0, np.float32),
        scale=np.float32(1),
    )
    assert len(unscaled_products(Graph.of(model))) == 1


def test_a_target_of_onnxruntime_needs_no_bound() -> None:
    model = chain(BOUNDED["Relu"])
    written = quantize(model, samples(model, 4), OPENVINO.with_(target="cpu")).model
    assert kinds(written).count("Max") == 0


@pytest.mark.parametrize("case", [*BOUNDED, *AS_THEY_ARE])
def test_openvino_computes_the_file(case: str) -> None:
    pytest.importorskip("openvino")
    model = chain(BOUNDED[case]) if case in BOUNDED else chain(*AS_THEY_ARE[case])
    data = samples(model, 4)
    written = quantize(model, data, OPENVINO).model
    with on_engine("openvino"):
        found = compare(model, written, data, preprocessing=False)
    assert found.sqnr > 25
