"""prepare: the cleaned graph computes the same, and a pass that breaks a model is taken back and
named.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ModelError
from quark_onnx.common.registry import OPTIMIZERS
from quark_onnx.config import Override
from quark_onnx.graph import Graph
from quark_onnx.passes import CLEANING, Pass, batch_norm_to_conv, fold_batch_norm
from quark_onnx.planning.prepare import prepare
from quark_onnx.running.run import Reference, agree
from tests.cases import loop_over
from tests.models import (
    MODELS,
    Factory,
    batch_norm_net,
    hidden_weight,
    interface,
    kinds,
    normal,
    parse,
    run,
    samples,
)
from tests.settings import TENSOR

STEP = sys.modules[prepare.__module__]  # the package gives its name to the function


def prepared(model: ModelProto, config: QConfig = TENSOR) -> tuple[Graph, list[str]]:
    return prepare(Graph.of(model), config, Reference(model), samples(model)[0])


@loop_over("make", MODELS)
def test_what_a_model_computes_stays(make: Factory) -> None:
    model = make()
    graph, notes = prepared(model)
    after = graph.to_model()
    assert interface(after) == interface(model) and not any(
        "rolled back" in note or "failed" in note for note in notes
    )
    for feeds in samples(model, 2):
        assert all(
            agree(a, b)
            for a, b in zip(run(model, feeds), run(after, feeds), strict=True)
        )


def test_everything_at_once() -> None:
    graph, notes = prepared(batch_norm_net())
    assert [node.op_type for node in graph.nodes] == ["Conv", "Relu"]
    assert notes == ["remove_identity: 1", "fold_batch_norm: 1"]
    graph, notes = prepared(hidden_weight())
    assert [node.op_type for node in graph.nodes] == ["MatMul", "MatMul"] and notes == [
        "fold_constants: 4"
    ]


def test_not_at_all_on_request() -> None:
    graph, notes = prepared(batch_norm_net(), TENSOR.with_(prepare=False))
    assert [node.op_type for node in graph.nodes] == kinds(
        batch_norm_net()
    ) and notes == []


# Passes that lie


def negate(graph: Graph) -> int:
    """Claims to keep the function, and turns the sign of the first layer."""
    (weight,) = (name for name in graph.initializers if name.startswith("w"))
    array = graph.constant(weight)
    assert array is not None
    graph.set_input(graph.nodes[0], 1, graph.add_constant("wrong", -array))
    return 1


def break_it(graph: Graph) -> int:
    """Leaves a graph that does not even run."""
    graph.set_input(graph.nodes[0], 0, "nothing")
    return 1


def fail(graph: Graph) -> int:
    """Stops half-way."""
    break_it(graph)
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("wrong", "note"),
    [
        (negate, "negate changed the outputs and was rolled back"),
        (break_it, "break_it changed the outputs and was rolled back"),
        (fail, "fail failed: 'oops'"),
    ],
)
@pytest.mark.parametrize("place", [0, len(CLEANING)])
def test_a_wrong_pass_is_taken_back_and_named_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wrong: Pass,
    note: str,
    place: int,
) -> None:
    monkeypatch.setattr(STEP, "CLEANING", (*CLEANING[:place], wrong, *CLEANING[place:]))
    model = batch_norm_net()
    with caplog.at_level(logging.WARNING):
        graph, notes = prepared(model)
    feeds = samples(model)[0]
    assert agree(run(model, feeds)[0], run(graph.to_model(), feeds)[0])
    assert note in notes and wrong.__name__ in caplog.text
    assert {"remove_identity: 1", "fold_batch_norm: 1"} <= set(notes)
    assert [node.op_type for node in graph.nodes] == ["Conv", "Relu"]


def test_the_report_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STEP, "CLEANING", (negate, fold_batch_norm))
    model = batch_norm_net()
    report = quantize(model, samples(model), TENSOR).report
    assert "negate changed the outputs and was rolled back" in report.notes
    assert "fold_batch_norm: 1" in report.notes and report.worst_sqnr > 25


def test_a_model_that_does_not_run_is_the_users() -> None:
    model = parse(
        "g (float[2] x) => (float[2] y) { [node] y = Reshape (x, s) }", s=np.int64([3])
    )
    with pytest.raises(ModelError, match="onnxruntime cannot run the model"):
        prepared(model)


def test_agreement_is_relative_and_mindful_of_what_is_no_number() -> None:
    a = np.float32([1e6, 1])
    assert agree(a, a + np.float32([10, 0])) and not agree(a, a + np.float32([1000, 0]))
    assert agree(np.float32([np.nan, np.inf]), np.float32([np.nan, np.inf]))
    assert not agree(np.float32([np.inf]), np.float32([1]))
    assert not agree(a, a[:1]) and not agree(a, a.astype(np.float64))
    assert (
        agree([a, a], [a, a])
        and not agree([a], [a, a])
        and agree(None, None)
        and not agree(None, a)
    )
    assert (
        agree({"a": 1.0}, {"a": 1.000001})
        and not agree({"a": 1.0}, {"b": 1.0})
        and not agree({"a": 1.0}, {"a": 2.0})
    )
    assert agree(np.int64([3]), np.int64([3])) and not agree(
        np.int64([3]), np.int64([4])
    )


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("preset", ["A8W8", "XINT8"])
def test_a_layer_that_no_output_depends_on_changes_nothing(
    optimizer: str, preset: str
) -> None:
    """Stages work on what will be written, so none of them meets a node that will not be."""
    config = QConfig.of({"preset": preset, "optimizers": [optimizer]})
    graphs = []
    for dead in ("", "dead = Gemm(x, v)"):
        model = parse(
            "net (float[N, 12] x) => (float[N, 8] y) {" + dead + " y = MatMul(x, w) }",
            w=normal(12, 8),
            v=normal(12, 16),
        )
        graphs.append(quantize(model, samples(model, 20), config).model.graph)
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("A8W8", "Conv"),
        ("DYNAMIC", "BatchNormalization"),
        ("BF16", "BatchNormalization"),
    ],
)
def test_a_norm_that_no_layer_takes_up_is_a_convolution_on_integers(
    preset: str, kind: str
) -> None:
    model = parse(
        """g (float[1,2,4,4] x) => (float[1,4,4,4] y) {
            c = Concat <axis = 1> (x, x)
            y = BatchNormalization (c, gamma, beta, mean, variance)
        }""",
        gamma=np.float32([1, 100, 0.01, -3]),
        beta=np.float32([0, 1, 2, 3]),
        mean=np.float32([0.5, -0.5, 4, 0]),
        variance=np.float32([1, 2, 0.1, 9]),
    )
    graph, _ = prepared(model, QConfig.of(preset))
    assert [node.kind for node in graph.nodes] == ["Concat", kind]
    result = quantize(model, samples(model), QConfig.of("A8W8")).model
    values = np.concatenate([feeds["x"] for feeds in samples(model)])
    everywhere = np.concatenate([run(model, feeds)[0] for feeds in samples(model)])
    for feeds in samples(model):
        expected, found = run(model, feeds)[0], run(result, feeds)[0]
        # One weight per channel is exact; what is left are the steps of input and result.
        steps = np.float32([1, 100 / 2**0.5, 0.01 / 0.1**0.5, 1]).reshape(1, 4, 1, 1)
        limit = steps * np.ptp(values) / 255 + np.ptp(everywhere) / 255
        assert np.all(np.abs(found - expected) <= limit)


def late_norm(largest: float = 1.0) -> ModelProto:
    """A BatchNormalization that no layer before it takes in."""
    model = parse(
        """g (float[1,4,6,6] x) => (float[1,3,6,6] y) {
            r = Relu (x)  n = BatchNormalization (r, scale, shift, mean, spread)
            y = Conv (n, w)
        }""",
        scale=np.float32([largest, 1, 0.5, 0]),
        shift=normal(4, seed=1),
        mean=normal(4, seed=2),
        spread=np.float32([0, 1, 2, 3]),
        w=normal(3, 4, 1, 1, seed=3),
    )
    [norm] = [each for each in model.graph.node if each.output[0] == "n"]
    norm.name = "norm"
    return model


def stored_codes(model: ModelProto) -> list[str]:
    """Return the initializers with codes of parameters of the normalization."""
    names = [each.name for each in model.graph.initializer]
    return [each for each in names if "norm" in each and each.endswith("_quantized")]


@pytest.mark.parametrize(
    "settings",
    [
        {"exclude": ("norm",)},
        {"overrides": (Override(nodes=("norm",), keep=True),)},
        {"overrides": (Override(op_types=("BatchNormalization",), keep=True),)},
        {"nodes": ("Conv_y",)},
    ],
    ids=str,
)
def test_settings_of_a_normalization_hold_for_its_convolution(
    settings: dict[str, Any],
) -> None:
    model = late_norm()
    config = QConfig.of("A8W8")
    assert stored_codes(quantize(model, samples(model), config).model)
    found = quantize(model, samples(model), config.with_(**settings)).model
    assert not stored_codes(found)
    assert "norm" in [node.name for node in found.graph.node]


def test_only_a_normalization_is_quantized_that_is_named() -> None:
    model = late_norm()
    config = QConfig.of("A8W8").with_(nodes=("norm",))
    assert stored_codes(quantize(model, samples(model), config).model)


def test_a_factor_beyond_float32_stays_a_normalization() -> None:
    """The factor is 3e38 / sqrt(1e-5)."""
    assert batch_norm_to_conv(Graph.of(late_norm())) == 1
    assert batch_norm_to_conv(Graph.of(late_norm(3e38))) == 0
