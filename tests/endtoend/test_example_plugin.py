"""The package of examples/plugin extends the API and the command line once it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import PRESETS
from tests.endtoend.example_plugin import PLUGIN, install, quark_onnx, with_path
from tests.models import conv_relu, parse, samples, weight

LISTED = {
    "calibrators": "sigma",
    "operators": "Det",
    "optimizers": "round_down",
    "formats": "int6",
    "matrix": "int6",
    "presets": "A6W6",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


def test_extensions_are_listed(installed: Path) -> None:
    code = """
import sys
from quark_onnx.cli import main
for kind in sys.argv[1:]:
    print("list of", kind, flush=True)
    assert main(["list", kind]) == 0
"""
    finished = with_path(installed, "-c", code, *LISTED)
    assert (finished.returncode, finished.stderr) == (0, "")
    lists = finished.stdout.split("list of ")[1:]
    for (kind, name), printed in zip(LISTED.items(), lists, strict=True):
        assert name in {line.split()[0] for line in printed.splitlines()[1:]}, kind


def test_they_are_not_there_without_the_package() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'A6W6'"):
        PRESETS["A6W6"]


def test_a_preset_with_a_format_a_calibrator_and_an_optimizer(
    installed: Path, tmp_path: Path
) -> None:
    model = conv_relu()
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "data").mkdir()
    for index, feeds in enumerate(samples(model, count=8)):
        np.savez(tmp_path / "data" / f"{index}.npz", **feeds)
    printed = quark_onnx(
        installed,
        *("quantize", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out.onnx")),
        *("--data", str(tmp_path / "data"), "--preset", "A6W6", "--json"),
        *("--calibrator", "sigma:width=5", "--optimize", "round_down"),
    )
    document = json.loads(printed)
    assert document["worst_sqnr"] > 20
    result = onnx.load(tmp_path / "out.onnx")
    codes = [
        onnx.numpy_helper.to_array(tensor)
        for tensor in result.graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8
        and tensor.name.endswith("_quantized")
    ]
    assert codes and all(abs(each.astype(int)).max() <= 32 for each in codes)


def test_the_rule(installed: Path, tmp_path: Path) -> None:
    model = parse(
        """g (float[N,4,4] x) => (float[N] y) {
            h = MatMul (x, w)
            y = Det (h)
        }""",
        w=weight(4, 4),
    )
    onnx.save(model, tmp_path / "model.onnx")
    decisions: dict[str, dict[str, str]] = {}
    for name, folder in {"plain": tmp_path, "extended": installed}.items():
        printed = quark_onnx(folder, "explain", str(tmp_path / "model.onnx"), "--json")
        node = json.loads(printed)["nodes"][-1]
        tensors = [*node["inputs"], *node["outputs"]]
        decisions[name] = {each["tensor"]: each["decision"] for each in tensors}
    assert decisions["plain"] == {"h": "float", "y": "float"}
    assert decisions["extended"] == {"h": "quantize", "y": "float"}


@pytest.mark.slow
def test_pip_installs_it(tmp_path: Path) -> None:
    """By the real installer, into a folder of its own."""
    shutil.copytree(PLUGIN, tmp_path / "plugin")
    site = tmp_path / "site"
    arguments = ("install", "--quiet", "--no-deps", "--target", str(site))
    command = [sys.executable, "-m", "pip", *arguments, str(tmp_path / "plugin")]
    finished = subprocess.run(command, capture_output=True, text=True)
    if "No matching distribution found for hatchling" in finished.stderr:
        pytest.skip("no package index can be reached")
    assert finished.returncode == 0, finished.stderr
    listed = quark_onnx(site, "list", "calibrators").splitlines()
    assert "sigma" in {line.split()[0] for line in listed}
