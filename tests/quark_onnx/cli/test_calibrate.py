"""quark-onnx calibrate, and quantize --ranges."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import onnx
import pytest

CALIBRATE = ("calibrate", "model.onnx", "--data", "data", "-o", "ranges.json")
QUANTIZE = ("quantize", "model.onnx", "-o", "out.onnx")


def test_ranges_are_measured_once_and_used_without_data(cli: Any) -> None:
    finished = cli(*CALIBRATE)
    assert finished.code == 0
    lines = finished.out.splitlines()
    assert lines[0].startswith("model     model.onnx -> ranges.json, in ")
    assert lines[1].startswith("ranges ") and lines[1].endswith(" tensors, 20 samples")
    command = lines[2].removeprefix("next      quark-onnx ")
    assert command == "quantize model.onnx -o model_quantized.onnx --ranges ranges.json"
    assert cli(*shlex.split(command)).code == 0
    onnx.checker.check_model("model_quantized.onnx", full_check=True)
    for calibrator in ("minmax", "entropy"):
        finished = cli(*QUANTIZE, "--ranges", "ranges.json", "--calibrator", calibrator)
        assert finished.code == 0
        onnx.checker.check_model("out.onnx", full_check=True)


def test_the_next_command_repeats_the_preset(cli: Any) -> None:
    lines = cli(*CALIBRATE, "--preset", "XINT8").out.splitlines()
    command = lines[2].removeprefix("next      quark-onnx ")
    assert command.endswith("--preset XINT8")
    assert cli(*shlex.split(command)).code == 0


def test_json(cli: Any) -> None:
    document = cli(*CALIBRATE, "--json").json
    assert list(document) == [
        "schema",
        "command",
        "model",
        "output",
        "format",
        "seconds",
        "samples",
        "tensors",
    ]
    assert (document["format"], document["samples"]) == ("quark", 20)


def test_with_data_too_the_error_is_measured(cli: Any) -> None:
    cli(*CALIBRATE)
    finished = cli(*QUANTIZE, "--ranges", "ranges.json", "--data", "data", "--json")
    assert finished.json["worst_sqnr"] > 10


@pytest.mark.parametrize("kind", ["tensorrt", "onnxruntime"])
def test_caches_of_other_tools(cli: Any, kind: str) -> None:
    finished = cli(*CALIBRATE, "--format", kind, "--calibrator", "minmax")
    assert finished.code == 0
    assert cli(*QUANTIZE, "--ranges", "ranges.json").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*CALIBRATE[:4]], "the following arguments are required: -o/--output"),
        (
            [*CALIBRATE[:2], "-o", "r"],
            "give samples with --data PATH, or --random-data",
        ),
        (
            [*CALIBRATE[:4], "-o", "model.onnx"],
            "--output model.onnx is the input MODEL itself",
        ),
        ([*CALIBRATE[:4], "-o", "no/where/"], "cannot be written"),
        ([*CALIBRATE, "--format", "trt"], "'trt'"),
        ([*CALIBRATE, "--config", "W8"], "config measures no activation"),
        ([*CALIBRATE, "--calibrator", "minmx"], "did you mean 'minmax'"),
        ([*QUANTIZE, "--ranges", "absent.json"], "ranges absent.json cannot be read"),
        ([*QUANTIZE, "--ranges", "model.onnx"], "ranges model.onnx"),
    ],
)
def test_bad_input(cli: Any, folder: Path, arguments: list[str], words: str) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    finished = cli(*arguments)
    assert finished.code == 2 and words in finished.error
    after = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert before == after
