"""AMD's automatic mixed precision: the wide model, and the nodes of it that are lowered to the
narrow format.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from quark_onnx import AutoMixedPrecision, compare
from quark_onnx.common.errors import ConfigError
from quark_onnx.onnx import ModelQuantizer
from quark_onnx.onnx.quantization.config.algorithm import AutoMixprecisionConfig
from quark_onnx.onnx.quantization.config.config import Config, QConfig
from quark_onnx.onnx.quantization.config.custom_config import get_default_config
from quark_onnx.onnx.quantization.config.spec import (
    BFloat16Spec,
    Int8Spec,
    Int16Spec,
    QLayerConfig,
    UInt16Spec,
)
from quark_onnx.onnx.run import native
from tests.models import normal, run
from tests.quark_onnx.amd_quark.networks import classifier

NARROW = QLayerConfig(Int8Spec(), weight=Int8Spec())
DATA = [{"x": normal(2, 4, 8, 8, seed=seed)} for seed in range(8)]


class Reader:
    """Calibration data with AMD's interface."""

    def __init__(self) -> None:
        self._left = iter(DATA)

    def get_next(self) -> Any:
        return next(self._left, None)


def mixed(wide: QLayerConfig, **settings: Any) -> QConfig:
    return QConfig(
        wide,
        algo_config=[AutoMixprecisionConfig(target_layer_config=NARROW, **settings)],
    )


def quantized(config: Any) -> onnx.ModelProto:
    result = ModelQuantizer(config).quantize_model(classifier(), None, Reader())
    assert result is not None
    return result


