"""cpu_forms: no operator is written that onnxruntime runs slowly, where another has its values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.writing.cpu_forms import write_cpu_forms
from tests.models import normal, parse, run, samples, weight
from tests.optimized import optimized_kinds
from tests.settings import portable

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
}
#: Each of these texts with an opset; ReduceMean has an attribute of axes up to 17.
CASES = [*((name, 17) for name in FUSED), ("operator", 22)]
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
    model.opset_import[0].version = opset
    return model


def on_cpu(preset: str) -> QConfig:
    return QConfig.of(preset).with_(target="cpu")


@pytest.mark.parametrize("preset", COMMON)
@pytest.mark.parametrize(("name", "opset"), CASES)
def test_onnxruntime_does_not_fuse_the_sum(
    name: str, opset: int, preset: str, tmp_path: Path
) -> None:
    model = block(FUSED[name], opset)
    data = samples(model) if QConfig.of(preset).measures else None
    result = quantize(model, data, on_cpu(preset))
    found = optimized_kinds(result.model, tmp_path)
    assert "SkipLayerNormalization" not in found
    assert "LayerNormalization" in found
    assert any("written as Sum" in note for note in result.report.notes)


@pytest.mark.parametrize(("name", "opset"), CASES)
def test_the_float_model_is_fused(name: str, opset: int, tmp_path: Path) -> None:
    """Without this the tests above would not say anything."""
    found = optimized_kinds(block(FUSED[name], opset), tmp_path)
    assert "SkipLayerNormalization" in found


@pytest.mark.parametrize("name", KEPT)
def test_other_sums_stay(name: str) -> None:
    model = block(KEPT[name])
    result = quantize(model, samples(model), on_cpu("A8W8")).model
    assert "Sum" not in {node.op_type for node in result.graph.node}


@pytest.mark.parametrize("preset", ["XINT8", "BF16", "BFP16", "MX6", "MXFP4E2M1"])
def test_formats_of_accelerators_keep_the_operator(preset: str) -> None:
    assert not write_cpu_forms(Graph(block(FUSED["operator"])), QConfig.of(preset))


@pytest.mark.parametrize("target", ["npu", "openvino", "qnn", "web"])
def test_another_target_keeps_the_operator(target: str) -> None:
    graph = Graph(block(FUSED["operator"]))
    assert not write_cpu_forms(graph, QConfig.of("A8W8").with_(target=target))


@pytest.mark.parametrize("preset", COMMON)
def test_a_file_without_a_target_is_portable(preset: str) -> None:
    """The note names the target that would write the faster form."""
    model = block(FUSED["operator"])
    data = samples(model) if QConfig.of(preset).measures else None
    result = quantize(model, data, preset)
    assert "Sum" not in {node.op_type for node in result.model.graph.node}
    assert any("--target cpu writes Sum" in note for note in result.report.notes)


def wide(model: ModelProto) -> list[dict[str, np.ndarray]]:
    """Samples with an outlier channel, as residual streams have."""
    scale = np.where(np.arange(WIDTH) == 3, 40, 1).astype(np.float32)
    return [
        {name: value * scale for name, value in each.items()} for each in samples(model)
    ]


def sqnr(model: ModelProto, other: ModelProto) -> float:
    expected, found = (
        np.concatenate([run(each, feeds)[0] for feeds in wide(model)])
        for each in (model, other)
    )
    error = np.square(expected - found).sum()
    return float(10 * np.log10(np.square(expected).sum() / error))


def sums_read_floats(model: ModelProto) -> bool:
    """Whether the sum before the normalization and its result have no pair."""
    [total] = [node for node in model.graph.node if node.op_type == "Sum"]
    [norm] = [node for node in model.graph.node if "LayerNorm" in node.op_type]
    return norm.input[0] == total.output[0] and total.input[0] == "p"


@pytest.mark.parametrize("first", ["A8W8", "W8", "DYNAMIC"])
def test_a_second_run_keeps_the_residual_stream_float(first: str) -> None:
    model = block(FUSED["operator"])
    once = quantize(
        model, wide(model) if first == "A8W8" else None, portable(on_cpu(first))
    ).model
    again = on_cpu("A8W8").with_(keep_existing=True)
    twice = quantize(once, wide(model), again).model
    assert sums_read_floats(twice)
    assert sqnr(model, twice) > sqnr(model, quantize(model, wide(model)).model) - 0.5


def test_a_residual_sum_of_an_exporter_stays_float() -> None:
    found = {
        kind: quantize(model, wide(model), on_cpu("A8W8")).model
        for kind in ("Add", "Sum")
        for model in [block(FUSED["operator"].replace("Add", kind))]
    }
    assert all(map(sums_read_floats, found.values()))
    model = block(FUSED["operator"])
    assert sqnr(model, found["Sum"]) == sqnr(model, found["Add"])


def test_the_users_own_model_is_returned_without_a_note() -> None:
    model = block(FUSED["operator"])
    config = on_cpu("A8W8").with_(exclude=("*",))
    result = quantize(model, samples(model), config)
    assert [node.op_type for node in result.model.graph.node] == [
        node.op_type for node in model.graph.node
    ]
    assert not any("Sum" in note for note in result.report.notes)


def test_values_are_the_same() -> None:
    model = block(FUSED["operator"])
    graph = Graph(block(FUSED["operator"]))  # takes the nodes of the model
    assert write_cpu_forms(graph, on_cpu("A8W8"))
    for feeds in samples(model):
        for expected, found in zip(
            run(model, feeds), run(graph.to_model(), feeds), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def rectified(*slopes: float) -> ModelProto:
    """Two convolutions with a PRelu between them, which has a slope per channel."""
    return parse(
        """g (float[1,2,6,6] x) => (float[1,3,6,6] y) {
            c = Conv (x, w)  a = PRelu (c, s)  y = Conv (a, u)
        }""",
        w=normal(len(slopes), 2, 1, 1),
        s=np.float32(slopes).reshape(-1, 1, 1),
        u=normal(3, len(slopes), 1, 1, seed=1),
    )


@pytest.mark.parametrize("slopes", [(0.25, 0.1), (1.0, 0.5), (-0.5, 0.0)])
def test_a_prelu_on_codes_becomes_a_maximum(slopes: tuple[float, ...]) -> None:
    model = rectified(*slopes)
    plain = quantize(model, samples(model), "A8W8").model
    result = quantize(model, samples(model), on_cpu("A8W8"))
    kinds = {node.op_type for node in result.model.graph.node}
    assert "PRelu" not in kinds and "Max" in kinds
    assert any("written as Max" in note for note in result.report.notes)
    for feeds in samples(model, seed=1):
        np.testing.assert_array_equal(run(result.model, feeds), run(plain, feeds))


@pytest.mark.parametrize("slopes", [(0.25, 1.5), (2.0, 3.0)])
def test_a_prelu_with_steep_slopes_stays(slopes: tuple[float, ...]) -> None:
    model = rectified(*slopes)
    result = quantize(model, samples(model), on_cpu("A8W8")).model
    assert "PRelu" in {node.op_type for node in result.graph.node}


def test_a_float_prelu_with_a_slope_of_zero_keeps_infinities() -> None:
    assert not write_cpu_forms(Graph(rectified(0.0, 0.5)), on_cpu("W8"))
    graph = Graph(rectified(0.1, 0.5))
    assert write_cpu_forms(graph, on_cpu("W8"))
    feeds = {"x": np.full((1, 2, 6, 6), np.inf, np.float32)}
    model = rectified(0.1, 0.5)
    np.testing.assert_array_equal(run(graph.to_model(), feeds), run(model, feeds))


def test_a_portable_prelu_stays_with_a_note() -> None:
    model = rectified(0.25, 0.1)
    result = quantize(model, samples(model), "A8W8")
    assert "PRelu" in {node.op_type for node in result.model.graph.node}
    assert any("--target cpu writes Max" in note for note in result.report.notes)


def test_a_prelu_with_an_infinite_slope_stays() -> None:
    """An infinite slope times 0 is not a number, while a PRelu of 0 is 0."""
    model = rectified(-np.inf, 0.5)
    result = quantize(model, samples(model), on_cpu("A8W8")).model
    assert "PRelu" in {node.op_type for node in result.graph.node}


def test_a_maximum_has_the_name_of_the_prelu() -> None:
    graph = Graph(rectified(0.1, 0.5))
    [prelu] = graph.nodes_of({"PRelu"})
    assert write_cpu_forms(graph, on_cpu("W8"))
    assert [node.name for node in graph.nodes_of({"Max"})] == [prelu.name]
