"""The docstring of a public function describes all of its arguments, or has no Args section."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for name in ("calibrators", "quark_onnx")
    for path in (ROOT / name).rglob("*.py")
)


def public_functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Public functions, and public methods of public classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public_functions(child)
        elif isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            yield child


def undescribed(function: ast.FunctionDef) -> list[str]:
    """Arguments that an Args section leaves out."""
    section = (ast.get_docstring(function) or "").partition("Args:\n")[2]
    if not section:
        return []
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = {argument.arg for argument in named} - {"self", "cls"}
    described = re.findall(r"^    ([\w, ]+):", section, re.MULTILINE)
    return sorted(names - {name for entry in described for name in entry.split(", ")})


def test_all_arguments_are_described() -> None:
    missing = {
        f"{path.name}: {function.name}": names
        for path in FILES
        for function in public_functions(ast.parse(path.read_text(encoding="utf-8")))
        if (names := undescribed(function))
    }
    assert not missing
