"""quantize --recipe and --accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

QUANTIZE = ("quantize", "model.onnx", "--data", "data", "-o", "out.onnx")


def test_the_recipe_is_named(cli: Any) -> None:
    finished = cli(*QUANTIZE, "--recipe", "auto")
    assert finished.code == 0
    (line,) = [line for line in finished.out.splitlines() if line.startswith("recipe ")]
    assert line.split()[1].rstrip(":") in ("classifier", "superres") and ":" in line
    document = cli(*QUANTIZE, "--recipe", "detector", "--json").json
    assert document["recipe"] == "detector"
    assert document["config"]["optimizers"] == [
        "cle",
        "bias_correction",
    ]


def test_an_accuracy_that_is_reached(cli: Any) -> None:
    finished = cli(*QUANTIZE, "--accuracy", "10dB")
    assert finished.code == 0
    assert "target    10 dB at every output" in finished.out
    assert "5 judge, and calibrate nothing" in finished.out
    assert "tried " in finished.out and " met" in finished.out
    (time,) = [line for line in finished.out.splitlines() if line.startswith("time ")]
    assert "float " in time and "quantized " in time and "threads" in time
    onnx.checker.check_model("out.onnx", full_check=True)


def test_an_accuracy_that_is_missed(cli: Any) -> None:
    finished = cli(*QUANTIZE, "--accuracy", "500dB", "--budget", "1/1000000", "--json")
    assert finished.code == 1 and Path("out.onnx").exists()
    assert "no configuration reaches 500 dB" in finished.error
    accuracy = finished.json["accuracy"]
    assert not accuracy["reached"] and len(accuracy["attempts"]) == 1
    assert accuracy["best"] == "A8W8" and "A16W8" in accuracy["left"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "detektor"], "'detektor'"),
        (["--recipe", "auto", "--preset", "A8W8"], "not allowed with"),
        (["--accuracy", "good"], "accuracy is 'good'; it must be a loss such as 1%"),
        (["--accuracy", "1%", "--preset", "XINT8"], "leave out --preset"),
        (["--accuracy", "1%", "--optimize", "cle"], "leave out --optimize"),
        (["--accuracy", "1%", "--per-tensor"], "leave out --per-tensor"),
        (["--accuracy", "1%", "--no-equalize"], "leave out --no-equalize"),
        (["--accuracy", "1%", "--unsafe"], "leave out --unsafe"),
        (["--accuracy", "1%", "--labels", "l.csv"], "--labels does not go with"),
        (["--budget", "5m", "--advice", "none"], "--budget is for --accuracy"),
    ],
)
def test_bad_input(cli: Any, arguments: list[str], words: str) -> None:
    finished = cli(*QUANTIZE, *arguments)
    assert finished.code == 2 and words in finished.error
    assert not Path("out.onnx").exists()
