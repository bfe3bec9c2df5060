"""Install the package of examples/plugin into a folder, and run Python with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"


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


def install(folder: Path) -> Path:
    """Write the modules of the package, and the metadata that an installer writes."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
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
