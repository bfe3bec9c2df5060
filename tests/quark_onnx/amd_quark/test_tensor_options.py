"""AMD's options for single tensors and for biases: what they say is what the model has."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark_onnx import compare
from quark_onnx.common.errors import ConfigError
from quark_onnx.onnx import ModelQuantizer
from quark_onnx.onnx.quant_utils import ExtendedQuantType, VitisQuantType
from quark_onnx.onnx.quantization.config.config import QConfig
from quark_onnx.onnx.quantization.config.spec import (
    BFloat16Spec,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    QLayerConfig,
    UInt8Spec,
    XInt8Spec,
)
from quark_onnx.onnxruntime_spelling import QuantType
from tests.models import normal
from tests.quark_onnx.amd_quark.networks import classifier

DATA = [{"x": normal(2, 4, 8, 8, seed=seed)} for seed in range(4)]


class Reader:
    """Calibration data with AMD's interface."""

    def __init__(self) -> None:
        self._left = iter(DATA)

    def get_next(self) -> Any:
        return next(self._left, None)


def quantized(spec: Any = None, **options: Any) -> onnx.ModelProto:
    spec = spec or UInt8Spec()
    config = QConfig(QLayerConfig(spec, weight=Int8Spec()), extra_options=options)
    result = ModelQuantizer(config).quantize_model(classifier(), None, Reader())
    assert result is not None
    return result


def code_types(model: onnx.ModelProto) -> dict[str, str]:
    """The type of the codes of each quantized activation, by its name."""
    constants = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {
        node.input[0]: TensorProto.DataType.Name(constants[node.input[2]]).lower()
        for node in model.graph.node
        if node.op_type.endswith("QuantizeLinear")
        and not node.op_type.endswith("DequantizeLinear")
    }


def parameters(model: onnx.ModelProto, tensor: str) -> tuple[Any, Any]:
    """Scale and zero point of an activation."""
    values = {
        each.name: numpy_helper.to_array(each) for each in model.graph.initializer
    }
    [node] = [
        node
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] == tensor
    ]
    return values[node.input[1]], values[node.input[2]]


@pytest.mark.parametrize(
    "kind",
    [
        QuantType.QUInt16,
        ExtendedQuantType.QUInt16,
        VitisQuantType.QUInt16,
        "QUInt16",
        "UInt16",
    ],
)
def test_a_tensor_has_the_type_that_is_given_for_it(kind: Any) -> None:
    plain, changed = (
        code_types(quantized()),
        code_types(quantized(TensorQuantOverrides={"p": [{"quant_type": kind}]})),
    )
    assert plain["p"] == "uint8"
    assert changed == plain | {"p": "uint16"}


def test_a_scale_and_a_range_are_those_that_are_given() -> None:
    overrides = {
        "x": [{"scale": np.float32(0.05), "zero_point": np.uint8(100)}],
        "p": [{"rmin": 0.0, "rmax": 5.1}],
        "k2": [{"quant_type": ExtendedQuantType.QInt16, "symmetric": True}],
    }
    model = quantized(TensorQuantOverrides=overrides)
    assert parameters(model, "x") == (np.float32(0.05), 100)
    assert parameters(model, "p") == (np.float32(5.1 / 255), 0)
    weights = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert weights["k2_quantized"] == TensorProto.INT16
    assert compare(classifier(), model, DATA).sqnr > 15


def test_a_tensor_of_each_type() -> None:
    kinds = {QuantType.QUInt16: ["x"], ExtendedQuantType.QInt8: ["p"]}
    types = code_types(
        quantized(MixedPrecisionTensor=kinds, SpecificTensorPrecision=True)
    )
    assert (types["x"], types["p"]) == ("uint16", "int8")


def test_formats_without_a_scale() -> None:
    model = quantized(
        TensorQuantOverrides={"x": [{"quant_type": ExtendedQuantType.QBFloat16}]}
    )
    assert "x" not in code_types(model)
    [cast] = [
        node
        for node in model.graph.node
        if node.op_type == "Cast" and node.input[0] == "x"
    ]
    assert helper.get_node_attr_value(cast, "to") == TensorProto.BFLOAT16
    assert compare(classifier(), model, DATA).sqnr > 20
    block = quantized(TensorQuantOverrides={"x": [{"quant_type": "BFP16"}]})
    assert [
        node.input[0]
        for node in block.graph.node
        if node.op_type == "BFPQuantizeDequantize"
    ] == ["x"]
    assert compare(classifier(), block, DATA).sqnr > 20


def test_the_results_of_named_nodes_stay_float() -> None:
    types = code_types(quantized(NodesToExcludeOutputQuantization=["pool", "relu1"]))
    assert not {"p", "r"} & set(types)
    assert {"x", "f"} <= set(types), (
        "the Gemm reads a tensor that another node computes"
    )


def test_names_that_the_model_does_not_have_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        model = quantized(
            TensorQuantOverrides={"pp": [{"quant_type": "QUInt16"}]},
            NodesToExcludeOutputQuantization=["poool"],
        )
    assert code_types(model) == code_types(quantized())
    assert "'pp' matches nothing in the model" in caplog.text
    assert (
        "NodesToExcludeOutputQuantization: no node of the model is called 'poool'; did"
        " you mean 'pool'" in caplog.text
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"TensorQuantOverrides": [1]}, "it must be a dictionary"),
        ({"MixedPrecisionTensor": ["x"]}, "it must be a dictionary"),
        (
            {"TensorQuantOverrides": {"x": [{"quant_type": "QInt7"}]}},
            "'QInt7' is unknown",
        ),
        ({"TensorQuantOverrides": {"x": [{"type": "QInt8"}]}}, "no key 'type'"),
    ],
)
def test_what_cannot_be_read_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantized(**options)


@pytest.mark.parametrize(
    "spec", [UInt8Spec(), Int16Spec(), XInt8Spec()], ids=["A8", "A16", "XINT8"]
)
def test_biases_of_16_bits(spec: Any) -> None:
    """AMD clips the codes of 32 bits (A16W8: 25.9 -> 14.0 dB).

    Here scales grow until 16 bits hold them.
    """
    wide, narrow = quantized(spec), quantized(spec, Int16Bias=True)
    types = {tensor.name: tensor.data_type for tensor in narrow.graph.initializer}
    assert types["b1_quantized"] == types["d_quantized"] == TensorProto.INT16
    before, after = (
        compare(classifier(), model, DATA).sqnr for model in (wide, narrow)
    )
    assert after > before - 0.5


def test_the_layer_configuration_names_the_format_of_biases(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def bias_of(spec: Any) -> Any:
        return (
            QConfig(QLayerConfig(UInt8Spec(), weight=Int8Spec(), bias=spec))
            .draft()
            .bias
        )

    assert bias_of(Int16Spec()) == "int16"
    assert bias_of(None) is bias_of(Int32Spec()) is bias_of(BFloat16Spec()) is True
    assert not caplog.records
    assert bias_of(Int8Spec()) is True
    assert "bias of global_config is int8, and biases are int32" in caplog.text


def test_float_biases_win_over_biases_of_16_bits() -> None:
    for options in (
        {"QuantizeBias": False, "Int16Bias": True},
        {"Int16Bias": True, "QuantizeBias": False},
    ):
        names = {tensor.name for tensor in quantized(**options).graph.initializer}
        assert "b1_quantized" not in names
