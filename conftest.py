"""Test the PyTorch side where torch and transformers are installed, and report where they are not."""  # noqa: E501

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

os.environ.setdefault(
    "ORT_DISABLE_TELEMETRY", "1"
)  # tests import onnxruntime before the package does

OPTIONAL = ("torch", "transformers", "safetensors", "gguf", "onnxscript")
MISSING = [name for name in OPTIONAL if find_spec(name) is None]
collect_ignore = [] if find_spec("olive") else ["quark_onnx/olive/passes.py"]
if MISSING:
    collect_ignore += [
        "quark_onnx/torch",
        "tests/quark_onnx/torch",
        "tests/torch_models.py",
        "tests/torch_families.py",
    ]


def pytest_report_header() -> str:
    """Say first of all what is left out."""
    if not MISSING:
        return "PyTorch side: tested"
    return (
        f"PyTorch side: NOT TESTED, {', '.join(MISSING)} missing (pip install -e"
        " '.[llm]')"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a package that is missing."""
    if find_spec("onnxruntime_extensions") is not None:
        return
    skip = pytest.mark.skip(reason="onnxruntime-extensions is not installed")
    for item in items:
        if item.get_closest_marker("images"):
            item.add_marker(skip)
