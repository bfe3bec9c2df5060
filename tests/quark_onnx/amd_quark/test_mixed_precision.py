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
            metric_threshold=33.0,
        ).draft(),
        classifier(),
    )
    assert config.activation is not None and config.activation.dtype.name == "int16"
    [optimizer] = config.optimizers
    assert isinstance(optimizer, AutoMixedPrecision)
    assert (optimizer.to, optimizer.target) == ("8bit", 33.0)
    assert (
        optimizer.activation is not None and optimizer.activation.dtype.name == "int8"
    )


def test_the_target_decides_how_many_nodes_are_lowered() -> None:
    wide = QLayerConfig(UInt16Spec(), weight=Int16Spec())
    all_wide, all_narrow = quantized(QConfig(wide)), quantized(QConfig(NARROW))
    best, worst = (
        compare(classifier(), model, DATA).sqnr for model in (all_wide, all_narrow)
    )
    target = worst + 3
    model = quantized(mixed(wide, metric_default="sqnr", metric_threshold=target))
    assert activations(model) == ["int8", "uint16"]
    assert target - 0.5 < compare(classifier(), model, DATA).sqnr <= best
    low = quantized(mixed(wide, metric_default="sqnr", metric_threshold=worst - 10))
    assert activations(low) == ["int8"]


def test_a_metric_decides_how_many_nodes_are_lowered() -> None:
    """With AMD's metric_evaluate_fn, a function of the model.

    The threshold is the loss that is allowed.
    """
    expected = [run(classifier(), feeds)[0] for feeds in DATA]

    def closeness(model: Any) -> float:
        errors = [
            run(model, feeds)[0] - each
            for feeds, each in zip(DATA, expected, strict=True)
        ]
        return -float(np.sqrt(np.mean(np.square(errors))))

    wide = QLayerConfig(UInt16Spec(), weight=Int16Spec())
    loss = (
        -(closeness(quantized(QConfig(wide))) + closeness(quantized(QConfig(NARROW))))
        / 2
    )
    model = quantized(mixed(wide, metric_evaluate_fn=closeness, metric_threshold=loss))
    assert activations(model) == ["int8", "uint16"]
    assert -closeness(model) <= loss * 1.05


def test_bfloat16_is_lowered_to_integers() -> None:
    wide = QLayerConfig(BFloat16Spec(), weight=BFloat16Spec())
    model = quantized(mixed(wide, metric_default="sqnr", metric_threshold=-50.0))
    assert activations(model) == ["int8"]


def test_the_preset_says_what_it_does_not_measure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        model = quantized(Config(get_default_config("S16S16_MIXED_S8S8")))
    assert "nodes are lowered as long as the worst output has 20 dB" in caplog.text
    assert activations(model) == ["int8"] or activations(model) == ["int16", "int8"]
    assert compare(classifier(), model, DATA).sqnr > 19
