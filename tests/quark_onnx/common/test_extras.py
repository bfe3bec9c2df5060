"""Hints name the distribution that is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "quark_onnx"


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (["quark-onnx", "quark-onnx-core"], "pip install 'quark-onnx[llm]'"),
        (["quark-onnx-core"], "pip install 'quark-onnx-core[llm]'"),
        ([], "pip install 'quark-onnx[llm]'"),
        (["quark-onnx-core", "from a folder"], "pip install '/my clone[llm]'"),
    ],
)
def test_the_installed_distribution_is_named(
    tmp_path: Path, installed: list[str], expected: str
) -> None:
    origin = ""
    if "from a folder" in installed:
        installed = installed[:-1]
        origin = '{"dir_info": {"editable": true}, "url": "file:///my%20clone"}'
    for name in installed:
        folder = tmp_path / f"{name.replace('-', '_')}-0.1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n", "utf-8"
        )
        if origin:
            (folder / "direct_url.json").write_text(origin, "utf-8")
    script = f"""
import sys
import quark_onnx.common.extras as extras
sys.path[:] = [{str(tmp_path)!r}]
print(extras.pip_install("llm"))
"""
    finished = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=True,
    )
    assert finished.stdout.strip() == expected


def test_no_message_names_a_distribution_itself() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "extras.py"]
    named = re.compile(r"quark-onnx(-core)?\[")
    assert [
        str(path) for path in files if named.search(path.read_text(encoding="utf-8"))
    ] == []
