"""quark-onnx npu check: findings as text and JSON, and the exit code."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from tests.models import parse


def still() -> None:
    """The model of the folder with a batch of 1."""
    model = onnx.load("model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, "still.onnx")


def test_a_model_with_errors(cli: Any) -> None:
    finished = cli("npu", "check", "model.onnx", "--target", "stx")
    assert finished.code == 1 and finished.error.endswith("rules of stx are broken")
    first, *rest = finished.out.splitlines()
    assert first.startswith("float model for stx: ")
    assert any(line.startswith("error G3 at first: ") and "strides" in line for line in rest)
    assert any("error G1: input 'image' has the shape ['N', 3, 8, 8] (shapes are static)" in line for line in rest)


def test_json(cli: Any) -> None:
    document = cli("npu", "check", "model.onnx", "--json").json
    assert (document["command"], document["action"], document["target"], document["kind"]) == (
        "npu",
        "check",
        "npu",
        "float",
    )
    assert document["errors"] == sum(each["severity"] == "error" for each in document["findings"]) > 0
    assert {tuple(each) for each in document["findings"]} == {
        ("rule", "node", "figures", "severity", "title", "source", "sure", "mend")
    }


def test_what_quantize_makes_for_a_target_passes(cli: Any) -> None:
    still()
    made = cli("quantize", "still.onnx", "-o", "out.onnx", "--config", "XINT8", "--target", "stx", "--random-data", "4")
    assert made.code == 0, made.err
    finished = cli("npu", "check", "out.onnx", "--target", "stx")
    rest = [line for line in finished.out.splitlines()[1:] if " G6: " not in line]
    assert finished.out.startswith("XINT8 model for stx") and not rest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("npu", "check", "nothing.onnx"), "nothing.onnx"),
        (("npu", "check", "model.onnx", "--target", "stz"), "unknown target 'stz'; did you mean 'stx'"),
        (("npu", "mend", "model.onnx"), "mend"),
        (("npu",), "check"),
        (
            ("quantize", "model.onnx", "-o", "o.onnx", "--data", "data", "--target", "pentium"),
            "unknown target 'pentium'",
        ),
    ],
)
def test_bad_input(cli: Any, arguments: tuple[str, ...], words: str) -> None:
    finished = cli(*arguments)
    assert finished.code == 2 and words in finished.err and "Traceback" not in finished.err


def test_a_model_that_passes(cli: Any) -> None:
    onnx.save(parse("g (float[1,2] x) => (float[1,2] y) { y = Relu (x) }"), "relu.onnx")
    finished = cli("npu", "check", "relu.onnx")
    assert (finished.code, finished.err, finished.out) == (0, "", "float model for npu: 0 errors, 0 warnings\n")
