"""The PyTorch side is tested where torch and transformers are installed, and the report says where they are not."""

from __future__ import annotations

import os
from importlib.util import find_spec

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # tests import onnxruntime before the package does

MISSING = [name for name in ("torch", "transformers", "safetensors", "gguf", "onnxscript") if find_spec(name) is None]
if MISSING:
    collect_ignore = ["quark_onnx/torch", "tests/quark_onnx/torch", "tests/torch_models.py", "tests/torch_families.py"]


def pytest_report_header() -> str:
    """What is left out, first of all."""
    if not MISSING:
        return "PyTorch side: tested"
    return f"PyTorch side: NOT TESTED, {', '.join(MISSING)} missing (pip install -e '.[llm]')"
