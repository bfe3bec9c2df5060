"""Biases of 16 bits: codes that fit, a scale that is a power of two times that of the products."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from quark_onnx import QConfig, QuarkError, convert, quantize, quantize_static
from quark_onnx.common.errors import ConfigError
from tests import models


def constants(model: ModelProto) -> dict[str, Any]:
    return {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }


def readers(model: ModelProto, dtype: int) -> list[onnx.NodeProto]:
    """DequantizeLinear nodes whose codes are a constant of a type."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    return [node for node in nodes if types.get(node.input[0]) == dtype]


def sqnr(
    model: ModelProto, quantized: ModelProto, data: list[Any], optimize: bool = False
) -> float:
    signal = noise = 0.0
    for feeds in data:
        expected = models.run(model, feeds)[0].astype(np.float64)
        signal += float(np.sum(expected**2))
        noise += float(
            np.sum((expected - models.run(quantized, feeds, optimize=optimize)[0]) ** 2)
        )
    return 10 * float(np.log10(signal / noise))


@pytest.mark.parametrize("preset", ["A8W8", "A16W8", "XINT8"])
@pytest.mark.parametrize("make", [models.conv_relu, models.gemm, models.convtranspose])
def test_codes_fit_and_scales_are_those_of_the_products(make: Any, preset: str) -> None:
    model = make()
    config = QConfig.of(preset).with_(search=0)
    wide = quantize_static(model, models.samples(model), config)
    narrow = quantize_static(model, models.samples(model), config.with_(bias="int16"))
    values, (before,), (after,) = (
        constants(narrow),
        readers(wide, TensorProto.INT32),
        readers(narrow, TensorProto.INT16),
    )
    assert not readers(narrow, TensorProto.INT32)
    product = np.atleast_1d(constants(wide)[before.input[1]]).astype(np.float64)
    scale = np.atleast_1d(values[after.input[1]]).astype(np.float64)
    octaves = np.log2(scale / product)
    assert np.array_equal(octaves, np.round(octaves)) and (octaves >= 0).all()
    codes, biases = (
        values[after.input[0]],
        constants(model)[after.input[0].removesuffix("_quantized")],
    )
    assert np.abs(
        codes.astype(np.float64) * scale - biases
    ).max() <= scale.max() / 2 * (1 + 1e-6)
    needed = np.abs(biases.astype(np.float64)) / np.ldexp(scale, -1)
    per_channel = needed if scale.size > 1 else needed.max()
    assert np.all((octaves == 0) | (per_channel > 32767)), (
        "the power of two is the least that holds the bias"
    )


@pytest.mark.parametrize("preset", ["A8W8", "A16W8"])
def test_the_accuracy_is_that_of_int32(preset: str) -> None:
    model = models.conv_net()
    data = models.samples(model, 16)
    wide, narrow = (
        quantize_static(model, data, QConfig.of(preset).with_(bias=each))
        for each in (True, "int16")
    )
    assert readers(narrow, TensorProto.INT16)
    for optimize in (False, True):
        assert (
            sqnr(model, narrow, data, optimize)
            > sqnr(model, wide, data, optimize) - 0.5
        )


def test_the_opset_is_raised_or_the_pairs_are_contributed() -> None:
    model = models.conv_relu()
    data = models.samples(model)
    raised = quantize_static(model, data, QConfig(bias="int16"))
    assert (
        next(entry.version for entry in raised.opset_import if not entry.domain) >= 21
    )
    limited = quantize_static(model, data, QConfig(bias="int16", max_opset=17))
    (node,) = readers(limited, TensorProto.INT16)
    assert node.domain == "com.microsoft"
    assert sqnr(model, limited, data) == pytest.approx(
        sqnr(model, raised, data), abs=0.1
    )


def test_operators_on_codes_take_biases_of_32_bits_alone() -> None:
    model = models.conv_relu()
    data = models.samples(model)
    result = quantize_static(model, data, QConfig(bias="int16", form="operators"))
    assert "QLinearConv" not in models.kinds(result)
    assert sqnr(model, result, data) > 30


def test_a_target_that_does_not_take_them_is_named() -> None:
    model = models.conv_relu()
    config = QConfig.of("XINT8").with_(target="npu", bias="int16")
    with pytest.raises(ConfigError, match="npu does not take biases of 16 bits"):
        quantize(model, models.samples(model), config)


def test_the_plan_names_the_format() -> None:
    model = models.conv_relu()
    plan = quantize(model, models.samples(model), QConfig(bias="int16")).plan
    assert any(
        str(entry).startswith("int16 bias of ") for entry in plan.entries.values()
    )


def test_a_dictionary_names_the_format() -> None:
    assert QConfig.of({"bias": "int16"}) == QConfig(bias="int16")
    assert QConfig(bias="int32").bias == "int32"


@pytest.mark.parametrize("bias", ["int4", 16, None])
def test_other_formats_are_refused(bias: Any) -> None:
    with pytest.raises(
        QuarkError, match=r"bias is .*; it must be true, false or one of: int32, int16"
    ):
        QConfig(bias=bias)


@pytest.mark.parametrize("preset", ["A8W8", "A16W8", "XINT8"])
@pytest.mark.parametrize("opset", [17, 21])
def test_the_conversion_gives_what_the_setting_gives(preset: str, opset: int) -> None:
    model = models.parse(
        """g (float[N,3,8,8] x) => (float[N,4,8,8] y) {
            [conv] y = Conv <pads = [1,1,1,1]> (x, w, b)
        }""",
        opset=opset,
        w=models.weight(4, 3, 3, 3),
        b=models.normal(4),
    )
    config = QConfig.of(preset).with_(search=0, max_opset=opset)
    wide = quantize_static(model, models.samples(model), config)
    asked = quantize_static(model, models.samples(model), config.with_(bias="int16"))
    result = convert(wide, "int16-biases").model
    (node,), (other,) = (
        readers(result, TensorProto.INT16),
        readers(asked, TensorProto.INT16),
    )
    assert node.domain == other.domain == ("com.microsoft" if opset == 17 else "")
    found, expected = constants(result), constants(asked)
    # codes of 32 bits that are rounded once more may lie half a code further away
    assert (
        np.abs(found[node.input[0]].astype(int) - expected[other.input[0]]).max() <= 1
    )
    assert np.array_equal(found[node.input[1]], expected[other.input[1]])
    feeds = models.samples(model)[0]
    np.testing.assert_allclose(
        models.run(result, feeds)[0], models.run(wide, feeds)[0], atol=2e-3
    )


def test_the_note_on_two_biases() -> None:
    model = models.parse(
        "g (float[1,3,4,4] x) => (float[1,3,4,4] y) { a = Conv (x, w, b) y = Conv (a, w,"
        " b) }",
        w=models.weight(3, 3, 1, 1),
        b=models.normal(3),
    )
    wide = quantize_static(model, models.samples(model), "A8W8")
    steps = convert(wide, "int16-biases").steps
    assert steps[0].notes == ["2 bias vectors became int16"]


def test_a_model_without_such_biases_is_left_as_it_is() -> None:
    model = models.conv_relu()
    assert not any(convert(model, "int16-biases").steps[0].notes)
