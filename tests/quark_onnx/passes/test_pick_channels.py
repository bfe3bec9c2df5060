"""A channel shuffle whose halves are picked becomes a Gather of channels each; others stay."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import quantize
from quark_onnx.graph import Graph
from quark_onnx.passes import pick_channels
from tests.models import kinds, normal, parse, run, samples, weight

FASTEST = """a = Reshape (x, split) t = Transpose <perm = [1,0,2]> (a) b = Reshape (t, halves)
    left = Gather <axis = 0> (b, zero) right = Gather <axis = 0> (b, one)"""


def shuffled(shape: str = "1,8,4,6", body: str = FASTEST) -> ModelProto:
    """The halves of a tensor, as FastestDet takes them, of which one passes a convolution."""
    return parse(
        f"g (float[{shape}] x) => (float[a,b,c,d] y, float[e,f,g,h] right) {{ {body} y"
        " = Conv (left, w) }",
        split=np.int64([4, 2, 24]),
        halves=np.int64([2, 1, 4, 4, 6]),
        zero=np.int64(0),
        one=np.int64(1),
        w=weight(4, 4, 1, 1),
    )


def test_every_second_channel() -> None:
    model = shuffled()
    graph = Graph.of(model)
    graph.infer()
    assert pick_channels(graph) == 2
    assert sorted(kinds(graph.to_model())) == ["Conv", "Gather", "Gather"]
    x = normal(1, 8, 4, 6)
    _, right = run(graph.to_model(), {"x": x})
    np.testing.assert_array_equal(right, x[:, 1::2])
    for found, expected in zip(
        run(graph.to_model(), {"x": x}), run(model, {"x": x}), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


OTHERS = {
    "an open batch": ("N,8,4,6", FASTEST),
    "rows, not channels": (
        "1,8,4,6",
        FASTEST.replace("perm = [1,0,2]", "perm = [2,0,1]"),
    ),
    "no Transpose": (
        "1,8,4,6",
        FASTEST.replace("t = Transpose <perm = [1,0,2]> (a)", "t = Identity (a)"),
    ),
    "an index out of range": ("1,8,4,6", FASTEST),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_stays(name: str) -> None:
    graph = Graph.of(shuffled(*OTHERS[name]))
    if name == "an index out of range":
        graph.set_constant("zero", np.int64(2))
        graph.set_constant("one", np.int64(-3))
    graph.infer()
    assert pick_channels(graph) == 0


def test_in_a_run() -> None:
    model = shuffled()
    result = quantize(model, samples(model, 4), "A8W8")
    assert "Transpose" not in kinds(result.model) and result.report.worst_sqnr > 25
