"""A quantized model names its producer and its settings, and keeps what the float model said."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto

import quark_onnx
from quark_onnx import QConfig, quantize_static, quantize_weights
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.optimizers.mixed import Outputs
from quark_onnx.writing.provenance import described
from tests.models import conv_relu, samples


def metadata(model: ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def float_model() -> ModelProto:
    model = conv_relu()
    model.producer_name, model.producer_version = "pytorch", "2.13.0"
    model.metadata_props.add(key="license", value="MIT")
    return model


def test_settings_of_a_static_model() -> None:
    model = float_model()
    config = QConfig.of("A8W8").with_(calibrator="percentile:percentile=99.9")
    result = quantize_static(model, samples(model), config.with_(optimizers="cle"))
    assert (result.producer_name, result.producer_version) == (
        "quark_onnx",
        quark_onnx.__version__,
    )
    assert metadata(result) == {
        "license": "MIT",
        "quark_onnx.float_producer": "pytorch 2.13.0",
        "quark_onnx.version": quark_onnx.__version__,
        "quark_onnx.preset": "A8W8",
        "quark_onnx.activation": str(config.activation),
        "quark_onnx.weight": str(config.weight),
        "quark_onnx.calibrator": "percentile:percentile=99.9",
        "quark_onnx.optimizers": "cle",
    }


@pytest.mark.parametrize("preset", ["XINT8", "INT4", "DYNAMIC", "BFP16"])
def test_the_preset_is_named(preset: str) -> None:
    model = float_model()
    config = QConfig.of(preset)
    result = quark_onnx.quantize(
        model, samples(model) if config.measures else None, config
    ).model
    assert metadata(result)["quark_onnx.preset"] == preset
    assert ("quark_onnx.calibrator" in metadata(result)) == (preset == "XINT8")


def test_the_same_input_gives_the_same_bytes() -> None:
    first, second = (
        quantize_weights(float_model(), "INT4").SerializeToString() for _ in range(2)
    )
    assert first == second


def test_the_float_model_stays_as_it_is() -> None:
    model = float_model()
    before = model.SerializeToString(deterministic=True)
    quantize_weights(model, "INT4")
    assert model.SerializeToString(deterministic=True) == before


def test_a_file_says_it_too(tmp_path: Path) -> None:
    quantize_weights(float_model(), "W8", tmp_path / "out.onnx")
    assert onnx.load(tmp_path / "out.onnx").producer_name == "quark_onnx"


def test_functions_among_the_settings_are_named_without_their_address() -> None:
    def distance(outputs: Outputs, others: Outputs) -> float:
        return float(len(outputs) - len(others))

    for function, name in ((distance, "distance"), (partial(distance, []), "partial")):
        optimizer = AutoMixedPrecision(target=1, distance=function)
        text = described(QConfig(optimizers=(optimizer,)))["optimizers"]
        assert "0x" not in text
        assert text.startswith("auto_mixed_precision:target=1,distance=")
        assert text.endswith(name)
