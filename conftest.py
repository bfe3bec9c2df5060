"""Test the PyTorch side where torch and transformers are installed, and report where they are not."""  # noqa: E501

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--extras",
        action="store_true",
        help=(
            "run only the tests of files that mention an optional package; the others"
            " run without the extras as well"
        ),
    )


def pytest_report_header() -> str:
    """Say first of all what is left out."""
    if not MISSING:
        return "PyTorch side: tested"
    return (
        f"PyTorch side: NOT TESTED, {', '.join(MISSING)} missing (pip install -e"
        " '.[llm]')"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip what needs a package that is missing; with ``--extras``, leave out what a run without
    the extras tests as well.
    """
    if find_spec("onnxruntime_extensions") is None:
        skip = pytest.mark.skip(reason="onnxruntime-extensions is not installed")
        for item in items:
            if item.get_closest_marker("images"):
                item.add_marker(skip)
    if not config.getoption("--extras"):
        return
    if MISSING:
        raise pytest.UsageError(
            f"--extras: {', '.join(MISSING)} missing (pip install -e '.[llm]')"
        )
    others = [item for item in items if not _mentions_optional(item.path)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if _mentions_optional(item.path)]


@cache
def _mentions_optional(path: Path) -> bool:
    """Return whether a test can depend on an optional package: its file names one or lies on the
    PyTorch side.
    """
    # "pytorch_half_pixel" is a word of the ONNX specification
    pattern = rf"(?<![a-z])({'|'.join(OPTIONAL)})"
    named = re.search(pattern, path.read_text(encoding="utf-8"))
    return named is not None or "torch" in path.parts
