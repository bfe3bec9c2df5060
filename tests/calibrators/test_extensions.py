"""The library of onnxruntime-extensions leaves the environment as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.images

VARIABLE = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


@pytest.mark.parametrize("value", [None, "upb"])
def test_child_processes_get_the_protobuf_that_they_had(value: str | None) -> None:
    """By default this is the implementation of the package, the fast one."""
    program = f"""
import os, subprocess, sys
from calibrators.onnx_runtime.extensions import library
print(library())
print(os.environ.get({VARIABLE!r}))
ask = "from google.protobuf.internal import api_implementation as chosen; print(chosen.Type())"
print(subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True).stdout, end="")
"""  # noqa: E501
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    environment |= {VARIABLE: value} if value else {}
    command = [sys.executable, "-c", program]
    found = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        encoding="utf-8",
    )
    path, variable, implementation = found.stdout.splitlines()
    assert Path(path).is_file()
    assert (variable, implementation) == (str(value), "upb")
