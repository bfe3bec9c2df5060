"""Recurrent layers have a scale per unit of each gate, in Q/DQ pairs and in DynamicQuantizeLSTM."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper
from onnxruntime.quantization import QuantType
from onnxruntime.quantization import quantize_dynamic as by_onnxruntime

from quark_onnx import QConfig, quantize
from quark_onnx.report.measure import decibels
from tests.models import Array, Feeds, kinds, normal, parse, run
from tests.recurrent_oracle import recurrent
from tests.settings import portable

HEADER = '<ir_version: 10, opset_import: ["" : {opset}]>'
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, INPUTS, HIDDEN = 12, 24, 32


def rows(*shape: int, seed: int) -> NDArray[np.float32]:
    """Weights (directions, units, inputs) of rows that differ 170 times, of which few are large."""
    random = np.random.default_rng(seed)
    factors = 170.0 ** -(1 - random.random((*shape[:2], 1)) ** 4)
    values = random.normal(size=shape) * factors * 4 / np.sqrt(shape[2])
    return np.asarray(values, np.float32)


def layer(
    kind: str = "LSTM",
    direction: str = "forward",
    attributes: str = "",
    opset: int = 17,
) -> ModelProto:
    ways = 2 if direction == "bidirectional" else 1
    settings = f'hidden_size = {HIDDEN}, direction = "{direction}"{attributes}'
    return parse(
        HEADER.format(opset=opset)
        + f"g (float[{STEPS},1,{INPUTS}] x) => (float[{STEPS},{ways},1,{HIDDEN}] y)"
        f" {{ [op] y = {kind} <{settings}> (x, w, r) }}",
        w=rows(ways, GATES[kind] * HIDDEN, INPUTS, seed=1),
        r=rows(ways, GATES[kind] * HIDDEN, HIDDEN, seed=2),
    )


def sqnr(expected: Array, found: Array) -> float:
    error = found.astype(np.float64) - expected
    return decibels(float(np.square(expected).sum()), float(np.square(error).sum()))


DATA: list[Feeds] = [{"x": normal(STEPS, 1, INPUTS, seed=seed)} for seed in range(4)]


def against_float64(float_model: ModelProto, model: ModelProto, kind: str) -> float:
    w, r = (
        numpy_helper.to_array(tensor).astype(np.float64)
        for tensor in float_model.graph.initializer[:2]
    )
    expected = [recurrent(kind)(feeds["x"].astype(np.float64), w, r) for feeds in DATA]
    found = [run(model, feeds, optimize=True)[0] for feeds in DATA]
    return sqnr(np.stack(expected), np.stack(found))


@pytest.mark.parametrize("preset", ["A8W8", "A16W8", "W8"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("kind", GATES)
def test_rows_of_unequal_range(kind: str, direction: str, preset: str) -> None:
    """A scale for a whole direction leaves the small rows about one code."""
    model = layer(kind, direction)
    quantized = quantize(model, None if preset == "W8" else DATA, preset).model
    assert against_float64(model, quantized, kind) > 40


@pytest.mark.parametrize("max_opset", [None, 12])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_an_opset_without_an_axis(direction: str, max_opset: int | None) -> None:
    """DequantizeLinear has an axis from opset 13 on, that of com.microsoft at every opset."""
    model = layer("GRU", direction, opset=11)
    config = QConfig.of("A8W8").with_(max_opset=max_opset)
    quantized = quantize(model, DATA, config).model
    domains = {
        node.domain
        for node in quantized.graph.node
        if node.op_type == "DequantizeLinear"
    }
    assert domains == ({"com.microsoft"} if max_opset else {""})
    assert against_float64(model, quantized, "GRU") > 40


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_a_dynamic_lstm(direction: str) -> None:
    """As good as onnxruntime's own, and as right as eight bits of the state allow."""
    model = layer("LSTM", direction)
    quantized = quantize(model, DATA, "DYNAMIC").model
    assert kinds(quantized) == ["DynamicQuantizeLSTM"]
    assert against_float64(model, quantized, "LSTM") > 30


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_a_dynamic_lstm_has_the_layout_of_onnxruntimes(
    direction: str, tmp_path: Any
) -> None:
    """Shapes of codes, scales and zero points are those of onnxruntime's quantizer; our codes are
    unsigned, as products with signed ones saturate on some processors.
    """
    model = layer("LSTM", direction)
    by_onnxruntime(
        model, tmp_path / "m.onnx", weight_type=QuantType.QInt8, per_channel=True
    )
    theirs = onnx.load(tmp_path / "m.onnx")
    ours = quantize(model, DATA, "DYNAMIC").model
    tables = []
    for quantized in (ours, theirs):
        [node] = quantized.graph.node
        constants = {
            t.name: numpy_helper.to_array(t) for t in quantized.graph.initializer
        }
        tables.append([constants.get(name) for name in node.input])
    for own, other in zip(*tables, strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert own.shape == other.shape
    own_codes, other_codes = (np.asarray(table[1], int) for table in tables)
    assert np.abs(own_codes - 128 - other_codes).max() <= 1
    assert (
        against_float64(model, ours, "LSTM")
        > against_float64(model, theirs, "LSTM") - 1
    )


def test_attributes_and_further_inputs_of_a_dynamic_lstm() -> None:
    constants: dict[str, Any] = {
        "w": rows(1, 4 * HIDDEN, INPUTS, seed=1),
        "r": rows(1, 4 * HIDDEN, HIDDEN, seed=2),
        "b": normal(1, 8 * HIDDEN, scale=0.1),
        "h": normal(1, 1, HIDDEN, scale=0.5),
        "c": normal(1, 1, HIDDEN, scale=0.5),
        "p": normal(1, 3 * HIDDEN, scale=0.1),
    }
    model = parse(
        HEADER.format(opset=17)
        + f"g (float[{STEPS},1,{INPUTS}] x) => (float[{STEPS},1,1,{HIDDEN}] y,"
        f" float[1,1,{HIDDEN}] last, float[1,1,{HIDDEN}] cell)"
        f' {{ y, last, cell = LSTM <hidden_size = {HIDDEN}, direction = "reverse", clip = 2.0>'
        " (x, w, r, b, , h, c, p) }",
        **constants,
    )
    quantized = quantize(model, DATA, "DYNAMIC").model
    assert kinds(quantized) == ["DynamicQuantizeLSTM"]
    for feeds in DATA:
        results = zip(run(model, feeds), run(quantized, feeds), strict=True)
        assert all(sqnr(expected, found) > 28 for expected, found in results)


@pytest.mark.parametrize(
    "model",
    [layer("GRU"), layer("RNN")],
    ids=["GRU", "RNN"],
)
def test_layers_without_an_integer_operator_keep_float_activations(
    model: ModelProto,
) -> None:
    quantized = quantize(model, DATA, "DYNAMIC").model
    kind = model.graph.node[0].op_type
    assert kinds(quantized) == ["DequantizeLinear", "DequantizeLinear", kind]
    assert against_float64(model, quantized, kind) > 40


def speaker_encoder() -> ModelProto:
    """Three LSTM layers and a projection of the last step."""
    constants: dict[str, Any] = {"one": np.array([1]), "last": np.array(-1)}
    body, source, width = "", "x", INPUTS
    for place in range(3):
        constants[f"w{place}"] = rows(1, 4 * HIDDEN, width, seed=place)
        constants[f"r{place}"] = rows(1, 4 * HIDDEN, HIDDEN, seed=10 + place)
        body += (
            f"y{place} = LSTM <hidden_size = {HIDDEN}> ({source}, w{place}, r{place})"
            f" t{place} = Squeeze (y{place}, one) "
        )
        source, width = f"t{place}", HIDDEN
    constants["fc"] = normal(HIDDEN, 16, scale=HIDDEN**-0.5)
    return parse(
        HEADER.format(opset=17)
        + f"g (float[{STEPS},1,{INPUTS}] x) => (float[1,16] e) {{ {body}"
        f" z = Gather <axis = 0> ({source}, last) e = MatMul (z, fc) }}",
        **constants,
    )


@pytest.mark.parametrize("preset", ["A8W8", "A16W8", "DYNAMIC"])
def test_a_speaker_encoder(preset: str) -> None:
    """With a scale per direction, 16 dB in all three."""
    model = speaker_encoder()
    quantized = quantize(model, DATA, portable(QConfig.of(preset))).model
    expected, found = (
        np.stack([run(each, feeds)[0] for feeds in DATA]) for each in (model, quantized)
    )
    assert sqnr(expected, found) > 25


@pytest.mark.parametrize("kind", GATES)
def test_blocks_of_recurrent_weights_are_rows(kind: str) -> None:
    """onnxruntime dequantizes rows in three quarters of the time that it takes for blocks."""
    model = parse(
        HEADER.format(opset=21)
        + f"g (float[{STEPS},1,64] x) => (float[{STEPS},1,1,{HIDDEN}] y)"
        f" {{ y = {kind} <hidden_size = {HIDDEN}> (x, w, r) }}",
        w=rows(1, GATES[kind] * HIDDEN, 64, seed=1),
        r=rows(1, GATES[kind] * HIDDEN, HIDDEN, seed=2),
    )
    quantized = quantize(model, None, "INT4").model
    for node in quantized.graph.node:
        blocks = {attribute.name for attribute in node.attribute} & {"block_size"}
        assert not blocks
    feeds = {"x": normal(STEPS, 1, 64)}
    assert sqnr(run(model, feeds)[0], run(quantized, feeds)[0]) > 15
