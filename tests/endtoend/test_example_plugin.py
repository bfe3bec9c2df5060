"""The package of examples/plugin extends the API and the command line once it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark_onnx.errors import ConfigError
from quark_onnx.registry import PRESETS
from tests.models import conv_relu, parse, samples, weight

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"
TORCH = find_spec("torch") is not None and find_spec("transformers") is not None


def with_path(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the modules and the metadata of a folder are installed."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def quark_onnx(folder: Path, *arguments: str) -> str:
    """What a command of quark-onnx prints; it succeeds without a warning."""
    finished = with_path(folder, "-m", "quark_onnx", *arguments)
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules of the package, and the metadata that an installer writes."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN / "quark_onnx_example", folder / "quark_onnx_example")
    metadata = folder / "quark_onnx_example-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n", "utf-8"
    )
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines.extend(f"{name} = {module}" for name, module in entries.items())
    (metadata / "entry_points.txt").write_text("\n".join(lines), "utf-8")
    return folder


LISTED = {
    "calibrators": "sigma",
    "operators": "Det",
    "optimizers": "round_down",
    "formats": "int6",
    "matrix": "int6",
    "presets": "A6W6",
}


@pytest.mark.parametrize("kind", LISTED)
def test_extensions_are_listed(installed: Path, kind: str) -> None:
    listed = quark_onnx(installed, "list", kind).splitlines()
    assert LISTED[kind] in {line.split()[0] for line in listed}


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


@pytest.mark.skipif(not TORCH, reason="algorithms for language models need torch")
def test_the_algorithm_for_language_models(installed: Path, tmp_path: Path) -> None:
    listed = quark_onnx(installed, "list", "algorithms").splitlines()
    assert "shrink" in {line.split()[0] for line in listed}
    code = """
from quark_onnx.torch.config.algorithm_names import check_algorithm
from quark_onnx.torch.config.schemes import SCHEMES
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import llama, made, tokens

check_algorithm("shrink:steps=10")
config = TorchConfig(SCHEMES["int4_wo_32"], algorithms=("shrink:steps=10",))
report = quantize_model(made(llama()), config, tokens())
outcomes = [o for o in report.outcomes if o.algorithm == "shrink"]
assert outcomes and all(o.after <= o.before for o in outcomes)
assert any(o.after < o.before for o in outcomes)
"""
    finished = with_path(installed, "-c", code)
    assert finished.returncode == 0, finished.stderr


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
