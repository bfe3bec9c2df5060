"""Products of int8 codes with a bias load at every opset, and compute what they computed."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import quantize
from quark_onnx.common.registry import PRESETS
from quark_onnx.graph import Graph
from quark_onnx.graph.unfused_biases import unfuse_biases
from tests.models import normal, parse, samples, weight


def products(opset: int) -> ModelProto:
    """Two layers of three axes, the first with the bias as first operand of Add."""
    model = parse(
        """g (float[2,3,8] x) => (float[2,3,8] y) {
            a = MatMul (x, w) c = Add (b, a) e = Relu (c)
            f = MatMul (e, v) g = Add (f, d) y = Add (g, x)
        }""",
        w=weight(8, 8),
        b=normal(8),
        v=weight(8, 8, seed=1),
        d=normal(8, seed=1),
    )
    model.opset_import[0].CopyFrom(helper.make_opsetid("", opset))
    model.ir_version = 10
    return model


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_loads_at_opset_21(preset: str) -> None:
    model = products(21)
    assert quantize(model, samples(model, 4), preset).model.graph.node


@pytest.mark.parametrize("opset", [17, 20, 21, 22, 23])
def test_int8_activations_are_as_good_at_every_opset(opset: int) -> None:
    model = products(opset)
    sqnr = quantize(model, samples(model, 4), "S8S8").report.worst_sqnr
    assert sqnr > 30


CODES = {
    "s": np.float32(0.05),
    "j": np.float32(0.0537),  # no sum is in the middle of two codes
    "z": np.int8(0),
    "u": np.uint8(128),
    "k": np.arange(-32, 32, dtype=np.int8).reshape(8, 8),
    "b": normal(8),
    "i": np.arange(8, dtype=np.int8),
    "t": np.linspace(0.0537, 0.8, 8, dtype=np.float32),
    "n": np.zeros(8, np.int8),
}


def with_pairs(
    bias: str, *, zero: str = "z", shape: str = "2,3,8", opset: int = 21
) -> ModelProto:
    """A product of codes with a bias: a constant, or nodes that compute `c`."""
    lines = f"c = {bias}" if "(" in bias else ""
    model = parse(
        f"""g (float[{shape}] x) => (float[{shape}] y) {{
            q = QuantizeLinear (x, s, {zero}) a = DequantizeLinear (q, s, {zero})
            w = DequantizeLinear (k, s, z) m = MatMul (a, w)
            {lines} p = Add (m, {"c" if lines else bias})
            r = QuantizeLinear (p, s, {zero}) y = DequantizeLinear (r, s, {zero})
        }}""",
        **CODES,
    )
    model.opset_import[0].CopyFrom(helper.make_opsetid("", opset))
    model.ir_version = 10
    return model


@pytest.mark.parametrize(
    "bias",
    [
        "b",
        "DequantizeLinear (i, j, z)",
        "DequantizeLinear <axis = 0> (i, t, n)",
    ],
    ids=["float", "tensor", "channel"],
)
def test_biases_get_three_axes_and_the_same_sum(bias: str) -> None:
    model = with_pairs(bias)
    with pytest.raises(Exception, match="output_dtype"):
        open_session(model, integers=True)
    graph = Graph.of(model)
    assert unfuse_biases(graph) == 1
    feeds = {"x": normal(2, 3, 8)}
    expected = open_session(model, optimize=False).run(None, feeds)
    for optimize in (False, True):
        found = open_session(graph.to_model(), optimize=optimize).run(None, feeds)
        np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.parametrize(
    "model",
    [
        with_pairs("b", zero="u"),
        with_pairs("b", shape="3,8"),
        with_pairs("b", opset=20),
        with_pairs("Identity (x)"),
    ],
    ids=["uint8", "matrix", "opset 20", "no bias"],
)
def test_other_products_keep_their_bias(model: ModelProto) -> None:
    graph = Graph.of(model)
    assert unfuse_biases(graph) == 0
    assert open_session(graph.to_model()).run(None, {"x": normal(*shape_of(model))})


def shape_of(model: ModelProto) -> list[int]:
    """Return the shape of the input."""
    return [size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
