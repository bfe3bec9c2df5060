"""Real models on real data; they are not part of the project, so most machines skip this file."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, analyze, compare, quantize, quantize_static

VARIABLE = "QUARK_ONNX_DATA"
SAMPLES = 100

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def realdata() -> Any:
    """The module that loads the tasks."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(
            f"{VARIABLE} is not set; it names the folder with realdata.py, real models"
            " and their data"
        )
    file = Path(folder) / "realdata.py"
    if not file.is_file():
        pytest.skip(f"{VARIABLE} is {folder!r}, where there is no realdata.py")
    spec = importlib.util.spec_from_file_location("realdata", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PER_TENSOR = QConfig.of("A8W8").with_(per_channel=False)


@pytest.mark.parametrize(
    ("name", "config", "least"),
    [
        ("resnet20", PER_TENSOR, 91.5 - 1),
        ("resnet20", QConfig.of("A8W8"), 91.5 - 1),
        # the marks of benchmarks/accuracy.py, too
        pytest.param("squeezenet", QConfig.of("XINT8"), 58.5, marks=pytest.mark.slow),
        pytest.param("yolox_nano", QConfig.of("A16W8"), 33.0, marks=pytest.mark.slow),
        pytest.param("minilm-stsb", QConfig.of("A8W8"), 79.0, marks=pytest.mark.slow),
        pytest.param("mobilenetv2", QConfig.of("A8W8"), 82.0, marks=pytest.mark.slow),
    ],
    ids=[
        "resnet20-tensor",
        "resnet20-A8W8",
        "squeezenet-XINT8",
        "yolox_nano-A16W8",
        "minilm-A8W8",
        "mobilenetv2-A8W8",
    ],
)
def test_the_metric_holds(
    realdata: Any, tmp_path: Path, name: str, config: QConfig, least: float
) -> None:
    task = realdata.load(name)
    output = tmp_path / "quantized.onnx"
    quantize_static(task.path, task.calibration(SAMPLES), config, output)
    found = task.evaluate(open_session(output))
    assert found >= least, f"{task.metric}: {found:.2f}, float {task.float_value}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset", "least"),
    [("squeezenet", "A8W8", 15.0), ("minilm-stsb", "A8W8", 10.0)],
    ids=["squeezenet", "minilm"],
)
def test_the_analysis_accounts_for_every_tensor(
    realdata: Any, tmp_path: Path, name: str, preset: str, least: float
) -> None:
    task = realdata.load(name)
    output = tmp_path / "quantized.onnx"
    quantize_static(task.path, task.calibration(16), preset, output)
    found = analyze(task.path, output, task.calibration(4))
    compared = compare(task.path, output, task.calibration(4))
    assert found.sqnr == pytest.approx(compared.sqnr, abs=2.0)
    assert found.sqnr > least
    assert len(found.tensors) > len(found.unmatched)
    assert all(entry.reason for entry in found.unmatched)
    assert all(tensor.causes for tensor in found.ranking[:10])
    assert all(weight.sqnr > 15 for weight in found.weights if weight.role == "weight")


def test_the_analysis_finds_what_was_spoilt(realdata: Any, tmp_path: Path) -> None:
    """One scale, made eight times too small, is found, named and explained."""
    task = realdata.load("resnet20")
    quantized = quantize_static(task.path, task.calibration(16), "A8W8")
    name = "/layer2/layer2.1/Relu_1_output_0"
    for tensor in quantized.graph.initializer:
        if tensor.name == f"{name}_scale":
            tensor.CopyFrom(
                numpy_helper.from_array(
                    numpy_helper.to_array(tensor) / np.float32(8), tensor.name
                )
            )
    first = analyze(task.path, quantized, task.calibration(4)).ranking[0]
    assert (first.name, first.causes[0].kind) == (name, "clipped")


@pytest.mark.slow
def test_wrong_preprocessing_is_found(realdata: Any) -> None:
    """ResNet-20: as it was trained, scaled to [0, 1], with swapped channels, and interleaved.

    The evidence of 32 images leaves one draw in four undecided: five draws are looked at.
    """
    task = realdata.load("resnet20")
    right = [sample["input"] for sample in task.calibration(160)]
    mean = np.float32([0.485, 0.456, 0.406]).reshape(3, 1, 1)
    std = np.float32([0.229, 0.224, 0.225]).reshape(3, 1, 1)
    pixels = [each * std + mean for each in right]
    variants = {
        "": right,
        "(scaling)": pixels,
        "(color)": [(each[:, ::-1] - mean) / std for each in pixels],
        "(layout)": [
            each.transpose(0, 2, 3, 1).copy().reshape(each.shape) for each in right
        ],
    }
    for cause, arrays in variants.items():
        found = 0
        for start in range(0, 160, 32):
            draw = [
                {"input": np.ascontiguousarray(x)} for x in arrays[start : start + 32]
            ]
            report = quantize(task.path, draw, "A8W8").report
            assert report.verdict is not None and report.verdict.task == "classifier"
            if report.warnings:
                (warning,) = report.warnings
                assert cause and cause in warning
                assert report.verdict.band != "good"
                found += 1
            else:
                assert report.verdict.band == "good"
        least = {"": 0, "(layout)": 5}.get(cause, 4)
        assert found >= least and (cause or not found)
