"""Tensors of two models are paired by name, or where names differ by what computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType
from onnxruntime.quantization import quantize_static as quantize_static_by_onnxruntime

from quark_onnx import QConfig, analyze, quantize_static
from quark_onnx.analysis.match import Matching, match
from quark_onnx.analysis.reading import Reading
from quark_onnx.graph import Graph
from tests.models import (
    MODELS,
    batch_norm_net,
    conv_net,
    conv_relu,
    normal,
    parse,
    residual,
    samples,
    weight,
)
from tests.settings import CHANNEL, SIGNED, TENSOR

UNSAFE = SIGNED.with_(safe=False)


#: Models that become quantized, and whose names ``renamed`` can change: it leaves subgraphs alone.
FLAT = [
    name
    for name in sorted(MODELS.keys() - {"only_integers"})
    if not any(
        attribute.HasField("g")
        for node in MODELS[name]().graph.node
        for attribute in node.attribute
    )
]


def renamed(model: ModelProto) -> ModelProto:
    """The same model with other names for all but its inputs and outputs."""
    result = ModelProto()
    result.CopyFrom(model)
    kept = {value.name for value in (*result.graph.input, *result.graph.output)}
    names: dict[str, str] = {}

    def other(name: str) -> str:
        return (
            name
            if not name or name in kept
            else names.setdefault(name, f"t{len(names)}")
        )

    for tensor in result.graph.initializer:
        tensor.name = other(tensor.name)
    for place, node in enumerate(result.graph.node):
        node.name = f"n{place}"
        node.input[:] = [other(name) for name in node.input]
        node.output[:] = [other(name) for name in node.output]
    del result.graph.value_info[:]
    onnx.checker.check_model(result)
    return result


def matched(model: ModelProto, other: ModelProto) -> Matching:
    return match(Reading(Graph.of(model)), Reading(Graph.of(other)))


class Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, feeds: list[Any]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Any:
        return next(self._feeds, None)


@pytest.mark.parametrize(
    "config",
    [TENSOR, CHANNEL, SIGNED, UNSAFE],
    ids=["tensor", "channel", "signed", "unsafe"],
)
@pytest.mark.parametrize("make", [residual, conv_relu, conv_net, batch_norm_net])
def test_structure_finds_what_names_find(make: Any, config: QConfig) -> None:
    model = make()
    quantized = quantize_static(model, samples(model, 3), config)
    by_name, by_structure = (
        matched(model, quantized),
        matched(model, renamed(quantized)),
    )
    assert by_name.pairs.keys() == by_structure.pairs.keys()
    assert by_name.unmatched.keys() == by_structure.unmatched.keys()
    one, two = (
        analyze(model, other, samples(model, 3))
        for other in (quantized, renamed(quantized))
    )
    assert [(t.name, t.sqnr) for t in one.tensors] == [
        (t.name, t.sqnr) for t in two.tensors
    ]
    assert [(w.name, w.sqnr) for w in one.weights] == [
        (w.name, w.sqnr) for w in two.weights
    ]
    kept = {"x", "y"}
    assert {t.name for t in two.tensors if t.matched_by == "name"} <= kept


@pytest.mark.parametrize("name", FLAT)
def test_every_model_is_matched_without_names(name: str) -> None:
    model = MODELS[name]()
    feeds = samples(model, 2)
    quantized = quantize_static(model, feeds, "A8W8")
    one, two = (
        analyze(model, other, feeds) for other in (quantized, renamed(quantized))
    )
    assert {t.name: t.sqnr for t in two.tensors}.items() <= {
        t.name: t.sqnr for t in one.tensors
    }.items()
    assert len(two.tensors) >= 0.8 * len(one.tensors)


def test_a_sum_in_another_notation_is_found_by_name_and_by_structure() -> None:
    model = parse(
        """g (float[2,4,8] x) => (float[2,4,8] y) {
            h = MatMul (x, w)  s = Add (x, h)
            n = LayerNormalization (s, scale)  y = MatMul (n, u)
        }""",
        w=weight(8, 8),
        u=weight(8, 8, seed=1),
        scale=np.ones(8, np.float32),
    )
    on_cpu = QConfig.of("A8W8").with_(target="cpu")
    quantized = quantize_static(model, samples(model, 3), on_cpu)
    assert "Sum" in {node.op_type for node in quantized.graph.node}
    for other in (quantized, renamed(quantized)):
        assert {"h", "s", "n"} <= matched(model, other).pairs.keys()


@pytest.mark.parametrize("preset", ["BF16_BFP16", "BFP16", "MX9", "MXINT8"])
def test_vendor_operators_need_no_bodies(preset: str) -> None:
    """amd-quark writes its operators without functions of the same name."""
    model, feeds = conv_net(2), samples(conv_net(2), 2)
    bare = quantize_static(model, feeds, QConfig.of(preset).with_(functions=False))
    assert not bare.functions
    found, expected = (
        analyze(model, other, feeds)
        for other in (bare, quantize_static(model, feeds, preset))
    )
    assert [(t.name, t.sqnr) for t in found.tensors] == [
        (t.name, t.sqnr) for t in expected.tensors
    ]
    assert found.weights and all(weight.sqnr > 20 for weight in found.weights)


def test_twins_are_told_apart_by_their_weights() -> None:
    """Three products of one input, as in attention.

    The quantized model has them in another order.
    """
    lines = ["q = MatMul (x, wq)", "k = MatMul (x, wk)", "v = MatMul (x, wv)"]
    end = "a = Mul (q, k) y = Sub (a, v)"
    weights = {
        name: weight(4, 4, seed=seed) for seed, name in enumerate(("wq", "wk", "wv"))
    }

    def made(order: list[str]) -> ModelProto:
        return parse(
            "g (float[N,4] x) => (float[N,4] y) {" + " ".join([*order, end]) + "}",
            **weights,
        )

    feeds = [{"x": normal(8, 4)}]
    quantized = renamed(quantize_static(made(lines[::-1]), feeds, TENSOR))
    found = analyze(made(lines), quantized, feeds)
    assert {tensor.name for tensor in found.tensors} == {"x", "q", "k", "v", "a", "y"}
    assert all(tensor.sqnr > 20 for tensor in found.tensors)


def test_names_that_mean_something_else_are_not_believed() -> None:
    """Exporters number tensors: the same name may be another tensor in the other model."""
    model = parse(
        "g (float[N,4] x) => (float[N,4] y) { a = Relu (x) b = Sigmoid (a) c = Tanh (b)"
        " y = Abs (c) }"
    )
    other = parse(
        """g (float[N,4] x) => (float[N,4] y) {
            q = QuantizeLinear (x, s) d = DequantizeLinear (q, s)
            b = Relu (d) c = Sigmoid (b) a = Tanh (c) y = Abs (a)
        }""",
        s=np.float32(0.01),
    )
    pairs = matched(model, other).pairs
    assert {name: pairs[name].raw for name in "abcy"} == {
        "a": "b",
        "b": "c",
        "c": "a",
        "y": "y",
    }


def test_what_was_fused_is_explained() -> None:
    model = conv_relu()
    found = matched(model, quantize_static(model, samples(model, 3), TENSOR))
    assert found.unmatched == {"h": "Relu is fused into the operator that computes it"}
    assert found.pairs["y"].fused == "Relu"
    assert [node.name for node in found.nodes] == ["conv"]


def test_a_folded_batch_normalization_is_taken_out_of_the_weight() -> None:
    model = batch_norm_net()
    found = analyze(
        model, quantize_static(model, samples(model, 4), CHANNEL), samples(model, 4)
    )
    (weight_error,) = [weight for weight in found.weights if weight.role == "weight"]
    assert weight_error.rescaled
    assert weight_error.sqnr > 30


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "form", [QuantFormat.QDQ, QuantFormat.QOperator], ids=["qdq", "operators"]
)
@pytest.mark.parametrize(
    "kind", [QuantType.QUInt8, QuantType.QInt8], ids=["uint8", "int8"]
)
@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
def test_models_of_onnxruntime(
    tmp_path: Path, form: Any, kind: Any, per_channel: bool
) -> None:
    model, feeds = residual(), samples(residual(), 4)
    onnx.save(model, tmp_path / "model.onnx")
    quantize_static_by_onnxruntime(
        tmp_path / "model.onnx",
        tmp_path / "quantized.onnx",
        Reader(feeds),
        quant_format=form,
        activation_type=kind,
        weight_type=QuantType.QInt8,
        per_channel=per_channel,
    )
    for quantized in (
        onnx.load(tmp_path / "quantized.onnx"),
        renamed(onnx.load(tmp_path / "quantized.onnx")),
    ):
        found = analyze(model, quantized, feeds)
        names = {tensor.name for tensor in found.tensors}
        assert {"x", "y", "m"} <= names
        assert len(names) >= 6
        assert all(tensor.sqnr > 15 for tensor in found.tensors), [
            (t.name, t.sqnr) for t in found.tensors
        ]
        assert {weight.name for weight in found.weights} >= {"w1", "w2", "w3"}
        assert all(w.sqnr > 25 for w in found.weights if w.role == "weight")
