"""The benchmark of large language models runs, small, and judges what it measures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")
FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the benchmarks are not part of this distribution")


@pytest.mark.slow
def test_a_small_model(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "llm_large.py"), "--layers", "1", "--hidden", "256", "--busy"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "llm_large.json").read_text("utf-8"))
    assert set(found) == {"1 × 256, uint4_wo_128", "1 × 256, fp8"}
    count = 2 * 32_000 * 256 + 256 * 256 * 2 + 2 * 64 * 256 + 3 * 256 * 704 + 3 * 256
    for row in found.values():
        assert 0 <= row["source"] - 2 * count < 5_000
        assert row["seconds"] > 0 and 100 < row["peak_mb"] < 6000 and row["size"] < row["source"]
    assert done.stdout.startswith("| model ") and not (tmp_path / "llm_large.md").exists()


def test_what_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark = importlib.import_module("llm_large")
    good = benchmark.Run(10.0, 900.0, 500, 19.0, 500.0, 260)
    assert benchmark.complaints(good, busy=False) == []
    assert benchmark.complaints(replace(good, peak_mb=6001.0, said_mb=6000.0), busy=True) == [
        "6001 MB are more than 6000"
    ]
    for change, word in (
        ({"seconds": 40.0}, "time: 40, and 19"),
        ({"seconds": 9.0}, "time"),
        ({"peak_mb": 240.0}, "memory"),
        ({"size": 900}, "disk"),
    ):
        (found,) = benchmark.complaints(replace(good, **change), busy=False)
        assert found.startswith(word)
    assert benchmark.complaints(replace(good, seconds=40.0), busy=True) == []


def test_what_is_more_than_chance_over_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    draws = importlib.import_module("draws")

    def rows(tool: str, *values: float) -> dict[str, dict[str, float]]:
        return {f"resnet20/{tool}/plain/{draw}": {"value": v, "sqnr": v / 4} for draw, v in enumerate(values)}

    unlucky = rows("ours", 91.0, 92.0, 91.0) | rows("amd-quark", 91.5, 91.5, 91.5)
    text, worse = draws.report(unlucky, ["resnet20"])
    assert "-0.17 ± 0.33" in text and not worse
    text, worse = draws.report(rows("ours", 91.0, 91.1, 90.9) | rows("amd-quark", 91.5, 91.5, 91.5), ["resnet20"])
    assert worse == ["resnet20 plain ours: -0.50 ± 0.06"]
    assert "ours: -0.50 points of top-1, -0.12 dB of SQNR, which is higher in 0 of 3 models" in text
    text, worse = draws.report(rows("ours", 91.0), ["resnet20"])
    assert not worse and "ours: not measured" in text
