"""Imports only ever go down the layers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for package in ("calibrators", "quark_onnx") for path in (ROOT / package).rglob("*.py"))

#: Low to high; what shares a line may not import each other.
LAYERS = """
calibrators
errors version
registry progress page
kernels
functions
dtypes
config graph
plan
rules passes fusions optimizers targets
report onnxruntime_spelling
steps
job
api convert
analysis npu torch
onnx compat_onnxruntime
vai_q_onnx olive
quark_onnx
cli
__main__
""".strip().splitlines()
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}

#: Beside the layer of that name; inside functions, as importing the package loads no torch.
MAY_IMPORT_TORCH = {"device.py"}
#: Everything else in calibrators is arithmetic on numpy arrays.
NEEDS_ONNX = {"control.py", "extensions.py", "images.py", "processor.py", "stored.py", "runner.py", "session.py"} | {
    "worker.py"
}


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere, functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield str(node.module)


def layer(module: str) -> str:
    """``quark_onnx.graph.io`` belongs to ``graph``, ``quark_onnx`` to itself, ``calibrators.grid`` to calibrators."""
    package, *inside = module.split(".")
    return inside[0] if package == "quark_onnx" and inside else package


def own(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "quark_onnx" if parts == ("quark_onnx", "__init__") else layer(".".join(parts))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    assert own(path) in RANK, "name the new layer above"
    for module in imports(path):
        top = module.split(".")[0]
        if own(path) != "torch":
            assert top not in ("transformers", "safetensors", "gguf")
            assert top != "torch" or path.name in MAY_IMPORT_TORCH
        if top in ("quark_onnx", "calibrators") and layer(module) != own(path):
            assert RANK[layer(module)] < RANK[own(path)], f"{own(path)} imports {module}"
        if own(path) == "calibrators":
            assert top != "quark_onnx"
            assert top not in ("onnx", "onnxruntime", "onnxruntime_extensions") or path.name in NEEDS_ONNX


def test_one_place_imports_the_extensions() -> None:
    """As that changes the environment of child processes, from tests, too; what a bundle ships stands alone."""
    bundle, allowed = ROOT / "quark_onnx" / "npu" / "bundle", {ROOT / "calibrators" / "extensions.py"}
    tests = {
        path for path in (ROOT / "tests").rglob("*.py") if "local_models" not in path.parts
    }  # as others write them
    found = {
        path
        for path in tests.union(FILES)
        if "onnxruntime_extensions" in imports(path) and not path.is_relative_to(bundle)
    }
    assert found == allowed


def test_every_layer_exists() -> None:
    assert {own(path) for path in FILES} == RANK.keys()
