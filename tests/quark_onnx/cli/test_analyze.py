"""quark-onnx analyze: the ranking, JSON, the page, and that every remedy is an option that there
is.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from quark_onnx.cli.dispatch import parse

ANALYZE = ("analyze", "model.onnx", "out.onnx", "--data", "data")


@pytest.fixture(autouse=True)
def quantized(cli: Any, folder: Path) -> None:
    quantize = (
        "quantize",
        "model.onnx",
        "-o",
        "out.onnx",
        "--data",
        "data",
        "--preset",
        "XINT8",
    )
    assert cli(*quantize).code == 0


def test_ranking(cli: Any) -> None:
    finished = cli(*ANALYZE)
    assert (finished.code, finished.err) == (0, "")
    lines = finished.out.splitlines()
    assert "error     on 20 samples:" in lines
    header = next(line for line in lines if line.startswith("  output"))
    assert re.split(" {2,}", header.strip()) == [
        "output",
        "SQNR, dB",
        "min / median / max of a sample",
        "cosine",
        "largest error",
        "step",
        "float values",
    ]
    cells = re.split(" {2,}", lines[lines.index(header) + 1].strip())
    assert cells[0] == "scores" and float(cells[1]) > 10
    # The steps of XINT8 are powers of two.
    assert math.log2(float(cells[5])) == pytest.approx(
        round(math.log2(float(cells[5]))), abs=0.01
    )
    assert " to " in cells[6]
    header = next(line for line in lines if line.startswith("  #"))
    assert header.split() == ["#", "tensor", "SQNR", "inputs", "alone"]
    assert any(line.endswith(" Gemm head, int8") for line in lines)
    assert any(line.endswith(" input of the model, int8") for line in lines)
    ranks = [line.split()[0] for line in lines if line[:3].strip().isdigit()]
    assert ranks == [str(place) for place in range(1, len(ranks) + 1)]
    assert any("-> " in line for line in lines)
    assert (
        len(
            [
                line
                for line in cli(*ANALYZE, "--top", "1").out.splitlines()
                if line[:3].strip().isdigit()
            ]
        )
        == 1
    )


def test_json(cli: Any) -> None:
    document = cli(*ANALYZE, "--limit", "3", "--json").json
    assert list(document)[:5] == [
        "schema",
        "command",
        "reference",
        "other",
        "worst_sqnr",
    ]
    assert (document["command"], document["samples"]) == ("analyze", 3)
    assert {"outputs", "tensors", "weights", "unmatched", "ranking"} <= document.keys()
    assert document["tensors"][0]["name"] == "image"
    assert {"w", "v"} <= {weight["name"] for weight in document["weights"]}


def test_every_remedy_is_an_option_of_quantize(cli: Any) -> None:
    found = cli(*ANALYZE, "--json").json
    causes = [cause for tensor in found["tensors"] for cause in tensor["causes"]]
    assert causes
    for options in {tuple(cause["options"]) for cause in causes}:
        parse(["quantize", "model.onnx", "-o", "new.onnx", "--data", "data", *options])


def test_page(cli: Any, folder: Path) -> None:
    lines = cli(*ANALYZE, "--html", "page.html").out.splitlines()
    assert ["page", "page.html"] in [line.split() for line in lines]
    text = (folder / "page.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert [path.name for path in folder.iterdir() if "page" in path.name] == [
        "page.html"
    ]


def test_the_page_never_replaces_a_model(cli: Any, folder: Path) -> None:
    shutil.copy("model.onnx", "model.html")
    before = (folder / "model.html").read_bytes()
    for arguments, words in (
        (
            ["model.html", "out.onnx", "--data", "data", "--html", "model.html"],
            "--html model.html is the input FLOAT itself",
        ),
        (
            ["model.onnx", "out.onnx", "--data", "data", "--html", "model.onnx"],
            "'model.onnx' is not named *.html",
        ),
        (
            ["model.onnx", "out.onnx", "--data", "data", "--html", "no/page.html"],
            "there is no folder 'no'",
        ),
    ):
        finished = cli("analyze", *arguments)
        assert finished.code == 2
        assert words in finished.error
    assert (folder / "model.html").read_bytes() == before


def test_bad_input(cli: Any) -> None:
    for arguments, words in (
        (["model.onnx", "absent.onnx", "--data", "data"], "absent.onnx"),
        (["model.onnx", "model.onnx", "--data", "data"], "it is not quantized"),
        (["out.onnx", "model.onnx", "--data", "data"], "it is not quantized"),
        (["model.onnx", "--data", "data"], "required: QUANT"),
        (
            ["model.onnx", "out.onnx"],
            "there is no data: give samples with --data PATH, or --random-data",
        ),
        (
            ["model.onnx", "out.onnx", "--data", "data", "--top", "0"],
            "not a whole number",
        ),
    ):
        finished = cli("analyze", *arguments)
        assert finished.code == 2
        assert words in finished.error
