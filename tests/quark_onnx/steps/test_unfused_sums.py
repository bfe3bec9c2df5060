"""unfuse_sums: no sum in front of a normalization becomes a slower operator in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, helper

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.steps import unfuse_sums
from tests.models import normal, parse, run, samples, weight
from tests.optimized import optimized_kinds

WIDTH = 16
#: Presets whose models run in onnxruntime.
COMMON = ("A8W8", "U8U8", "S8S8", "DYNAMIC", "W8", "INT4")
NORM = "n = LayerNormalization (s, scale, shift)"
DECOMPOSED = """
    m = ReduceMean <axes = [-1]> (s)  d = Sub (s, m)  q = Pow (d, two)
    v = ReduceMean <axes = [-1]> (q)  e = Add (v, small)  r = Sqrt (e)  k = Div (d, r)
    f = Mul (k, scale)  n = Add (f, shift)
"""
#: Texts between the product p and the normalized tensor n, whose sum is written as Sum.
FUSED = {
    "operator": f"s = Add (p, x)  {NORM}",
    "decomposed": f"s = Add (p, x)  {DECOMPOSED}",
    "positions": f"s = Add (p, places)  {NORM}",
    "opset 22": f"s = Add (p, x)  {NORM}",
}
#: Texts with an Add that stays.
KEPT = {
    "bias": f"s = Add (p, bias)  {NORM}",
    "two readers": f"s = Add (p, x)  {NORM}  o = Relu (s)",
    "another axis": "s = Add (p, x)  n = LayerNormalization <axis = 1> (s, wide)",
    "root mean square": (
        "s = Add (p, x)  q = Mul (s, s)  v = ReduceMean <axes = [-1]> (q)  e = Add"
        " (v, small)  r = Sqrt (e)  n = Div (s, r)"
    ),
}


def block(text: str, opset: int = 17) -> ModelProto:
    """A layer, a sum with its input, a normalization and a layer."""
    extra = f", float[1,6,{WIDTH}] o" if "o =" in text else ""
    model = parse(
        f"""g (float[1,6,{WIDTH}] x) => (float[1,6,8] y{extra}) {{
            p = MatMul (x, w)  {text}  y = MatMul (n, u)
        }}""",
        w=weight(WIDTH, WIDTH),
        u=weight(WIDTH, 8, seed=1),
        places=normal(1, 6, WIDTH, seed=2),
        bias=normal(WIDTH, seed=3),
        scale=1 + normal(WIDTH, seed=4, scale=0.1),
        shift=normal(WIDTH, seed=5, scale=0.1),
        wide=np.ones((6, WIDTH), np.float32),
        small=np.float32(1e-6),
        two=np.float32(2),
    )
    model.opset_import[0].CopyFrom(helper.make_opsetid("", opset))
    return model


def opset_of(name: str) -> int:
    return 22 if name == "opset 22" else 17


@pytest.mark.parametrize("preset", COMMON)
@pytest.mark.parametrize("name", FUSED)
def test_onnxruntime_does_not_fuse_the_sum(
    name: str, preset: str, tmp_path: Path
) -> None:
    model = block(FUSED[name], opset_of(name))
    data = samples(model) if QConfig.of(preset).measures else None
    result = quantize(model, data, preset)
    found = optimized_kinds(result.model, tmp_path)
    assert "SkipLayerNormalization" not in found
    assert "LayerNormalization" in found
    assert any("written as Sum" in note for note in result.report.notes)


@pytest.mark.parametrize("name", FUSED)
def test_the_float_model_is_fused(name: str, tmp_path: Path) -> None:
    """Without this the tests above would not say anything."""
    found = optimized_kinds(block(FUSED[name], opset_of(name)), tmp_path)
    assert "SkipLayerNormalization" in found


@pytest.mark.parametrize("name", KEPT)
def test_other_sums_stay(name: str) -> None:
    model = block(KEPT[name])
    result = quantize(model, samples(model), "A8W8").model
    assert "Sum" not in {node.op_type for node in result.graph.node}


@pytest.mark.parametrize("preset", ["XINT8", "BF16", "BFP16", "MX6", "MXFP4E2M1"])
def test_formats_of_accelerators_keep_the_operator(preset: str) -> None:
    assert not unfuse_sums(Graph(block(FUSED["operator"])), QConfig.of(preset))


def test_a_target_keeps_the_operator() -> None:
    graph = Graph(block(FUSED["operator"]))
    assert not unfuse_sums(graph, QConfig.of("A8W8").with_(target="npu"))


def test_values_are_the_same() -> None:
    model = block(FUSED["operator"])
    graph = Graph(block(FUSED["operator"]))  # takes the nodes of the model
    assert unfuse_sums(graph, QConfig.of("A8W8"))
    for feeds in samples(model):
        for expected, found in zip(
            run(model, feeds), run(graph.to_model(), feeds), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
