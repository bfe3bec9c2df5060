"""Importing onnxruntime writes no identifier of this machine, unless the user lets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PATHS = {
    "the calibrators alone": "import calibrators, onnxruntime",
    "a session": (
        "from calibrators.onnx_runtime.cpu_features import saturates; saturates()"
    ),
    "the package": (
        "import quark_onnx; from quark_onnx.planning.opsets import newest_with_pairs;"
        " newest_with_pairs()"
    ),
    "the command line": (
        "from quark_onnx.cli import main; main(['list', 'presets']); import onnxruntime"
    ),
    "a worker process": (
        "from concurrent.futures import ProcessPoolExecutor; from multiprocessing"
        " import get_context\nimport calibrators.onnx_runtime.cpu_features\nif __name__"
        " == '__main__':\n    with ProcessPoolExecutor(1, get_context('spawn')) as"
        " pool:\n       "
        " pool.submit(calibrators.onnx_runtime.cpu_features.saturates).result()"
    ),
    "what a bundle ships": (
        "import runpy; runpy.run_path('quark_onnx/npu/bundle/npu_session.py'); import"
        " onnxruntime"
    ),
}


@pytest.mark.parametrize("path", PATHS)
def test_no_file_is_written_into_the_temporary_folder(
    path: str, tmp_path: Path
) -> None:
    """onnxruntime 1.32 writes .ses, with a time and a UUID, as soon as it is imported, unless it is
    told before.
    """
    (tmp_path / "tmp").mkdir()
    (tmp_path / "run.py").write_text(PATHS[path], encoding="utf-8")
    env = {
        name: value
        for name, value in os.environ.items()
        if name != "ORT_DISABLE_TELEMETRY"
    }
    env |= {name: str(tmp_path / "tmp") for name in ("TMPDIR", "TEMP", "TMP")}
    root = Path(__file__).parents[2]
    env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, str(tmp_path / "run.py")],
        env=env,
        cwd=root,
        check=True,
        capture_output=True,
    )
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_the_user_has_set_stays() -> None:
    code = "import os, calibrators; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    env = {**os.environ, "ORT_DISABLE_TELEMETRY": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0\n"
