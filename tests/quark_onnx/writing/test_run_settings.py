"""Settings for advice: those of a configuration are found again in the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from onnx import parser

from quark_onnx import QConfig, quantize
from quark_onnx.writing.run_settings import settings_of_config, settings_of_model
from tests.models import conv_relu, in_a_branch, in_constant_nodes, samples


@pytest.mark.parametrize(
    "config",
    [
        QConfig.of("A8W8"),
        QConfig.of("A8W8").with_(calibrator="minmax", per_channel=False),
        QConfig.of("A16W8").with_(optimizers=["cle", "bias_correction"]),
        QConfig.of("XINT8"),
        QConfig.of("XINT8").with_(target="stx", calibrator="nonoverflow"),
    ],
    ids=["A8W8", "minmax", "optimizers", "powers of two", "npu"],
)
def test_a_model_has_the_settings_of_its_configuration(config: QConfig) -> None:
    model = conv_relu()
    result = quantize(model, samples(model), config)
    found = settings_of_model(result.model)
    expected = settings_of_config(config, 0)
    assert found == replace(expected, goal=20.0)
    assert settings_of_model(in_constant_nodes(result.model)) == found
    assert settings_of_model(in_a_branch(result.model)) == found


def test_a_float_model_has_no_settings() -> None:
    assert settings_of_model(conv_relu()) is None


def test_the_metadata_of_other_tools_is_not_needed() -> None:
    model = conv_relu()
    quantized = quantize(model, samples(model), "A8W8").model
    del quantized.metadata_props[:]
    found = settings_of_model(quantized)
    assert found is not None
    assert (found.activation, found.weight, found.per_channel) == (8, 8, True)
    assert (found.calibrator, found.target) == ("", None)


def test_the_type_of_codes_may_be_an_attribute() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N] x) => (float[N] y) <float s = {0.1}> {
            codes = QuantizeLinear <output_dtype = 5> (x, s)
            y = DequantizeLinear (codes, s)
        }""")
    found = settings_of_model(model)
    assert found is not None and found.activation == 16
