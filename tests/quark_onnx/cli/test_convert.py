"""quark-onnx convert: files, notes, JSON, exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from tests.models import parse, run, weight


def test_conversions_in_order(cli: Any, folder: Path) -> None:
    before = Path("model.onnx").read_bytes()
    done = cli(
        "convert",
        "model.onnx",
        "-o",
        "out.onnx",
        "--to",
        "fixed-shapes",
        "float16",
        "--shape",
        "image=2,3,8,8",
    )
    assert (done.code, done.err) == (0, "")
    assert (
        "fixed-shapes: input 'image' has the shape [2, 3, 8, 8]" in done.out
        and "became float16" in done.out
    )
    model = onnx.load("out.onnx")
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [
        2,
        3,
        8,
        8,
    ]
    assert {tensor.data_type for tensor in model.graph.initializer} == {
        TensorProto.FLOAT16
    }
    assert Path("model.onnx").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == [
        "data",
        "model.onnx",
        "out.onnx",
    ]


def test_nothing_to_convert(cli: Any) -> None:
    for to in ("without-qdq", "qdq-to-qoperator", "float32", "standard-qdq", "s8s8"):
        done = cli("convert", "model.onnx", "-o", "out.onnx", "--to", to)
        assert (
            done.code == 0 and f"warning: {to}: there is nothing to convert" in done.err
        ), to
        assert onnx.load("out.onnx") == onnx.load("model.onnx")


def test_json(cli: Any) -> None:
    document = cli(
        "convert", "model.onnx", "-o", "out.onnx", "--to", "float16", "--json"
    ).json
    assert list(document) == [
        "schema",
        "command",
        "model",
        "output",
        "bytes_before",
        "bytes_after",
        "steps",
    ]
    [step] = document["steps"]
    assert (step["name"], step["keeps"]) == ("float16", "no") and step["outputs"][0][
        "sqnr"
    ] > 40
    assert document["bytes_after"] < document["bytes_before"]


def test_a_quantized_model(cli: Any) -> None:
    assert (
        cli(
            "quantize",
            "model.onnx",
            "-o",
            "int8.onnx",
            "--data",
            "data",
            "--preset",
            "A8W8",
        ).code
        == 0
    )
    sample = {"image": np.load("data/0.npz")["image"]}
    expected = run(onnx.load("int8.onnx"), sample)[0]
    assert cli("convert", "int8.onnx", "-o", "s8.onnx", "--to", "s8s8").code == 0
    np.testing.assert_array_equal(run(onnx.load("s8.onnx"), sample)[0], expected)
    assert (
        cli("convert", "int8.onnx", "-o", "float.onnx", "--to", "without-qdq").code == 0
    )
    assert (
        np.abs(run(onnx.load("float.onnx"), sample)[0] - expected).max()
        < 0.05 * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "flot16"], "unknown conversion 'flot16'; did you mean 'float16'?"),
        (["--to", "opset"], "--opset 17"),
        (["--to", "opset", "--opset", "x"], "'x' is not a whole number"),
        (["--to", "float16", "--opset", "17"], "which only opset reads"),
        (
            ["--to", "fixed-shapes", "--shape", "1,3"],
            "'1,3' is not of the form NAME=1,3,224,224",
        ),
        (
            ["--to", "fixed-shapes", "--shape", "imag=1,3,8,8"],
            "the model has no input 'imag'; did you mean 'image'?",
        ),
        ([], "--to"),
    ],
)
def test_bad_input(cli: Any, arguments: list[str], words: str) -> None:
    done = cli("convert", "model.onnx", "-o", "out.onnx", *arguments)
    assert done.code == 2 and words in done.error and not Path("out.onnx").exists()


@pytest.mark.parametrize("output", ["model.onnx", "data"])
def test_outputs_that_must_not_be_replaced(cli: Any, output: str) -> None:
    assert cli("convert", "model.onnx", "-o", output, "--to", "float16").code == 2


def test_broken_models(cli: Any) -> None:
    Path("broken.onnx").write_bytes(b"\x00\x01")
    for model in ("broken.onnx", "nothing.onnx"):
        done = cli("convert", model, "-o", "out.onnx", "--to", "float16")
        assert done.code == 2 and model in done.error and not Path("out.onnx").exists()


@pytest.mark.parametrize(
    "to",
    ["float16", "shared-initializers", "unique-initializers", "bfloat16", "float32"],
)
def test_external_data_stays_external(cli: Any, to: str) -> None:
    model = parse(
        "g (float[N,64] x) => (float[N,64] y) { h = MatMul (x, w) y = MatMul (h, w) }",
        w=weight(64, 64),
    )
    onnx.save(
        model,
        "far.onnx",
        save_as_external_data=True,
        location="far.bin",
        size_threshold=0,
    )
    before = Path("far.bin").read_bytes()
    done = cli("convert", "far.onnx", "-o", "out.onnx", "--to", to)
    assert done.code == 0, done.err
    assert Path("far.bin").read_bytes() == before and Path("out.onnx.data").exists()
    x = {"x": np.ones((1, 64), np.float32)}
    result = onnx.load("out.onnx")
    assert numpy_helper.to_array(result.graph.initializer[0]).size == 64 * 64
    if to != "bfloat16":
        np.testing.assert_allclose(
            run(result, x)[0], run(model, x)[0], rtol=1e-2, atol=1e-2
        )


def test_an_output_beside_the_weights_of_the_input(cli: Any) -> None:
    model = parse(
        "g (float[N,64] x) => (float[N,64] y) { y = MatMul (x, w) }", w=weight(64, 64)
    )
    onnx.save(
        model,
        "far.onnx",
        save_as_external_data=True,
        location="out.onnx.data",
        size_threshold=0,
    )
    assert (
        "holds weights of the input"
        in cli("convert", "far.onnx", "-o", "out.onnx", "--to", "float16").error
    )


def test_the_list_has_them(cli: Any) -> None:
    rows = cli("list", "conversions", "--json").json["conversions"]
    assert {row["keeps_function"] for row in rows} == {
        "exactly",
        "but for rounding",
        "no",
    }
