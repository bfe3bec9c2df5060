"""Latency of two models, and the reasons that are named where integers are slower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper, parser

from quark_onnx import QConfig, QuantizationSpec, compare, quantize, quantize_static
from quark_onnx.analysis import Latency, measure_latency
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.trials.latency import reasons
from tests.models import (
    depthwise,
    in_a_branch,
    in_constant_nodes,
    normal,
    parse,
    samples,
    weight,
)

CONV = parse(
    "g (float[N, 3, 8, 8] x) => (float y) { a = Conv (x, w)  y = Relu (a) }",
    w=weight(4, 3, 3, 3),
)
SAMPLES = [{"x": normal(1, 3, 8, 8, seed=seed)} for seed in range(8)]


def silu() -> ModelProto:
    """Three convolutions with SiLU."""
    return parse(
        """g (float[N, 3, 8, 8] x) => (float y) {
            a = Conv (x, w)  b = Sigmoid (a)  c = Mul (a, b)
            d = Conv (c, v)  e = Sigmoid (d)  f = Mul (d, e)
            h = Conv (f, v)  i = Sigmoid (h)  y = Mul (h, i)
        }""",
        w=weight(4, 3, 1, 1),
        v=weight(4, 4, 1, 1),
    )


@pytest.mark.parametrize("isolate", [False, True])
def test_both_models_are_timed(isolate: bool) -> None:
    quantized = quantize_static(CONV, SAMPLES)
    found = compare(
        CONV, quantized, SAMPLES, time=True, threads=1, isolate=isolate
    ).latency
    assert found is not None
    assert found.reference_ms > 0 and found.other_ms > 0
    assert found.threads == 1 and 1 <= found.runs <= 30
    for middle, quartiles in (
        (found.reference_ms, found.reference_quartiles),
        (found.other_ms, found.other_quartiles),
    ):
        assert quartiles is None or quartiles[0] <= middle <= quartiles[1]
    assert compare(CONV, quantized, SAMPLES).latency is None


def test_the_sentence() -> None:
    assert str(Latency(3.0, 2.0, 1, 30)) == (
        "float 3 ms, quantized 2 ms (1.50x faster; median of 30 runs, 1 thread, this CPU)"
    )
    assert "(2.00x slower; median of 5 runs, 4 threads" in str(Latency(10, 20, 4, 5))


def timed(before: tuple[float, float], after: tuple[float, float]) -> Latency:
    """A latency of 10 ms and 8 ms with quartiles."""
    return Latency(10.0, 8.0, 1, 30, (), before, after)


def test_the_sentence_has_quartiles() -> None:
    assert str(timed((9.5, 10.5), (7.9, 8.3))) == (
        "float 10 ms [9.5 to 10.5], quantized 8 ms [7.9 to 8.3] (1.25x faster; median and"
        " quartiles of 30 runs, 1 thread, this CPU)"
    )


@pytest.mark.parametrize(
    ("before", "after", "doubt"),
    [
        ((9.5, 10.5), (7.9, 8.3), ""),
        ((9.0, 10.9), (7.5, 9.0), ""),  # an overlap of steady runs: nearly equal models
        ((8.5, 14.0), (7.0, 9.0), "do not tell which model is faster"),
        ((9.9, 14.0), (7.9, 8.1), "the ratio is rough"),
    ],
)
def test_runs_that_scatter_are_doubted(
    before: tuple[float, float], after: tuple[float, float], doubt: str
) -> None:
    found = timed(before, after)
    assert doubt in found.doubt and bool(doubt) is bool(found.doubt)
    assert Latency(10.0, 8.0, 1, 3).doubt == ""


def test_16_bit_activations_are_a_reason() -> None:
    found = " ".join(reasons(quantize_static(CONV, SAMPLES, "A16W8"), 1.0))
    assert "16-bit activations" in found and "--preset A8W8" in found


@pytest.mark.parametrize(("machine", "slow"), [("AMD64", True), ("aarch64", False)])
def test_signed_activations_are_a_reason_on_x86(
    machine: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    found = " ".join(reasons(quantize_static(CONV, SAMPLES, "S8S8"), 1.0))
    assert ("int8 activations" in found and "--preset A8W8" in found) is slow
    assert "int8 activations" not in " ".join(
        reasons(quantize_static(CONV, SAMPLES), 1.0)
    )


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("A8W4", "4-bit weights"),
        ("INT4", "4-bit weights"),
        ("DYNAMIC", "dynamic scales"),
    ],
)
def test_float_arithmetic_of_convolutions_is_a_reason(preset: str, words: str) -> None:
    model = parse(
        "g (float[N, 64, 3, 3] x) => (float y) { y = Conv (x, w) }",
        w=weight(8, 64, 1, 1),
    )
    data = samples(model) if QConfig.of(preset).measures else None
    found = " ".join(reasons(quantize(model, data, preset).model, 1.0))
    assert words in found and "--preset A8W8" in found


def test_weights_that_each_run_dequantizes_are_a_reason(tmp_path: Path) -> None:
    """The entry that the reason names leaves onnxruntime nothing to dequantize."""
    (reason,) = (
        text
        for text in reasons(quantize(CONV, None, "W8", tmp_path / "w8.onnx").model, 1.0)
        if "disable_quant_qdq" in text
    )
    assert reason.startswith("1 weight is dequantized in each run")
    left = []
    for value in ("0", "1"):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.add_session_config_entry("session.disable_quant_qdq", value)
        ort.InferenceSession(
            tmp_path / "w8.onnx", options, providers=["CPUExecutionProvider"]
        )
        operators = [
            node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node
        ]
        left.append(operators.count("DequantizeLinear"))
    assert left == [1, 0]
    # Activations of integers have kernels that the entry would turn off.
    assert "disable_quant_qdq" not in " ".join(
        reasons(quantize_static(CONV, SAMPLES), 1.0)
    )


def test_silu_is_a_reason() -> None:
    model = silu()
    found = " ".join(reasons(quantize_static(model, SAMPLES), 1.0))
    assert "3 SiLU activations" in found


def test_pairs_that_are_not_fused_are_a_reason() -> None:
    model = parse(
        """g (float[N, 3, 8, 8] x) => (float y) {
            a = Conv (x, w)  b = HardSwish (a)  y = Conv (b, v)
        }""",
        w=weight(4, 3, 1, 1),
        v=weight(4, 4, 1, 1),
    )
    config = QConfig.of("A8W8").with_(safe=False)
    quantized = quantize_static(model, SAMPLES, config)
    for place in (quantized, in_a_branch(quantized)):
        assert "(1 HardSwish) are not fused" in " ".join(reasons(place, 1.0))


@pytest.mark.parametrize("form", ["qdq", "operators"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_zero_points_of_depthwise_channels_are_a_reason(dtype: str, form: str) -> None:
    """A wish for different zero points is obeyed; the report and the reasons name the price."""
    model, free = (
        depthwise(),
        QuantizationSpec(dtype, symmetric=False, per_channel=True),
    )
    config = QConfig.of("U8U8").with_(weight=free, form=form)
    result = quantize(model, samples(model), config)
    zero_points = numpy_helper.to_array(
        next(t for t in result.model.graph.initializer if t.name == "w_zero_point")
    )
    assert len(set(zero_points.tolist())) > 1
    for notes in (result.report.notes, reasons(result.model, 1.0)):
        assert "1 depthwise convolution ('conv' the first)" in " ".join(notes)


#: Neither has a slow kernel: the model, and its configuration.
FREE = QConfig.of("U8U8").with_(
    weight=QuantizationSpec("uint8", symmetric=False, per_channel=True)
)
FAST = {
    "symmetric": (depthwise(), QConfig.of("U8U8")),
    "one zero point": (depthwise(), FREE.with_(per_channel=False)),
    "no depthwise convolution": (CONV, FREE),
    "16-bit activations": (
        depthwise(),
        FREE.with_(activation=QConfig.of("A16W8").activation),
    ),
}


@pytest.mark.parametrize("name", FAST)
def test_other_convolutions_have_fast_kernels(name: str) -> None:
    model, config = FAST[name]
    result = quantize(model, samples(model), config)
    for notes in (result.report.notes, reasons(result.model, 1.0)):
        assert "zero points" not in " ".join(notes)


def test_unsigned_weights_have_one_zero_point() -> None:
    model = depthwise()
    result = quantize_static(model, samples(model), "U8U8")
    [zero_point] = [t for t in result.graph.initializer if t.name == "w_zero_point"]
    assert numpy_helper.to_array(zero_point).tolist() == [128] * 4


@pytest.mark.parametrize("preset", ["A16W8", "A8W8", "A8W4", "INT4", "DYNAMIC"])
def test_constants_may_be_nodes(preset: str) -> None:
    model = silu()
    data = samples(model) if QConfig.of(preset).measures else None
    quantized = quantize(model, data, preset).model
    expected = list(reasons(quantized, 1.0))
    assert list(reasons(in_constant_nodes(quantized), 1.0)) == expected


@pytest.mark.parametrize("preset", ["A16W8", "A8W8", "A8W4", "INT4", "DYNAMIC"])
def test_layers_may_stand_in_a_body(preset: str) -> None:
    model = silu()
    data = samples(model) if QConfig.of(preset).measures else None
    quantized = quantize(model, data, preset).model
    expected = list(reasons(quantized, 1.0))
    assert list(reasons(in_a_branch(quantized), 1.0)) == expected


@pytest.mark.parametrize("form", ["qdq", "operators"])
@pytest.mark.parametrize("place", [in_constant_nodes, in_a_branch])
def test_zero_points_of_depthwise_channels_may_be_elsewhere(
    place: Callable[[ModelProto], ModelProto], form: str
) -> None:
    model = depthwise()
    config = FREE.with_(form=form)
    quantized = place(quantize(model, samples(model), config).model)
    found = " ".join(reasons(quantized, 1.0))
    assert "1 depthwise convolution ('conv' the first)" in found


@pytest.mark.parametrize(("kind", "wide"), [(5, True), (4, True), (2, False)])
def test_the_type_of_codes_may_be_an_attribute(kind: int, wide: bool) -> None:
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N] x) => (float[N] y) <float s = {{0.1}}> {{
            codes = QuantizeLinear <output_dtype = {kind}> (x, s)
            y = DequantizeLinear (codes, s)
        }}""")
    assert ("16-bit activations" in " ".join(reasons(model, 1.0))) is wide


def test_wide_weights_are_no_wide_activations() -> None:
    weights = QConfig.of("INT16").weight
    config = QConfig.of("A8W8").with_(weight=weights)
    found = " ".join(reasons(quantize_static(CONV, SAMPLES, config), 1.0))
    assert "16-bit" not in found


def test_a_tiny_model_is_a_reason() -> None:
    assert "overhead" in " ".join(reasons(CONV, 0.01))


def test_what_cannot_be_timed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threads is -1"):
        measure_latency(CONV, CONV, SAMPLES[0], threads=-1)
    with pytest.raises(ModelError, match="the reference model cannot be timed"):
        measure_latency(CONV, CONV, {"x": np.zeros((1, 5, 8, 8), np.float32)})
