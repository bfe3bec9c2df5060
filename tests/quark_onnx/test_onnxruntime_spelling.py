"""A script written for onnxruntime.quantization changes its import and nothing else."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization as theirs
import pytest
from onnx import TensorProto

import quark_onnx as ours
from calibrators import Entropy, MinMax, Percentile
from quark_onnx import QuantizationSpec
from quark_onnx.common.errors import ConfigError
from quark_onnx.onnxruntime_spelling import translate_dynamic, translate_static
from tests.cases import loop_over
from tests.models import Feeds, residual, samples


def reader(base: type) -> Any:
    """A reader as onnxruntime's documentation teaches it."""

    class Reader(base):
        def __init__(self) -> None:
            self.samples = iter(samples(residual()))

        def get_next(self) -> Feeds | None:
            return next(self.samples, None)

    return Reader()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "float.onnx"
    onnx.save_model(residual(), str(path))
    return path


@pytest.mark.parametrize("names", [ours, theirs], ids=["ours", "theirs"])
@pytest.mark.parametrize("positional", [True, False], ids=["positional", "keywords"])
def test_a_script_runs(model: Path, names: Any, positional: bool) -> None:
    output = model.with_name("q.onnx")
    data = reader(names.CalibrationDataReader)
    settings = {
        "quant_format": names.QuantFormat.QDQ,
        "activation_type": names.QuantType.QUInt8,
        "weight_type": names.QuantType.QInt8,
        "per_channel": True,
        "calibrate_method": names.CalibrationMethod.MinMax,
        "extra_options": {"ActivationSymmetric": False, "WeightSymmetric": True},
    }
    if positional:
        ours.quantize_static(str(model), str(output), data, **settings)
    else:
        ours.quantize_static(
            model_input=model,
            model_output=output,
            calibration_data_reader=data,
            **settings,
        )
    wanted = ours.QConfig(
        bodies=False, keep_existing=True, all_pairs=True, portable=True
    ).with_(calibrator="minmax")
    written = onnx.load(output)
    # onnxruntime's default names every operator that it quantizes.
    (named,) = [
        entry for entry in written.metadata_props if entry.key == "quark_onnx.op_types"
    ]
    assert "Conv" in named.value.split()
    written.metadata_props.remove(named)
    assert written == ours.quantize_static(model, samples(residual()), wanted)


def test_onnxruntimes_own_defaults(model: Path) -> None:
    ours.quantize_static(
        model, model.with_name("q.onnx"), reader(theirs.CalibrationDataReader)
    )
    types = {
        t.name: t.data_type
        for t in onnx.load(model.with_name("q.onnx")).graph.initializer
    }
    assert types["x_zero_point"] == types["w1_zero_point"] == TensorProto.INT8


def config(**keywords: Any) -> ours.QConfig:
    return translate_static((residual(), "q", None), keywords).config


def test_the_signature_is_onnxruntimes() -> None:
    model = residual()
    assert translate_static((model, "q"), {}).model is model
    for theirs_of, translate in (
        (theirs.quantize_static, translate_static),
        (theirs.quantize_dynamic, translate_dynamic),
    ):
        for name, parameter in inspect.signature(theirs_of).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                translate((model, "q"), {name: parameter.default})


@pytest.mark.parametrize(
    ("method", "options", "calibrator"),
    [
        ("MinMax", {}, MinMax()),
        (
            "MinMax",
            {"CalibMovingAverage": True, "CalibMovingAverageConstant": 0.1},
            MinMax(True, 0.1),
        ),
        ("Entropy", {}, Entropy()),
        ("Percentile", {}, Percentile(99.999)),
        ("Percentile", {"CalibPercentile": 99.9}, Percentile(99.9)),
    ],
)
def test_calibration_methods(
    method: str, options: dict[str, Any], calibrator: Any
) -> None:
    found = config(
        calibrate_method=theirs.CalibrationMethod[method], extra_options=options
    )
    assert found.activation is not None and found.activation.calibrator == calibrator


def test_types_and_selections() -> None:
    found = config(
        activation_type=theirs.QuantType.QUInt16,
        weight_type=theirs.QuantType.QUInt8,
        reduce_range=True,
        op_types_to_quantize=["Conv", "MatMul"],
        nodes_to_quantize=["conv1", "conv2"],
        nodes_to_exclude=["relu1"],
        extra_options={"QuantizeBias": False},
    )
    assert found == ours.QConfig(
        QuantizationSpec("uint16", symmetric=False),
        QuantizationSpec("uint8", symmetric=False, reduce_range=True),
        bias=False,
        op_types=("Conv", "MatMul"),
        nodes=("conv1", "conv2"),
        exclude=("relu1",),
        follow_inputs=("Clip", "Relu", "Where"),
        all_pairs=True,
        portable=True,
        safe=False,
        equalize=False,
        bodies=False,
        keep_existing=True,
    )


