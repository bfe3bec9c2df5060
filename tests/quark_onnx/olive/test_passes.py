"""The passes run in Olive: workflows from its own configuration, against the float model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

os.environ.setdefault("OLIVE_DISABLE_TELEMETRY", "1")
pytest.importorskip(
    "olive",
    reason="olive-ai is not installed; the translation of parameters is tested all the same",
)

import olive
import torch
from olive.data.registry import Registry

from quark_onnx.olive import PASSES, package_config
from tests.compat_onnxruntime.networks import convolutions

pytestmark = pytest.mark.filterwarnings("ignore")  # of Olive and of what it imports


@Registry.register_dataset("quark_onnx_samples")
def samples(**_: Any) -> list[tuple[dict[str, Any], int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ({"x": torch.randn(1, *SHAPE, generator=generator)[0]}, 0) for _ in range(8)
    ]


SHAPE = tuple(
    dim.dim_value
    for dim in convolutions().graph.input[0].type.tensor_type.shape.dim[1:]
)
DATA = {
    "name": "calibration",
    "type": "DataContainer",
    "load_dataset_config": {"type": "quark_onnx_samples"},
}
TENSOR = {"scale_type": "PowerOf2", "calibration_method": "MinMSE"}
WORKFLOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("QuarkOnnxStaticQuantization", {"data_config": "calibration"}),
    "static, not prepared": (
        "QuarkOnnxStaticQuantization",
        {
            "data_config": "calibration",
            "prepare_qdq_config": False,
            "activation_type": "uint8",
            "per_channel": True,
        },
    ),
    "XINT8": (
        "QuarkOnnxStaticQuantization",
        {"data_config": "calibration", "quark_config": "XINT8"},
    ),
    "dynamic": ("QuarkOnnxDynamicQuantization", {"precision": "uint8"}),
    "weight-only": ("QuarkOnnxWeightOnlyQuantization", {"quark_config": "W8"}),
    "Quark's parameters": (
        "QuarkOnnxQuantization",
        {
            "data_config": "calibration",
            "global_config": {"input_tensors": TENSOR, "weight": TENSOR},
        },
    ),
}


def run_olive(folder: Path, name: str, settings: dict[str, Any]) -> Path:
    """Run a workflow of one pass, and return the path of its model."""
    onnx.save(convolutions(), folder / "float.onnx")
    workflow = {
        "input_model": {"type": "OnnxModel", "model_path": str(folder / "float.onnx")},
        "data_configs": [DATA],
        "passes": {"quantize": {"type": name, **settings}},
        "output_dir": str(folder / "out"),
        "cache_dir": str(folder / "cache"),
    }
    olive.run(workflow, package_config=package_config())
    return folder / "out" / "model.onnx"


def sqnr(path: Path) -> float:
    """Signal-to-noise ratio in dB over the samples, in float64."""
    floats = ort.InferenceSession(
        convolutions().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    signal = noise = 0.0
    for sample, _ in samples():
        feeds = {"x": sample["x"].numpy()[None]}
        expected = floats.run(None, feeds)[0].astype(np.float64)
        signal += float(np.sum(expected**2))
        noise += float(np.sum((expected - session.run(None, feeds)[0]) ** 2))
    return 10 * float(np.log10(signal / noise))


@pytest.mark.parametrize("kind", WORKFLOWS)
def test_a_workflow_writes_a_quantized_model(kind: str, tmp_path: Path) -> None:
    name, settings = WORKFLOWS[kind]
    path = run_olive(tmp_path, name, settings)
    model = onnx.load(path)
    op_types = {node.op_type for node in model.graph.node}
    expected = {"dynamic": "ConvInteger", "weight-only": "DequantizeLinear"}.get(
        kind, "QuantizeLinear"
    )
    assert expected in op_types
    assert sqnr(path) > 20
    scales = [each for each in model.graph.initializer if each.name.endswith("_scale")]
    if kind in ("XINT8", "Quark's parameters"):
        exponents = np.log2([onnx.numpy_helper.to_array(scale) for scale in scales])
        assert scales and np.array_equal(exponents, np.round(exponents)), (
            "scales are powers of two"
        )


@pytest.mark.parametrize(
    ("peer", "settings"),
    [
        ("OnnxStaticQuantization", {"data_config": "calibration"}),
        (
            "OnnxStaticQuantization",
            {
                "data_config": "calibration",
                "prepare_qdq_config": False,
                "per_channel": True,
            },
        ),
        ("OnnxDynamicQuantization", {"precision": "uint8"}),
    ],
)
def test_the_accuracy_is_that_of_the_pass_of_olive(
    peer: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folders = [tmp_path / "ours", tmp_path / "theirs"]
    for folder in folders:
        folder.mkdir()
    ours, theirs = (
        run_olive(folder, name, dict(settings))
        for folder, name in zip(folders, (f"Quark{peer}", peer), strict=True)
    )
    assert sqnr(ours) > sqnr(theirs) - 0.5


def test_external_data(tmp_path: Path) -> None:
    settings = {
        "quark_config": "W8",
        "save_as_external_data": True,
        "size_threshold": 0,
        "external_data_name": "w.bin",
    }
    path = run_olive(tmp_path, "QuarkOnnxWeightOnlyQuantization", settings)
    assert (path.parent / "w.bin").exists()
    assert sqnr(path) > 20


def test_the_written_package_configuration_has_the_passes(tmp_path: Path) -> None:
    output = tmp_path / "package.json"
    subprocess.run([sys.executable, "-m", "quark_onnx.olive", str(output)], check=True)
    passes = json.loads(output.read_text(encoding="utf-8"))["passes"]
    assert PASSES.keys() <= passes.keys()
    assert "OnnxStaticQuantization" in passes, "Olive's own passes remain"
