"""The test suite can be collected by someone who installed no extra."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Packages that only the extras install.
OPTIONAL = (
    "torch",
    "transformers",
    "safetensors",
    "gguf",
    "onnxscript",
    "compressed_tensors",
    "accelerate",
    "lm_eval",
    "olive",
)

#: ``None`` in ``sys.modules`` makes an import fail and ``find_spec`` return None, as if the package
#: were missing.
COLLECT = f"""
import sys
import pytest
sys.modules.update(dict.fromkeys({OPTIONAL!r}))
sys.exit(pytest.main(["--collect-only", "-qq", "--assert=plain", "-p", "no:cacheprovider"]))
"""


@pytest.mark.skipif(
    not any(find_spec(name) for name in OPTIONAL),
    reason="no extra is installed: this very run collects the files without one",
)
def test_every_test_file_is_collected_without_extras() -> None:
    """No collected file imports an optional package when it is loaded, unless it skips itself.

    ``--doctest-modules`` imports every Python file under the test paths, whether it holds tests or
    not.
    """
    run = subprocess.run(
        [sys.executable, "-c", COLLECT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
