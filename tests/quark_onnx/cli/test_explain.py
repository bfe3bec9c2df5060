"""quark-onnx explain: the plan, without data."""

from __future__ import annotations

from typing import Any

import onnx

from tests.models import branches, parse


def test_text(cli: Any) -> None:
    finished = cli(
        "explain",
        "model.onnx",
        "--preset",
        "A16W8",
        "--per-tensor",
        "--exclude",
        "head",
    )
    assert (finished.code, finished.err) == (0, "")
    assert "plan      4 of 5 nodes would be quantized" in finished.out
    assert "below     each node with the tensors that it reads (<)" in finished.out
    assert "head (Gemm)  float: excluded" in finished.out
    assert "  < image: quantize uint16 asymmetric" in finished.out
    assert "  < bias: bias of image and w" in finished.out


def test_bodies_are_planned(cli: Any) -> None:
    onnx.save(branches(), "branches.onnx")
    out = cli("explain", "branches.onnx").out
    assert "plan      3 of 3 nodes would be quantized: MatMul 2/2, Relu 1/1" in out
    assert "\n\nin then_branch of if:\n" in out and "\n\nin else_branch of if:\n" in out
    document = cli("explain", "branches.onnx", "--json").json
    operators = [node["operator"] for node in document["nodes"]]
    assert operators == ["MatMul", "If", "MatMul", "Relu"]
    quantized = cli(
        "quantize", "branches.onnx", "-o", "q.onnx", "--random-data", "--json"
    ).json
    assert quantized["operators"] == document["operators"]


def test_json(cli: Any) -> None:
    document = cli("explain", "model.onnx", "--per-channel", "--json").json
    assert list(document) == [
        "schema",
        "command",
        "model",
        "config",
        "quantized_nodes",
        "operators",
        "kept_nodes",
        "nodes",
    ]
    assert (document["command"], document["quantized_nodes"]) == ("explain", 5)
    nodes = {node["name"]: node for node in document["nodes"]}
    assert [list(node) for node in nodes.values()] == [
        ["name", "operator", "float", "inputs", "outputs"]
    ] * 5
    assert [
        (tensor["tensor"], tensor["decision"]) for tensor in nodes["first"]["inputs"]
    ] == [
        ("image", "quantize"),
        ("w", "quantize"),
        ("bias", "bias"),
    ]
    assert nodes["first"]["outputs"] == [
        {"tensor": "a", "decision": "float", "detail": "fused into clip (Relu)"},
    ]
    assert nodes["flat"]["outputs"][0] == {
        "tensor": "d",
        "decision": "same_as",
        "detail": "same as c",
    }


def test_tensors_nobody_asks_for_have_a_reason(cli: Any) -> None:
    text = "g (float[2,2] x, int64[2] i) => (float y, int64[2] j) { y = Det (x) \n j = Neg (i) }"
    onnx.save(parse(text), "float.onnx")
    determinant, negative = cli("explain", "float.onnx", "--json").json["nodes"]
    assert determinant["float"] == "no quantization rule for this operator"
    assert determinant["inputs"] == [
        {"tensor": "x", "decision": "float", "detail": "nothing asks for it"}
    ]
    assert negative["inputs"] == [
        {"tensor": "i", "decision": "float", "detail": "its type is int64"}
    ]


def test_preparation_is_part_of_the_plan(cli: Any) -> None:
    onnx.save(
        parse(
            "g (float[2] x) => (float[2] y) { [id] z = Identity (x) \n [act] y = Relu (z) }"
        ),
        "id.onnx",
    )
    names = [
        [
            node["name"]
            for node in cli("explain", "id.onnx", "--json", *options).json["nodes"]
        ]
        for options in ((), ("--no-prepare",))
    ]
    assert names == [["act"], ["id", "act"]]
    assert cli("explain", "id.onnx", "--exclude", "id").code == 0, (
        "a pattern may name what preparation removes"
    )


def test_bad_input(cli: Any) -> None:
    for arguments, word in (
        (["absent.onnx"], "absent.onnx"),
        (["model.onnx", "--exclude", "heat"], "did you mean 'head'"),
        (["model.onnx", "--data", "data"], "unknown option '--data'"),
    ):
        finished = cli("explain", *arguments)
        assert finished.code == 2
        assert word in finished.error
