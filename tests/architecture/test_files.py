"""Each file has a name that says what it holds, and a docstring that says what it is for.

Limits on length and complexity are those of ruff (pyproject.toml).
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.cases import loop_over

ROOT = Path(__file__).parents[2]
PACKAGES = ("calibrators", "quark_onnx")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

#: Folders whose names are AMD Quark's.
COPIED = ("quark_onnx/onnx/tools/", "quark_onnx/torch/utils/")
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "manager"}


@loop_over("path", {path.relative_to(ROOT).as_posix(): path for path in FILES})
def test_name_and_docstring(path: Path) -> None:
    place = path.relative_to(ROOT)
    if not place.as_posix().startswith(COPIED):
        assert not VAGUE & {part.strip("_") for part in place.with_suffix("").parts}
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
