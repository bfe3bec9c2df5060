"""Real models score alike in both forms.

They are not part of the project, so most machines skip this file.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize_static
from tests.models import kinds
from tests.settings import portable

VARIABLE = "QUARK_ONNX_DATA"
FILE = Path(os.environ.get(VARIABLE, ""), "realdata.py")

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not FILE.is_file(), reason=f"{VARIABLE} names no folder with realdata.py"
    ),
]


@pytest.fixture(scope="module")
def realdata() -> Any:
    """The module that loads the tasks."""
    spec = importlib.util.spec_from_file_location("realdata", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def session(model: ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize(
    "name", ["resnet20", "squeezenet", "mobilenetv2", "minilm-stsb"]
)
def test_the_metric_is_that_of_the_pairs(realdata: Any, name: str) -> None:
    task = realdata.load(name)
    config = portable(QConfig.of("A8W8"))
    forms = [
        quantize_static(task.path, task.calibration(100), config.with_(form=form))
        for form in ("qdq", "operators")
    ]
    assert not {"Conv", "Gemm", "MatMul"} & set(kinds(forms[1]))
    pairs, operators = (task.evaluate(session(model)) for model in forms)
    assert operators == pytest.approx(pairs, abs=0.3), task.metric
