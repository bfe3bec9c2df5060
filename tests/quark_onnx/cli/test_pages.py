"""Commands with --html write a page that stands alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser import check_alone

QUANTIZE = "quantize model.onnx -o q.onnx --data data --no-time --html page.html"


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        (QUANTIZE, ["Quantization", "model.onnx → q.onnx", "Settings", "Outputs"]),
        (
            "compare model.onnx q.onnx --data data --html page.html",
            ["Comparison", "model.onnx → q.onnx", "run by both models"],
        ),
        (
            "explain model.onnx --html page.html",
            ["Quantization plan", "would be quantized", "Nodes"],
        ),
        (
            "npu deploy model.onnx -o bundle --data data --min-sqnr 0 --html page.html",
            ["What the NPU will run", "Outputs", "Legalization"],
        ),
        (
            "npu preflight model.onnx --preset XINT8 --html page.html",
            ["What the NPU will run"],
        ),
        (
            "search model.onnx --data data --trials 1 --html page.html",
            ["Search for a configuration"],
        ),
    ],
    ids=["quantize", "compare", "explain", "deploy", "preflight", "search"],
)
def test_page(cli: Any, folder: Path, command: str, texts: list[str]) -> None:
    if "compare" in command:
        assert cli(*QUANTIZE.split()).code == 0
    finished = cli(*command.split())
    assert finished.code == 0, finished.err
    assert finished.out.splitlines().count("page      page.html") == 1
    text = Path("page.html").read_text(encoding="utf-8")
    check_alone(text)
    for part in texts:
        assert part in text


def test_accuracy_has_a_page_and_no_advice(cli: Any, folder: Path) -> None:
    words = ["quantize", "model.onnx", "-o", "q.onnx", "--data", "data", "--no-time"]
    words += ["--accuracy", "5dB"]
    finished = cli(*words, "--html", "page.html")
    assert finished.code == 0, finished.err
    check_alone(Path("page.html").read_text(encoding="utf-8"))
    finished = cli(*words, "--advice", "try")
    assert finished.code == 2 and "leave out --advice" in finished.err
