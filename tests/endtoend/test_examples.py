"""Every example runs, and prints the results that its text names."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_bundle_for_ryzen_ai(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["deploy.py", str(tmp_path / "bundle")])
    runpy.run_path(
        str(ROOT / "examples" / "ryzen_ai" / "deploy.py"), run_name="__main__"
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"bundle    XINT8 model for stx in {tmp_path / 'bundle'}"
    float_, quantized = (
        float(line.split()[-1]) for line in lines if line.startswith("accuracy of")
    )
    assert float_ == pytest.approx(0.9889, abs=1e-4) and quantized >= float_ - 0.01
    assert (tmp_path / "bundle" / "compare.py").is_file()