@loop_over(
    ("keywords", "message"),
    [
        (
            {"per_chanel": True},
            "quantize_static has no argument 'per_chanel'; did you mean 'per_channel'?",
        ),
        ({"quant_format": "qdq"}, "quant_format is 'qdq'; it must be QuantFormat.QDQ"),
        (
            {"extra_options": {"SmoothQuant": True}},
            "extra option SmoothQuant needs a calibration_data_reader",
        ),
        (
            {"extra_options": {"MinimumRealRange": -1}},
            "extra option MinimumRealRange is -1; it must be a number",
        ),
        (
            {"extra_options": {"CalibStridedMinMax": 2}},
            "needs a reader with __len__ and set_range",
        ),
        (
            {"extra_options": {"DefaultTensorType": TensorProto.DOUBLE}},
            "convert the model to float32",
        ),
        (
            {"extra_options": {"TensorQuantOverrides": {"x": [{"scal": 1}]}}},
            "has no key 'scal'; did you mean 'scale'?",
        ),
        (
            {
                "extra_options": {
                    "TensorQuantOverrides": {
                        "x": [{"axis": 1, "rmin": -1.0, "rmax": 1.0}, {"rmax": 1.0}]
                    }
                }
            },
            "'x']: option 'rmin' must be given for all channels, or for none",
        ),
        (
            {"extra_options": {"TensorQuantOverrides": {"x": [{"scale": 1.0}]}}},
            "Must provide both 'scale' and 'zero_p",
        ),
        (
            {"weight_type": theirs.QuantType.QUInt8},
            "activation_type is int8 and weight_type uint8",
        ),
        (
            {"extra_options": {"TensorQuantOverrides": {"z": [{"axis": 1}]}}},
            "tensor 'z' is not present in the model",
        ),
        (
            {"weight_type": theirs.QuantType.QFLOAT8E4M3FN},
            "float8 is for both, or for none",
        ),
        (
            {
                "quant_format": theirs.QuantFormat.QOperator,
                "activation_type": theirs.QuantType.QInt16,
            },
            "16-bit types are written between Q/DQ pairs alone",
        ),
        (
            {"calibration_cache_path": "c.json"},
            "calibration_cache_path has no ranges for this call",
        ),
        (
            {"op_types_to_quantize": 5},
            "op_types_to_quantize is 5; it must be a list of names",
        ),
        (
            {"nodes_to_quantize": "conv1"},
            "nodes_to_quantize is 'conv1'; it must be a list of names",
        ),
        (
            {"nodes_to_exclude": [1]},
            "nodes_to_exclude is [1]; it must be a list of names",
        ),
        ({"extra_options": 5}, "extra_options is 5; it must be a dictionary"),
        ({"extra_options": [1]}, "extra_options is [1]; it must be a dictionary"),
        (
            {
                "calibrate_method": theirs.CalibrationMethod.Percentile,
                "extra_options": {"CalibPercentile": 200},
            },
            (
                "extra options CalibPercentile: percentile is 200; it must be a number"
                " greater than 0 and at most 100"
            ),
        ),
        (
            {"extra_options": {"CalibMovingAverage": "False"}},
            (
                "extra options CalibMovingAverage: moving_average is 'False'; it must"
                " be true or false"
            ),
        ),
        (
            {"use_external_data_format": "no"},
            "use_external_data_format is 'no'; it must be True or False",
        ),
        (
            {"calibration_providers": "CUDAExecutionProvider"},
            "calibration_providers is 'CUDAExecutionProvider'; it must",
        ),
        (
            {"model_input": "again"},
            (
                "quantize_static in onnxruntime's spelling: multiple values for"
                " argument 'model_input'"
            ),
        ),
    ],
)
def test_what_cannot_be_translated(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**keywords)
    assert message in str(error.value)


def test_defaults_of_options_ask_for_nothing() -> None:
    defaults = {
        "DedicatedQDQPair": False,
        "TensorQuantOverrides": {},
        "MinimumRealRange": None,
        "BlockSize": 0,
    }
    assert config(extra_options=defaults) == config()


def test_unknown_options_and_those_of_another_calibration_method(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert (
        config(extra_options={"CalibPercentile": 99.0, "ActivationSymetric": True})
        == config()
    )
    assert (
        "extra option CalibPercentile has no effect with calibrate_method MinMax"
        in caplog.text
    )
    assert (
        "unknown extra option 'ActivationSymetric' has no effect, as in onnxruntime;"
        " did you mean 'Act" in caplog.text
    )


@pytest.mark.parametrize(
    ("providers", "warned"),
    [(["CPUExecutionProvider"], 0), (["CUDAExecutionProvider"], 1)],
)
def test_calibration_runs_on_the_cpu(
    caplog: pytest.LogCaptureFixture, providers: list[str], warned: int
) -> None:
    assert config(calibration_providers=providers) == config()
    assert caplog.text.count("calibration runs on the CPU") == warned


def test_names_that_match_nothing_are_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert config(nodes_to_exclude=["conv9"]) == config()
    assert "no node of the model is called 'conv9'; did you mean 'conv" in caplog.text
    assert (
        config(op_types_to_quantize=["Convv"]).exclude
        == config(nodes_to_quantize=["conv9"]).exclude
        == ("*",)
    )


def test_our_reader_can_be_iterated() -> None:
    found = [feeds["x"] for feeds in reader(ours.CalibrationDataReader)]
    np.testing.assert_array_equal(found, [feeds["x"] for feeds in samples(residual())])


def test_weights_in_a_file_of_their_own(model: Path) -> None:
    output = model.with_name("q.onnx")
    ours.quantize_static(
        str(model),
        str(output),
        reader(ours.CalibrationDataReader),
        use_external_data_format=True,
    )
    onnx.checker.check_model(str(output))
    stored = onnx.load(str(output), load_external_data=False)
    large = [
        tensor for tensor in stored.graph.initializer if np.prod(tensor.dims) >= 1024
    ]
    assert all(tensor.data_location == TensorProto.EXTERNAL for tensor in large)
    assert output.with_name("q.onnx.data").exists() == bool(large)
