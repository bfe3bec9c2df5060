"""Real models on real data; they are not part of the project, so most machines skip this file."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from quark_onnx import QConfig, quantize_static

VARIABLE = "QUARK_ONNX_DATA"
SAMPLES = 100

pytestmark = [pytest.mark.realdata, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def realdata() -> Any:
    """The module that loads the tasks."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} is not set; it names the folder with realdata.py, real models and their data")
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
        ("squeezenet", QConfig.of("XINT8"), 58.5),
        ("yolox_nano", QConfig.of("A16W8"), 33.0),
        ("minilm-stsb", QConfig.of("A8W8"), 79.0),
        ("mobilenetv2", QConfig.of("A8W8"), 82.0),
    ],
    ids=["resnet20-tensor", "resnet20-A8W8", "squeezenet-XINT8", "yolox_nano-A16W8", "minilm-A8W8", "mobilenetv2-A8W8"],
)
def test_the_metric_holds(realdata: Any, tmp_path: Path, name: str, config: QConfig, least: float) -> None:
    task = realdata.load(name)
    output = tmp_path / "quantized.onnx"
    quantize_static(task.path, task.calibration(SAMPLES), config, output)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    found = task.evaluate(ort.InferenceSession(str(output), options, providers=["CPUExecutionProvider"]))
    assert found >= least, f"{task.metric}: {found:.2f}, float {task.float_value}"
