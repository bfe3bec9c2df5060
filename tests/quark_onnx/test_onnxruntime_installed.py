"""Without onnxruntime, or with half of one, an import says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def imported(without: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code where ``find_spec`` finds something else for onnxruntime."""
    script = f"""
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    return {without} if name == "onnxruntime" else real(name, package)
importlib.util.find_spec = find_spec
{code}
"""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )


@pytest.mark.parametrize("module", ["quark_onnx", "quark_onnx.cli"])
def test_no_onnxruntime(module: str) -> None:
    finished = imported("None", f"import {module}")
    assert finished.returncode == 1
    assert (
        "ImportError: quark_onnx needs onnxruntime, and none is installed. Install one"
        " of these:\n" in finished.stderr
    )
    for package in ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml"):
        assert f"pip install {package}\n" in finished.stderr
    assert "Ryzen AI" in finished.stderr


def test_a_folder_that_another_build_has_left(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime" / "capi").mkdir(parents=True)
    spec = f"__import__('importlib').machinery.PathFinder.find_spec(name, [{str(tmp_path)!r}])"
    finished = imported(spec, "import quark_onnx")
    assert finished.returncode == 1
    assert f"the onnxruntime in {tmp_path / 'onnxruntime'} is incomplete" in (
        finished.stderr
    )
    assert "--force-reinstall" in finished.stderr


@pytest.mark.parametrize(
    ("line", "too_old"),
    [
        ('__version__ = "1.19.2"', True),
        ("__version__ = '0.9'", True),
        ('__version__ = "1.20.0"', False),
        ('__version__ = "1.23.0.dev20250926"', False),
        ('__version__ = "2.0.0"', False),
        ('__version__ = "unknown"', False),
        ("from .version import __version__", False),
    ],
)
def test_an_old_release(tmp_path: Path, line: str, too_old: bool) -> None:
    folder = tmp_path / "onnxruntime"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"{line}\n", encoding="utf-8")
    spec = f"__import__('importlib').machinery.PathFinder.find_spec(name, [{str(tmp_path)!r}])"
    finished = imported(spec, "import quark_onnx")
    if not too_old:
        assert (finished.returncode, finished.stderr) == (0, "")
        return
    version = line.split("=")[1].strip(" \"'")
    assert finished.returncode == 1
    assert (
        f"ImportError: quark_onnx needs onnxruntime 1.20 or later, and {version} is"
        f" installed in {folder}. Upgrade the build that is installed:\n"
    ) in finished.stderr
    assert "pip install --upgrade onnxruntime-gpu\n" in finished.stderr


def test_numbers_alone_need_none() -> None:
    code = "import calibrators; print(calibrators.create('minmax'))"
    finished = imported("None", code)
    assert (finished.returncode, finished.stderr) == (0, "")
