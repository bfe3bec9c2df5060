"""AutoMixedPrecision: the fewest nodes that reach a target, and a report that says when it is out of reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, QuantizationSpec, quantize
from quark_onnx.errors import ConfigError
from quark_onnx.optimizers import AutoMixedPrecision
from tests.models import Feeds, kinds, parse, run, weight
from tests.quark_onnx.optimizers.networks import attentive, texts


def broken() -> tuple[ModelProto, list[Feeds]]:
    """Between two ordinary layers, a tensor with one channel a thousand times larger than the others."""
    spread = np.ones(8, np.float32)
    spread[3] = 1000
    model = parse(
        """g (float[N,8] x) => (float[N,8] y) {
            [a] a = Gemm (x, w1)
            [spread] s = Mul (a, big)
            [relu] r = Relu (s)
            [back] b = Mul (r, small)
            [b] c = Gemm (b, w2)
            [c] d = Relu (c)
            [d] y = Gemm (d, w3)
        }""",
        w1=weight(8, 8, seed=1),
        w2=weight(8, 8, seed=2),
        w3=weight(8, 8, seed=3),
        big=spread,
        small=1 / spread,
    )
    random = np.random.default_rng(0)
    return model, [{"x": random.normal(size=(16, 8)).astype(np.float32)} for _ in range(12)]


def residual_of_weights() -> tuple[ModelProto, list[Feeds]]:
    """Three layers, the second with an outlier in each channel, which matters little."""
    wide = weight(8, 8, seed=2)
    wide[0] = 20
    model = parse(
        "g (float[N,8] x) => (float[N,8] y) { [a] p = Gemm (x, w1) [r] r = Relu (p) [b] q = Gemm (r, w2) "
        "[c] y = Gemm (q, w3) }",
        w1=weight(8, 8, seed=1) * np.array([0.001, 1, 1, 1, 1, 1, 1, 1], np.float32),
        w2=wide,
        w3=weight(8, 8, seed=3),
    )
    random = np.random.default_rng(0)
    return model, [{"x": random.normal(size=(16, 8)).astype(np.float32)} for _ in range(12)]


def sqnr(model: ModelProto, quantized: ModelProto, data: list[Feeds]) -> float:
    pairs = [(run(model, sample)[0], run(quantized, sample)[0]) for sample in data]
    signal = sum(float(np.square(a, dtype=np.float64).sum()) for a, _ in pairs)
    noise = sum(float(np.square((a - b).astype(np.float64)).sum()) for a, b in pairs)
    return 10 * float(np.log10(signal / noise))


def mixed(**settings: Any) -> QConfig:
    return QConfig.of("A8W8").with_(optimizers=AutoMixedPrecision(**settings), safe=False)


def raised(result: Any) -> list[str]:
    lines = [note for note in result.report.notes if note.startswith("raised to ")]
    return [line.partition(": ")[2].partition(" (")[0] for line in lines]


def headline(result: Any) -> str:
    return str(next(note for note in result.report.notes if note.startswith("auto_mixed_precision: ")))


@pytest.mark.parametrize("to", ["16bit", "float"])
def test_the_target_is_met_by_a_few_nodes(to: str) -> None:
    model, data = broken()
    plain = quantize(model, data, QConfig.of("A8W8").with_(safe=False))
    result = quantize(model, data, mixed(target=30.0, to=to))
    assert sqnr(model, plain.model, data) < 15 < 29 < sqnr(model, result.model, data)
    assert 0 < len(raised(result)) < 5 and not {"a", "d"} & set(raised(result))
    word = "16 bits" if to == "16bit" else "float"
    assert f"{len(raised(result))} of 7 nodes {word}" in headline(result) and "missed" not in headline(result)


def test_weights_get_eight_bits_where_four_are_too_few() -> None:
    """The layer whose weights have an outlier in every channel, and its weights alone."""
    model, data = residual_of_weights()
    config = QConfig.of("A8W8").with_(weight=QuantizationSpec("int4", per_channel=True))
    plain = quantize(model, data, config)
    result = quantize(model, data, config.with_(optimizers=AutoMixedPrecision(target=14.0, to="8bit_weights")))
    assert sqnr(model, plain.model, data) < 1 < 14 < sqnr(model, result.model, data)
    assert raised(result) == ["b"] and "1 of 4 nodes 8-bit weights" in headline(result)
    stored = [each.data_type for each in result.model.graph.initializer if len(each.dims) == 2]
    assert sorted(stored) == sorted([TensorProto.INT4, TensorProto.INT8, TensorProto.INT4])


@pytest.mark.parametrize("preset", ["A8W8", "FP8E4M3", "DYNAMIC"])
def test_weights_that_have_eight_bits_cannot_be_raised(preset: str) -> None:
    config = QConfig.of(preset).with_(optimizers=AutoMixedPrecision(to="8bit_weights"))
    with pytest.raises(ConfigError, match="no weights are integers of fewer bits"):
        quantize(attentive(), texts(4), config)


def test_a_model_that_is_good_already_is_left_as_it_is() -> None:
    model, data = attentive(), texts()
    plain = quantize(model, data, "A8W8")
    result = quantize(model, data, QConfig.of("A8W8").with_(optimizers=AutoMixedPrecision(target=5.0)))
    assert result.model.graph == plain.model.graph and not raised(result)
    assert "0 of" in headline(result)


def test_no_more_than_the_share_is_raised_and_a_miss_is_said() -> None:
    model, data = broken()
    result = quantize(model, data, mixed(target=30.0, share=0.15))
    assert len(raised(result)) == 1 and headline(result).endswith("missed)")
    result = quantize(model, data, mixed(target=200.0))
    assert headline(result).endswith("(target 200 dB, missed)")
    run(result.model, data[0])


def test_a_metric_of_the_user() -> None:
    model, data = broken()
    labels = [run(model, sample)[0].argmax(axis=1) for sample in data]
    calls = list[float]()

    def accuracy(candidate: ModelProto) -> float:
        session = open_session(candidate)
        hits = [session.run(None, s)[0].argmax(axis=1) == label for s, label in zip(data, labels, strict=True)]
        calls.append(float(np.mean(hits)))
        return calls[-1]

    result = quantize(model, data, mixed(target=0.05, metric=accuracy))
    assert accuracy(result.model) >= 0.9 and "dB" not in headline(result) and "missed" not in headline(result)
    assert len(calls) > 8 and raised(result)


@pytest.mark.parametrize("answer", [None, "good", float("nan"), [1, 2]])
def test_a_metric_that_gives_no_number(answer: Any) -> None:
    model, data = broken()
    with pytest.raises(ConfigError, match="metric of auto_mixed_precision returned"):
        quantize(model, data, mixed(target=0.05, metric=lambda candidate: answer))


@pytest.mark.parametrize("preset", ["A8W4", "INT4", "XINT8", "FP8E4M3", "FP4E2M1", "DYNAMIC", "A16W8"])
def test_with_any_format(preset: str) -> None:
    """Those that need another opset, or come as functions, can be measured, too; what has 16 bits can only be float."""
    config = QConfig.of(preset)
    result = quantize(attentive(), texts(4), config.with_(optimizers=AutoMixedPrecision(target=60.0, samples=2)))
    assert headline(result)
    run(result.model, texts(1)[0])
    if preset in ("A16W8", "DYNAMIC", "INT4"):
        assert "16 bits" not in headline(result)


def test_the_names_of_nodes_are_names_not_patterns() -> None:
    model, data = broken()
    for place, node in enumerate(model.graph.node):
        node.name = f"layers.{place}[*]/re:^{node.name}?"
    result = quantize(model, data, mixed(target=30.0))
    assert raised(result) and "missed" not in headline(result)


def test_weights_are_quantized_from_the_float_ones() -> None:
    """Not from those of eight bits: a node left float has its own weights."""
    model, data = broken()
    result = quantize(model, data, mixed(target=1000.0, to="float"))
    assert "QuantizeLinear" not in kinds(result.model)
    np.testing.assert_array_equal(run(result.model, data[0])[0], run(model, data[0])[0])


def test_what_cannot_be_done_is_an_error() -> None:
    model, data = broken()
    with pytest.raises(ConfigError, match="needs calibration data"):
        quantize(model, None, QConfig.of("INT4").with_(optimizers=AutoMixedPrecision()))
    with pytest.raises(ConfigError, match="given twice"):
        quantize(model, data, QConfig.of("A8W8").with_(optimizers=(AutoMixedPrecision(), AutoMixedPrecision())))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("target", "high"),
        ("target", float("nan")),
        ("target", True),
        ("to", "8bit"),
        ("to", ["16bit"]),
        ("samples", 0),
        ("samples", 2.5),
        ("share", 0),
        ("share", 1.5),
        ("share", float("nan")),
        ("metric", 3),
    ],
)
def test_bad_settings(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting} of auto_mixed_precision is"):
        AutoMixedPrecision(**{setting: value})
