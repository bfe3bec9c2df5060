"""A folder with a tiny model and data, which is the current one, and the command line run in this
process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx.cli import main
from tests.models import normal, parse, weight


@dataclass(frozen=True)
class Finished:
    """A run of the command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of complaint, without its beginning and what to try."""
        assert "Traceback" not in self.err
        lines = [
            line
            for line in self.err.splitlines()
            if not line.startswith(("quark-onnx: warning: ", "quark-onnx: try: ", "  "))
        ]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("quark-onnx: error: ")
        return lines[0].removeprefix("quark-onnx: error: ")


CommandLine = Callable[..., Finished]


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note on 8-bit products of this processor is left out."""
    monkeypatch.setattr(
        sys.modules["quark_onnx.writing.finish"], "saturates", lambda: False
    )


@pytest.fixture
def cli(one_process: Context, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    def run(*arguments: object) -> Finished:
        capsys.readouterr()
        words = [str(argument) for argument in arguments]
        here = copy_context() if "--no-isolation" in words else one_process.copy()
        code = here.run(main, words)
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: model.onnx, (N, 3, 8, 8) -> (N, 4), and ten files of two samples in
    data/.
    """
    model = parse(
        """g (float[N, 3, 8, 8] image) => (float[N, 4] scores) {
            [first] a = Conv <pads = [1, 1, 1, 1]> (image, w, bias)
            [clip] b = Relu (a)
            [pool] c = GlobalAveragePool (b)
            [flat] d = Flatten (c)
            [head] scores = Gemm (d, v)
        }""",
        w=weight(6, 3, 3, 3),
        bias=normal(6),
        v=weight(6, 4),
    )
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "data").mkdir()
    for index in range(10):
        np.savez(
            tmp_path / "data" / f"{index}.npz", image=normal(2, 3, 8, 8, seed=index)
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path
