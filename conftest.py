"""Test the PyTorch side where torch and transformers are installed, and report where they are not."""  # noqa: E501

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Generator
from importlib.util import find_spec
from typing import Any

import pytest

os.environ.setdefault(
    "ORT_DISABLE_TELEMETRY", "1"
)  # tests import onnxruntime before the package does

# No test downloads: what is not there fails at once, without trying again for 23 seconds.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from modules and items, which live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Open each session with one thread, unless the caller names a number.

    The processes of pytest are the parallelism. The threads of a small model's session cost more
    than its runs: they are started with it, and spin between two runs. Nightly runs keep them.
    """
    if os.environ.get("QUARK_ONNX_NIGHTLY"):
        return
    import onnxruntime as ort

    open_session = ort.InferenceSession.__init__

    @functools.wraps(open_session)
    def open_with_one_thread(
        self: Any,
        path_or_bytes: Any,
        sess_options: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        options = sess_options or ort.SessionOptions()
        options.intra_op_num_threads = options.intra_op_num_threads or 1
        open_session(self, path_or_bytes, options, *args, **kwargs)

    ort.InferenceSession.__init__ = open_with_one_thread
