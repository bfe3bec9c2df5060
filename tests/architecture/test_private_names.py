"""Tests use public names: a private one may change without a word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("calibrators", "quark_onnx")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def assigned(tree: ast.AST) -> Iterator[str]:
    """Names of functions and classes, and those that are assigned to, as x and as self.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def used(tree: ast.AST) -> Iterator[str]:
    """Names that are imported from our packages, read from objects, or patched."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in PACKAGES:
                yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            if not isinstance(node.value, ast.Name) or node.value.id not in (
                "self",
                "cls",
            ):
                yield node.attr
        elif isinstance(node, ast.Call):
            yield from patched(node)


def patched(call: ast.Call) -> Iterator[str]:
    """What ``monkeypatch.setattr`` replaces: the last part of ``"module.name"`` or a name."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "setattr":
        for argument in call.args[:2]:
            if isinstance(argument, ast.Constant):
                yield str(argument.value).rpartition(".")[2]


def test_tests_use_public_names() -> None:
    ours = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in assigned(ast.parse(path.read_text(encoding="utf-8")))
        if is_private(name)
    }
    assert "_products" in ours  # of smoothquant.py
    #: Of argparse and transformers, which have no public name for it.
    others = {"_actions", "_attn_implementation", "_repr_html_"}
    forbidden = ours - others
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        # Most files have none of these words, and are not parsed.
        if forbidden.intersection(re.findall(r"\w+", text)):
            assert not forbidden.intersection(used(ast.parse(text))), path
