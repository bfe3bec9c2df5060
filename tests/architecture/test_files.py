"""The name of a file says what it holds, and its docstring what it is for.

Limits on length and complexity are those of ruff (pyproject.toml).
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tests.cases import loop_over

ROOT = Path(__file__).parents[2]
PACKAGES = ("calibrators", "quark_onnx")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

#: Folders whose names are AMD Quark's.
COPIED = ("quark_onnx/onnx/tools/", "quark_onnx/torch/utils/")
VAGUE = {"utils", "util", "helpers", "helper", "misc", "tools", "manager"}


@loop_over("path", {path.relative_to(ROOT).as_posix(): path for path in FILES})
def test_name_and_docstring(path: Path) -> None:
    place = path.relative_to(ROOT)
    if not place.as_posix().startswith(COPIED):
        assert not VAGUE & {part.strip("_") for part in place.with_suffix("").parts}
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone")
def test_no_large_file_is_in_the_repository() -> None:
    """Models, weights and data do not belong there, nor what tools leave behind."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    sizes = {name: (ROOT / name).stat().st_size for name in listed if name}
    assert len(sizes) > len(FILES)
    assert {name for name, size in sizes.items() if size > 200_000} == set()
    in_root = {name for name in sizes if "/" not in name}
    assert not {name for name in in_root if name.endswith((".onnx", ".data", ".npz"))}
