"""moved_codes: pairs after operators that only move values are left out for OpenVINO."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx.graph import Graph
from quark_onnx.writing.moved_codes import drop_moved_pairs
from tests.models import normal, parse, run

SAME = "s, z"
MOVES = {
    "Concat": "m = Concat <axis = 1> (d, e)",
    "MaxPool": "m = MaxPool <kernel_shape = [2, 2]> (d)",
    "Resize": 'm = Resize <mode = "nearest"> (d, , scales)',
    "chain": "k = Transpose <perm = [0, 1, 3, 2]> (d) m = Concat <axis = 1> (k, e)",
}
OTHERS = {
    "interpolation": 'm = Resize <mode = "linear"> (d, , scales)',
    "arithmetic": "m = Add (d, e)",
    "average": "m = AveragePool <kernel_shape = [2, 2]> (d)",
    "one float": "m = Concat <axis = 1> (d, x)",
    "another scale": "m = Concat <axis = 1> (d, f)",
}


def network(move: str, after: str = SAME, output: str = "") -> ModelProto:
    """Two tensors on one grid, a third on another, and a pair after a move of them."""
    text = f"""g (float[1,2,4,4] x) => (y{output}) {{
        p = QuantizeLinear (x, s, z)  d = DequantizeLinear (p, s, z)
        n = Neg (x)
        q = QuantizeLinear (n, s2, z2)  e = DequantizeLinear (q, s2, z2)
        o = QuantizeLinear (n, t, z)  f = DequantizeLinear (o, t, z)
        {move}
        c = QuantizeLinear (m, {after})  r = DequantizeLinear (c, {after})
        y = Abs (r)
    }}"""
    constants = {
        "s": np.float32(0.05),
        "z": np.uint8(128),
        "s2": np.float32(0.05),
        "z2": np.uint8(128),
        "t": np.float32(0.04),
        "u": np.uint8(127),
        "scales": np.float32([1, 1, 2, 2]),
    }
    used = {name: value for name, value in constants.items() if _reads(text, name)}
    model = parse(text, **used)
    for value in model.graph.output:
        value.type.tensor_type.elem_type = 1
    return model


def _reads(text: str, name: str) -> bool:
    return f" {name})" in text or f" {name}," in text


def dropped(model: ModelProto) -> ModelProto:
    graph = Graph.of(model)
    drop_moved_pairs(graph)
    graph.drop_unused()
    return graph.to_model()


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_values_are_the_same_without_the_pair(move: str) -> None:
    model = network(move)
    found = dropped(model)
    assert not any("r" in node.output for node in found.graph.node)
    feeds = {"x": normal(1, 2, 4, 4, seed=5)}
    np.testing.assert_array_equal(run(found, feeds), run(model, feeds))


@pytest.mark.parametrize("move", OTHERS.values(), ids=OTHERS)
def test_a_pair_that_rounds_stays(move: str) -> None:
    model = network(move)
    assert "c" in {name for node in dropped(model).graph.node for name in node.output}


@pytest.mark.parametrize("after", ["t, z", "s, u"])
def test_a_pair_of_other_codes_stays(after: str) -> None:
    model = network(MOVES["MaxPool"], after)
    assert "c" in {name for node in dropped(model).graph.node for name in node.output}


def test_a_rounded_output_keeps_its_pair() -> None:
    model = network(MOVES["MaxPool"], output=", r")
    found = dropped(model)
    feeds = {"x": normal(1, 2, 4, 4, seed=5)}
    for value, expected in zip(run(found, feeds), run(model, feeds), strict=True):
        np.testing.assert_array_equal(value, expected)
