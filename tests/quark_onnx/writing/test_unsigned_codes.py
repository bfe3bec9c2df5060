"""Quantized graphs in unsigned codes: equal results, and codes with other readers unchanged."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from calibrators.onnx_runtime.cpu_features import saturates
from calibrators.onnx_runtime.session import open_session
from quark_onnx import quantize
from quark_onnx.graph import Graph
from quark_onnx.trials.quantized_session import open_equivalent
from quark_onnx.writing.unsigned_codes import (
    faster_unsigned,
    in_unsigned_codes,
    use_unsigned_codes,
)
from tests.models import (
    Feeds,
    conv_net,
    depthwise,
    normal,
    parse,
    residual,
    samples,
    transformer_block,
    weight,
)

ON_X64 = platform.machine().lower() in ("amd64", "x86_64") and not saturates()
MODELS = [conv_net, residual, depthwise, transformer_block]


def clipped() -> ModelProto:
    """Clip with a bound that is no code, HardSwish, Concat and a tensor with two readers."""
    return parse(
        """g (float[1,3,8,8] x) => (float[1,8,8,8] y) {
            a = Conv <pads = [1,1,1,1]> (x, k, b) c = Clip (a, low, high)
            d = Conv (c, v) r = Relu (d) s = HardSwish (d) e = Concat <axis = 1> (r, s)
            m = Mul (e, e) y = Relu (m)
        }""",
        k=weight(8, 3, 3, 3), b=normal(8), low=np.float32(0), high=np.float32(1.3), v=weight(4, 8, 1, 1),  # noqa: E501
    )  # fmt: skip


def codes_of(graph: Graph, dtype: int) -> list[str]:
    """Return the QuantizeLinear nodes whose zero point has a type."""
    return [
        node.name
        for node in graph.nodes
        if node.op_type == "QuantizeLinear" and graph.elem_type(node.input(2)) == dtype
    ]


def outputs(model: ModelProto, data: list[Feeds], *, integers: bool) -> list[object]:
    """Return the outputs on each sample; with or without onnxruntime's integer kernels."""
    session = open_session(model, integers=None if integers else False)
    return [session.run(None, feeds) for feeds in data]


@pytest.mark.parametrize("preset", ["XINT8", "VINT8"])
@pytest.mark.parametrize("make", [*MODELS, clipped], ids=lambda make: make.__name__)
def test_power_of_two_scales_give_bitwise_equal_results(
    make: object, preset: str
) -> None:
    model = make()
    data = samples(model, 4)
    quantized = quantize(model, data, preset).model
    graph = Graph.of(quantized)
    assert use_unsigned_codes(graph)
    assert not codes_of(graph, TensorProto.INT8)
    expected = outputs(quantized, data, integers=False)
    # As ONNX defines the operators, and by onnxruntime's integer kernels.
    for integers in (False, True):
        found = outputs(graph.to_model(), data, integers=integers)
        for first, second in zip(expected, found, strict=True):
            np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("make", [*MODELS, clipped], ids=lambda make: make.__name__)
def test_float_scales_give_equal_results_without_integer_kernels(make: object) -> None:
    model = make()
    data = samples(model, 4)
    quantized = quantize(model, data, "S8S8").model
    graph = Graph.of(quantized)
    assert use_unsigned_codes(graph)
    expected = outputs(quantized, data, integers=False)
    found = outputs(graph.to_model(), data, integers=False)
    for first, second in zip(expected, found, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_relu_gets_a_pair_before_it() -> None:
    quantized = quantize(residual(), samples(residual(), 4), "XINT8").model
    graph = Graph.of(quantized)
    before = len(codes_of(graph, TensorProto.INT8))
    use_unsigned_codes(graph)
    assert len(codes_of(graph, TensorProto.UINT8)) > before
    for node in graph.nodes_of(("Relu",)):
        assert graph.producer_of_type(node.input(0), ("DequantizeLinear",)) is not None


def signed(text: str) -> ModelProto:
    """Return a model with pairs of int8."""
    return parse(
        text,
        s=np.float32(0.1),
        z=np.int8(0),
        t=np.float32(0.2),
        u=np.uint8(3),
        w=weight(4, 4),
    )


@pytest.mark.parametrize(
    "text",
    [
        # codes that are an output, that another operator reads, and of uint8
        """g (float[2,4] x) => (float[2,4] y, int8[2,4] q) {
            q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z)
        }""",
        """g (float[2,4] x) => (float[4,2] y) {
            q = QuantizeLinear (x, s, z) p = Transpose (q) y = DequantizeLinear (p, s, z)
        }""",
        """g (float[2,4] x) => (float[2,4] y) {
            q = QuantizeLinear (x, t, u) y = DequantizeLinear (q, t, u)
        }""",
        """g (float[2,4] x) => (float[2,4] y) {
            q = QuantizeLinear (x, s) y = DequantizeLinear (q, s)
        }""",
    ],
    ids=["output", "moved", "unsigned", "default"],
)
def test_other_readers_keep_the_codes(text: str) -> None:
    model = signed(text)
    graph = Graph.of(model)
    assert not use_unsigned_codes(graph)
    assert in_unsigned_codes(Graph.of(model)) is None
    feeds = {"x": normal(2, 4)}
    for first, second in zip(
        open_session(model).run(None, feeds),
        open_session(graph.to_model()).run(None, feeds),
        strict=True,
    ):
        np.testing.assert_array_equal(first, second)


def test_a_body_that_reads_the_codes_keeps_them() -> None:
    model = parse(
        """g (float[2,4] x, bool c) => (float[2,4] y) {
            q = QuantizeLinear (x, s, z)
            d = DequantizeLinear (q, s, z)
            f = If (c) <
                then_branch = one () => (float[2,4] a) { a = DequantizeLinear (q, s, z) },
                else_branch = two () => (float[2,4] b) { b = Neg (d) }
            >
            y = Add (d, f)
        }""",
        s=np.float32(0.1),
        z=np.int8(0),
    )
    assert not use_unsigned_codes(Graph.of(model))


def test_readers_with_zero_points_of_their_own() -> None:
    """Codes may be read with another scale and zero point than they are made with."""
    model = parse(
        """g (float[2,4] x) => (float[2,4] y, float[2,4] r) {
            q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, t, z) r = DequantizeLinear (q, s, v)
        }""",  # noqa: E501
        s=np.float32(0.1),
        z=np.int8(-7),
        t=np.float32(0.2),
        v=np.int8(127),
    )
    graph = Graph.of(model)
    assert use_unsigned_codes(graph)
    feeds = {"x": 20 * normal(2, 4)}
    for first, second in zip(
        open_session(model, optimize=False).run(None, feeds),
        open_session(graph.to_model(), optimize=False).run(None, feeds),
        strict=True,
    ):
        np.testing.assert_array_equal(first, second)


def test_only_processors_that_gain_use_them() -> None:
    quantized = quantize(conv_net(), samples(conv_net(), 4), "XINT8").model
    assert faster_unsigned() == ON_X64
    assert (in_unsigned_codes(Graph.of(quantized)) is not None) == ON_X64


def test_the_equivalent_session_has_the_results_of_the_model() -> None:
    data = samples(conv_net(), 4)
    quantized = quantize(conv_net(), data, "XINT8").model
    session = open_equivalent(quantized)
    for feeds, expected in zip(
        data, outputs(quantized, data, integers=False), strict=True
    ):
        np.testing.assert_array_equal(session.run(None, feeds), expected)
