"""quark-onnx compare: the error at each output, and the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.models import parse

COMPARE = ("compare", "model.onnx", "out.onnx", "--data", "data")


@pytest.fixture(autouse=True)
def quantized(cli: Any, folder: Path) -> None:
    assert cli("quantize", "model.onnx", "-o", "out.onnx", "--data", "data").code == 0


def test_table(cli: Any) -> None:
    finished = cli(*COMPARE)
    assert (finished.code, finished.err) == (0, "")
    header, row, *verdict = finished.out.splitlines()[-4:]
    assert verdict[0].startswith("verdict   good: classifier: ")
    assert verdict[1].split() == ["on", "20", "samples"]
    assert header.split("  ")[1:2] == ["output"]
    assert row.split()[0] == "scores"
    assert float(row.split()[1]) > 20
    assert "on 20 samples" in finished.out


def test_json(cli: Any) -> None:
    document = cli(*COMPARE, "--limit", "3", "--json").json
    assert list(document) == [
        "schema",
        "command",
        "reference",
        "other",
        "samples",
        "bytes_before",
        "bytes_after",
        "worst_sqnr",
        "outputs",
        "verdict",
        "warnings",
        "labelled",
        "scores",
        "latency",
        "engine",
    ]
    assert document["samples"] == 3
    assert document["outputs"][0]["name"] == "scores"


def test_analyze_gives_the_same_verdict(cli: Any) -> None:
    """In the text and in the JSON document."""
    lines = set[str]()
    for command in ("compare", "analyze"):
        (line,) = [
            line
            for line in cli(command, *COMPARE[1:]).out.splitlines()
            if line.startswith("verdict ")
        ]
        verdict = cli(command, *COMPARE[1:], "--json").json["verdict"]
        assert line == f"verdict   {verdict['band']}: {verdict['sentence']}"
        lines.add(line)
    assert len(lines) == 1


def test_swapped_models_are_an_error(cli: Any) -> None:
    finished = cli("compare", "out.onnx", "model.onnx", "--data", "data")
    assert finished.code == 2 and "the float model comes first" in finished.error


def test_the_same_model_has_no_error(cli: Any) -> None:
    assert (
        cli("compare", "model.onnx", "model.onnx", "--data", "data", "--json").json[
            "worst_sqnr"
        ]
        == "inf"
    )


def test_gate_shows_what_it_measured(cli: Any) -> None:
    finished = cli(*COMPARE, "--min-sqnr", "200", "--json")
    assert finished.code == 1
    assert finished.error.startswith("output 'scores' has ")
    assert finished.error.endswith("below --min-sqnr 200")
    error = finished.json["error"]
    assert (error["kind"], error["message"]) == ("AccuracyError", finished.error)
    assert [step["command"] for step in error["next_steps"]] == [
        "quark-onnx analyze model.onnx out.onnx --data data"
    ]
    assert finished.json["outputs"][0]["sqnr"] < 200
    assert "scores" in cli(*COMPARE, "--min-sqnr", "200").out
    assert cli(*COMPARE, "--min-sqnr", "20", "--quiet").out == ""


def test_integer_outputs_are_counted(cli: Any) -> None:
    onnx.save(parse("g (float[4] x) => (int64[1] y) { y = ArgMax (x) }"), "top.onnx")
    finished = cli("compare", "top.onnx", "top.onnx", "--random-data")
    assert finished.code == 0
    assert "100 % of the values agree" in finished.out


def test_bad_input(cli: Any) -> None:
    onnx.save(
        parse("g (float[2] x) => (float[2] other) { other = Relu (x) }"), "alien.onnx"
    )
    for arguments, words in (
        (["model.onnx", "absent.onnx", "--data", "data"], ["absent.onnx"]),
        (["model.onnx", "alien.onnx", "--data", "data"], ["lacks the output 'scores'"]),
        (["model.onnx", "--data", "data"], ["required: QUANT"]),
    ):
        finished = cli("compare", *arguments)
        assert finished.code == 2
        for word in words:
            assert word in finished.error


def test_labels_and_latency(cli: Any) -> None:
    rows = "".join(f"{index},{index % 4}\n" for index in range(20))
    Path("labels.csv").write_text(f"name,label\n{rows}", encoding="utf-8")
    options = ("--labels", "labels.csv")
    finished = cli(*COMPARE, *options, "--time", "--threads", "1")
    assert finished.code == 0
    assert "top-1: float " in finished.out and "on 20 labelled samples" in finished.out
    assert "time      float " in finished.out and "1 thread" in finished.out
    document = cli(*COMPARE, *options, "--json").json
    assert [score["name"] for score in document["scores"]] == ["top1", "top5"]
    assert document["labelled"] == 20 and document["latency"] is None
    written = ("quantize", "model.onnx", "-o", "labelled.onnx", "--data", "data")
    document = cli(*written, *options, "--json").json
    assert document["labelled"] == document["held_out"] == 1
    assert document["latency"]["runs"] >= 1
    assert cli(*written, "--no-time", "--json").json["latency"] is None


def test_an_engine_is_named_with_its_layers(cli: Any) -> None:
    finished = cli(*COMPARE, "--engine", "onnxruntime", "--provider", "cpu", "--json")
    engine = finished.json["engine"]
    assert engine["engine"].endswith(", CPU")
    assert engine["integer_layers"] == engine["layers"] > 0
    assert cli(*COMPARE, "--json").json["engine"] is None


@pytest.mark.parametrize(
    ("option", "name"), [("--engine", "tensorrtt"), ("--provider", "Nobody")]
)
def test_an_engine_that_is_not_there(cli: Any, option: str, name: str) -> None:
    finished = cli(*COMPARE, option, name)
    assert (finished.code, name in finished.err) == (2, True)
