"""Nothing grows beyond what a reader takes in at once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for package in ("calibrators", "quark_onnx") for path in (ROOT / package).rglob("*.py"))

LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 8
#: Folders whose name is copied: AMD Quark's.
COPIED = ("quark_onnx/onnx/tools/", "quark_onnx/torch/utils/")
#: Signatures that are copied: onnxruntime's, and AMD Quark's.
NOT_OURS = {"_signature", "get_config", "get_calib_dataloader"}
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "manager"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_budgets(path: Path) -> None:
    place = path.relative_to(ROOT)
    if not place.as_posix().startswith(COPIED):
        assert not VAGUE & {part.strip("_") for part in place.with_suffix("").parts}
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= LINES
    assert ast.get_docstring(tree), "a file says what its one job is"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in NOT_OURS:
            if isinstance(node.body[0], ast.Expr) and getattr(node.body[0].value, "value", None) is Ellipsis:
                continue  # a declaration: the types of what a dataclass takes
            assert (node.end_lineno or 0) - node.lineno < FUNCTION_LINES, f"{node.name} is too long"
            a = node.args
            count = len([*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))])
            method = bool(a.args) and a.args[0].arg in ("self", "cls")
            assert count - method <= PARAMETERS, f"{node.name} takes too many parameters"
