"""Few public parameters are typed ``Any``: a type says what a function takes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: The share of annotated public parameters that may be typed Any.
MOST = 0.03


def public_parameters(package: str) -> Iterator[tuple[str, str]]:
    """Yield the annotated parameters of public functions by place, with their types."""
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.name}"
            arguments = node.args
            for parameter in (
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
            ):
                if parameter.annotation is not None:
                    yield f"{place}({parameter.arg})", ast.unparse(parameter.annotation)


@pytest.mark.parametrize("package", ["calibrators", "quark_onnx"])
def test_few_public_parameters_are_any(package: str) -> None:
    parameters = list(public_parameters(package))
    untyped = [place for place, annotation in parameters if annotation == "Any"]
    assert parameters
    assert len(untyped) <= MOST * len(parameters), "\n".join(untyped)
