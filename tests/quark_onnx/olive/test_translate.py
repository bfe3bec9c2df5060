"""Parameters of Olive's passes as arguments and configurations; Olive is not needed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

from quark_onnx import QConfig, QuarkError
from quark_onnx.olive import PASSES
from quark_onnx.olive.translate import (
    amd_draft,
    dynamic_arguments,
    native_config,
    static_arguments,
)
from quark_onnx.onnx.quantization.config.algorithm import AdaRoundConfig, CLEConfig
from tests.compat_onnxruntime.networks import convolutions

#: The defaults of OnnxStaticQuantization in Olive 0.13.
STATIC: dict[str, Any] = {
    "precision": "int8",
    "activation_type": "int8",
    "calibrate_method": "MinMax",
    "calibration_providers": None,
    "quant_format": "QDQ",
    "op_types_to_quantize": None,
    "op_types_to_exclude": None,
    "nodes_to_quantize": None,
    "nodes_to_exclude": None,
    "per_channel": False,
    "reduce_range": False,
    "quant_preprocess": True,
    "activation_symmetric": False,
    "weight_symmetric": None,
    "min_real_range": None,
    "tensor_quant_overrides": None,
    "prepare_qdq_config": True,
    "extra_options": None,
}
LAYER = {
    "input_tensors": {"data_type": "UInt8", "symmetric": False},
    "weight": {"calibration_method": "MinMax"},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(convolutions(), path)
    return path


def test_every_pass_has_a_class() -> None:
    source = Path(__file__).parents[3] / "quark_onnx" / "olive" / "passes.py"
    text = source.read_text(encoding="utf-8")
    for name, entry in PASSES.items():
        assert entry["module_path"] == f"quark_onnx.olive.passes.{name}"
        assert f"class {name}(" in text


def test_static_defaults_are_those_of_a_full_qdq_model(model: Path) -> None:
    arguments = static_arguments(STATIC, model, iter(()))
    assert arguments["weight_type"] == arguments["activation_type"] == QuantType.QInt8
    assert arguments["calibrate_method"] == CalibrationMethod.MinMax
    assert arguments["quant_format"] == QuantFormat.QDQ
    assert set(arguments["op_types_to_quantize"]) == {
        node.op_type for node in convolutions().graph.node
    }
    assert arguments["extra_options"]["ForceQuantizeNoInputCheck"] is True
    assert arguments["extra_options"]["QDQKeepRemovableActivations"] is False


def test_static_parameters_become_arguments_and_extra_options(model: Path) -> None:
    parameters = STATIC | {
        "precision": "uint16",
        "activation_type": "uint8",
        "calibrate_method": "Percentile",
        "per_channel": True,
        "reduce_range": True,
        "activation_symmetric": True,
        "weight_symmetric": False,
        "min_real_range": 1e-3,
        "tensor_quant_overrides": {"c1": [{"quant_type": "QUInt16"}]},
        "nodes_to_quantize": ["conv1"],
        "nodes_to_exclude": ["fc"],
        "extra_options": {"CalibPercentile": 99.9},
        "prepare_qdq_config": False,
    }
    arguments = static_arguments(parameters, model, "reader")
    assert arguments == {
        "model_input": str(model),
        "calibration_data_reader": "reader",
        "quant_format": QuantFormat.QDQ,
        "op_types_to_quantize": None,
        "per_channel": True,
        "reduce_range": True,
        "activation_type": QuantType.QUInt8,
        "weight_type": QuantType.QUInt16,
        "nodes_to_quantize": ["conv1"],
        "nodes_to_exclude": ["fc"],
        "calibrate_method": CalibrationMethod.Percentile,
        "calibration_providers": None,
        "extra_options": {
            "CalibPercentile": 99.9,
            "ActivationSymmetric": True,
            "WeightSymmetric": False,
            "MinimumRealRange": 1e-3,
            "TensorQuantOverrides": {"c1": [{"quant_type": "QUInt16"}]},
        },
    }


def test_the_prepared_configuration_keeps_what_the_parameters_say(model: Path) -> None:
    parameters = STATIC | {
        "precision": "uint8",
        "activation_type": "uint8",
        "reduce_range": True,
        "min_real_range": 1e-3,
        "nodes_to_quantize": ["conv1", "conv2"],
        "op_types_to_exclude": ["Gemm", "Softmax"],
        "extra_options": {"DedicatedQDQPair": True},
    }
    arguments = static_arguments(parameters, model, iter(()))
    assert arguments["nodes_to_quantize"] == ["conv1", "conv2"]
    assert arguments["nodes_to_exclude"] == ["fc"]
    assert arguments["reduce_range"] is True
    assert arguments["extra_options"]["MinimumRealRange"] == 1e-3
    assert arguments["extra_options"]["DedicatedQDQPair"] is True


def test_qnn_has_settings_of_its_own(model: Path) -> None:
    overrides = {"c1": [{"quant_type": QuantType.QUInt16}]}
    parameters = STATIC | {
        "min_real_range": 1.0,
        "tensor_quant_overrides": overrides,
        "activation_type": "uint8",
    }
    arguments = static_arguments(parameters, model, iter(()), qnn=True)
    theirs = get_qnn_qdq_config(
        model, iter(()), weight_type=QuantType.QInt8, init_overrides=overrides
    )
    assert (
        arguments["extra_options"]["MinimumRealRange"]
        == theirs.extra_options["MinimumRealRange"]
        == 0.0001
    )
    assert (
        arguments["extra_options"]["TensorQuantOverrides"]
        == theirs.extra_options["TensorQuantOverrides"]
    )
    assert set(arguments["op_types_to_quantize"]) == set(theirs.op_types_to_quantize)


def test_types_to_quantize_win_over_types_to_exclude(model: Path) -> None:
    parameters = STATIC | {
        "op_types_to_quantize": ["Conv"],
        "op_types_to_exclude": ["Gemm"],
    }
    arguments = static_arguments(parameters, model, iter(()))
    assert arguments["op_types_to_quantize"] == ["Conv"]
    assert arguments["nodes_to_exclude"] == []


def test_nodes_without_names_are_reported(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = onnx.load(model)
    for node in graph.graph.node:
        if node.op_type == "Gemm":
            node.name = ""
    onnx.save(graph, model)
    arguments = static_arguments(
        STATIC | {"op_types_to_exclude": ["Gemm"]}, model, iter(())
    )
    assert arguments["nodes_to_exclude"] == []
    assert "1 node of these types has no name and is quantized" in caplog.text


def test_a_parameter_wins_over_the_extra_option(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = STATIC | {
        "extra_options": {"MinimumRealRange": 1.0},
        "min_real_range": 2.0,
    }
    assert (
        static_arguments(parameters, model, iter(()))["extra_options"][
            "MinimumRealRange"
        ]
        == 2.0
    )
    assert (
        "MinimumRealRange is a parameter of the pass: use min_real_range" in caplog.text
    )


def test_dynamic_parameters_become_arguments(model: Path) -> None:
    parameters = STATIC | {
        "precision": "uint8",
        "weight_symmetric": True,
        "min_real_range": 1.0,
    }
    arguments = dynamic_arguments(
        parameters | {"op_types_to_exclude": ["Conv"], "reduce_range": True}, model
    )
    assert arguments == {
        "model_input": str(model),
        "op_types_to_quantize": None,
        "nodes_to_quantize": None,
        "nodes_to_exclude": ["conv1", "conv2"],
        "per_channel": False,
        "reduce_range": True,
        "weight_type": QuantType.QUInt8,
        "extra_options": {"ActivationSymmetric": False, "WeightSymmetric": True},
    }


def test_a_native_configuration_is_narrowed_to_the_selected_nodes(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = STATIC | {
        "quark_config": {"preset": "XINT8", "optimizers": ["cle"]},
        "precision": "uint8",
        "nodes_to_exclude": ["fc"],
        "op_types_to_exclude": ["Add", "Softmax"],
        "quant_preprocess": False,
    }
    with caplog.at_level(logging.WARNING):
        config = native_config(parameters, model)
    assert config.activation == QConfig.of("XINT8").activation
    assert [optimizer.name for optimizer in config.optimizers] == ["cle"]
    assert config.exclude == ("fc",)
    assert [(override.op_types, override.keep) for override in config.overrides] == [
        (("Add",), True)
    ]
    assert not config.prepare
    assert caplog.messages == [
        "parameter precision='uint8' has no effect: quark_config decides it"
    ]


def test_quark_parameters_become_a_draft() -> None:
    parameters = {
        "quant_scheme": "uint4_wo_128",  # of PyTorch models
        "quant_mode": "static",
        "quant_format": "QDQ",
        "global_config": LAYER,
        "specific_layer_config": [
            [{"activation": {"data_type": "Int16"}, "weight": {}}, ["conv1"]]
        ],
        "layer_type_config": [[None, ["Add"]]],
        "exclude": ["fc", [["conv2"], ["mean"]]],
        "algo_config": [
            {"name": "cle", "cle_steps": 2},
            {"name": "adaround", "num_iterations": 7},
        ],
        "extra_options": {"ActivationSymmetric": True},
    }
    draft = amd_draft(parameters, random=True)
    assert draft.activation is not None and draft.weight is not None
    assert (draft.activation.dtype.name, draft.activation.symmetric) == ("uint8", True)
    assert str(draft.activation.calibrator).startswith(
        "Percentile"
    )  # the default of Olive's pass
    assert draft.weight.dtype.name == "int8"
    assert [
        str(override.activation and override.activation.dtype.name)
        for override in draft.overrides
    ] == [
        "int16",
        "None",
    ]
    assert draft.overrides[1].keep
    assert draft.exclude == ["fc", [["conv2"], ["mean"]]]
    assert [type(algorithm) for algorithm in draft.algorithms] == [
        CLEConfig,
        AdaRoundConfig,
    ]
    assert draft.random


@pytest.mark.parametrize(
    ("scale_type", "pow2"), [("Float32", False), ("PowerOf2", True)]
)
def test_quark_scale_types(scale_type: str, pow2: bool) -> None:
    tensor = {"scale_type": scale_type, "calibration_method": "MinMSE"}
    draft = amd_draft(
        {"global_config": {"input_tensors": tensor, "weight": tensor}}, random=False
    )
    assert draft.activation is not None and draft.activation.pow2 is pow2
    assert not draft.random


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_config": None}, "needs global_config"),
        ({"global_config": {"inputs": {}}}, "no 'inputs'.*input_tensors"),
        ({"global_config": {"weight": {"scale": 1}}}, "no 'scale'.*scale_type"),
        ({"global_config": {"weight": {"scale_type": "Pow2"}}}, "ScaleType.PowerOf2"),
        ({"global_config": {"weight": {"data_type": "Int7"}}}, "Int8"),
        ({"specific_layer_config": [["conv1"]]}, "it must be a pair"),
        ({"algo_config": [{"name": "adarond"}]}, "adaround"),
        ({"quant_mode": "statik"}, "quant_mode is 'statik'.*static"),
        ({"extra_options": {"Int16Scale": True}}, "Int16Scale"),
    ],
)
def test_wrong_quark_parameters_are_named(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(QuarkError, match=message):
        amd_draft({"global_config": LAYER} | changes, random=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp16"}, "precision is 'fp16'"),
        ({"calibrate_method": "Minmax"}, "calibrate_method is 'Minmax'.*MinMax"),
        ({"quant_format": "qdq"}, "quant_format is 'qdq'.*QDQ"),
    ],
)
def test_wrong_static_parameters_are_named(
    changes: dict[str, Any], message: str, model: Path
) -> None:
    with pytest.raises(QuarkError, match=message):
        static_arguments(STATIC | changes, model, iter(()))