def activations(model: onnx.ModelProto) -> list[str]:
    """Types of the codes of activations."""
    constants = {each.name: each.data_type for each in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    return sorted(
        {TensorProto.DataType.Name(constants[node.input[2]]).lower() for node in nodes}
    )


def test_the_model_starts_wide_and_is_lowered() -> None:
    config = native(
        mixed(
            QLayerConfig(Int16Spec(), weight=Int8Spec()),
            metric_default="sqnr",
            metric_threshold=-33.0,
            include_layers=["^conv.*", "no_such_node"],
            exclude_layers=["conv2"],
        ).draft(),
        classifier(),
    )
    assert config.activation is not None and config.activation.dtype.name == "int16"
    [optimizer] = config.optimizers
    assert isinstance(optimizer, AutoMixedPrecision)
    assert (optimizer.to, optimizer.target) == ("8bit", -33.0)
    assert (optimizer.nodes, optimizer.exclude) == (("re:^conv.*",), ("conv2",))
    assert optimizer.distance is not None
    outputs = (
        [[np.float32([1, 0]), np.float32([9])]],
        [[np.float32([0, 0]), np.zeros(1)]],
    )
    assert optimizer.distance(*outputs) == 0.0  # signal and noise of the first output
    assert (
        optimizer.activation is not None and optimizer.activation.dtype.name == "int8"
    )


ALL = ("Conv", "Gemm", "Relu", "GlobalAveragePool", "Flatten")


def l2(model: Any) -> float:
    """AMD's default metric on the first output: the mean norm of the error of a sample."""
    errors = [run(classifier(), feeds)[0] - run(model, feeds)[0] for feeds in DATA]
    return float(np.mean([np.linalg.norm(error) for error in errors]))


def ratio(model: Any) -> float:
    """Mean signal-to-noise ratio of a sample in dB."""
    found = []
    for feeds in DATA:
        expected, given = run(classifier(), feeds)[0], run(model, feeds)[0]
        noise = np.mean(np.square(expected - given, dtype=np.float64))
        found.append(np.mean(np.square(expected, dtype=np.float64)) / noise)
    return float(np.mean(10 * np.log10(found)))


def test_the_l2_threshold_decides_how_many_nodes_are_lowered() -> None:
    wide = QLayerConfig(UInt16Spec(), weight=Int16Spec())
    best, worst = l2(quantized(QConfig(wide))), l2(quantized(QConfig(NARROW)))
    threshold = (best + worst) / 2
    model = quantized(mixed(wide, target_op_type=ALL, metric_threshold=threshold))
    assert activations(model) == ["int8", "uint16"]
    assert best < l2(model) <= threshold * 1.05
    low = quantized(mixed(wide, target_op_type=ALL, metric_threshold=2 * worst))
    assert activations(low) == ["int8"]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_ratio_is_a_number_of_either_sign(sign: int) -> None:
    """AMD wants negative numbers of dB."""
    wide = QLayerConfig(UInt16Spec(), weight=Int16Spec())
    target = ratio(quantized(QConfig(NARROW))) + 3
    settings = {"metric_default": "sqnr", "metric_threshold": sign * target}
    model = quantized(mixed(wide, target_op_type=ALL, **settings))
    assert activations(model) == ["int8", "uint16"]
    assert ratio(model) >= target - 0.5


@pytest.mark.parametrize("name", ["metric_evaluate_fn", "metric_distance_fn"])
def test_a_function_of_outputs_decides(name: str) -> None:
    """With AMD's metric_evaluate_fn (outputs of one model, more is better) and
    metric_distance_fn (outputs of both, less is better).
    """
    expected = [run(classifier(), feeds)[0] for feeds in DATA]

    def error(found: Any) -> float:
        pairs = zip(found, expected, strict=True)
        return float(np.mean([np.square(one - other).mean() for [one], other in pairs]))

    function = {
        "metric_evaluate_fn": lambda outputs: -error(outputs),
        "metric_distance_fn": lambda _, outputs: error(outputs),
    }[name]
    wide = QLayerConfig(UInt16Spec(), weight=Int16Spec())

    def loss(model: Any) -> float:
        return error([run(model, feeds) for feeds in DATA])

    bound = (loss(quantized(QConfig(wide))) + loss(quantized(QConfig(NARROW)))) / 2
    settings = {name: function, "metric_threshold": bound, "target_op_type": ALL}
    model = quantized(mixed(wide, **settings))
    assert activations(model) == ["int8", "uint16"]
    assert loss(model) <= bound * 1.05


def test_quality_raises_nodes_of_the_narrow_model() -> None:
    """With metric_optimize_object="quality" the target is the wide format."""
    wide = QLayerConfig(Int16Spec(), weight=Int8Spec())
    best, worst = l2(quantized(QConfig(wide))), l2(quantized(QConfig(NARROW)))
    threshold = best + 0.8 * (worst - best)
    algorithm = AutoMixprecisionConfig(
        target_layer_config=wide,
        target_op_type=ALL,
        metric_threshold=threshold,
        metric_optimize_object="quality",
    )
    model = quantized(QConfig(NARROW, algo_config=[algorithm]))
    assert activations(model) == ["int16", "int8"]
    assert l2(model) <= threshold * 1.05


def test_only_the_operators_that_are_named_are_lowered() -> None:
    wide = QLayerConfig(UInt16Spec(), weight=Int16Spec())
    model = quantized(mixed(wide, target_op_type=["Gemm"]))
    assert activations(model) == ["int8", "uint16"]


def test_no_threshold_changes_no_node(caplog: pytest.LogCaptureFixture) -> None:
    wide = QLayerConfig(UInt16Spec(), weight=Int16Spec())
    with caplog.at_level(logging.WARNING):
        model = quantized(mixed(wide, metric_threshold=None))
    assert activations(model) == ["uint16"]
    assert "metric_threshold is None, so that no node is changed" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metric_default": "l3"}, "metric_default is 'l3'"),
        ({"metric_optimize_object": "size"}, "metric_optimize_object of"),
        ({"include_layers": ["none"]}, "no node of the model is one of none"),
        ({"metric_output_index": 1}, "metric_output_index is 1"),
        (
            {"metric_distance_fn": min, "metric_evaluate_fn": min},
            "choose one of them",
        ),
    ],
)
def test_wrong_parameters(settings: dict[str, Any], message: str) -> None:
    wide = QLayerConfig(UInt16Spec(), weight=Int16Spec())
    with pytest.raises(ConfigError, match=message):
        quantized(mixed(wide, **{"metric_threshold": 1.0, **settings}))


def test_bfloat16_is_lowered_to_integers() -> None:
    wide = QLayerConfig(BFloat16Spec(), weight=BFloat16Spec())
    model = quantized(mixed(wide, target_op_type=ALL))
    assert activations(model) == ["int8"]


def test_the_preset_lowers_all_candidates_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """AMD's preset has no threshold."""
    with caplog.at_level(logging.WARNING):
        model = quantized(Config(get_default_config("S16S16_MIXED_S8S8")))
    assert "metric_threshold is 0, so that all candidates are changed" in caplog.text
    assert "int8" in activations(model)
    assert compare(classifier(), model, DATA).sqnr > 19
