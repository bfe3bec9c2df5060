"""The library of onnxruntime-extensions is found without importing the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.images


def test_the_package_is_not_imported() -> None:
    """It imports torch and transformers, and sets a variable that slows child processes down."""
    program = """
import os, sys
before = dict(os.environ)
from calibrators.onnx_runtime.extensions import library
print(library())
print("onnxruntime_extensions" in sys.modules, dict(os.environ) == before)
import onnxruntime_extensions
print(os.path.samefile(onnxruntime_extensions.get_library_path(), library()))
"""
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    path, facts, same = found.stdout.splitlines()[-3:]
    assert Path(path).is_file()
    assert (facts, same) == ("False True", "True")
