"""Patterns of nodes: the same tensor under a name, either order, alternatives, inner tensors."""

from __future__ import annotations

import onnx
import pytest

from quark_onnx.graph import Graph
from quark_onnx.graph.pattern import Pattern, number, op, scalar, tensor

x = tensor("x")
silu = x * op("Sigmoid", x)
centered = (x - op("ReduceMean", x)).named("v")


@pytest.fixture
def graph() -> Graph:
    return Graph.of(
        onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        agraph (float[2] a, float[2] b) => (float[2] last, float[2] read_outside)
        <float one = {1}, float three = {3}> {
            gate = Sigmoid (a)
            silu = Mul (gate, a)
            other_gate = Sigmoid (b)
            other = Mul (a, other_gate)
            shifted = Add (one, silu)
            quotient = Div (three, b)
            mean = ReduceMean (b)
            centered = Sub (b, mean)
            squares = Mul (centered, centered)
            read_outside = Neg (mean)
            large, small = Split (shifted)
            last = Sum (small, other, quotient, squares)
        }
        """)
    )


@pytest.mark.parametrize(
    ("pattern", "result", "x"),
    [
        (silu, "silu", "a"),
        (silu, "other", None),  # the gate of another tensor
        (silu, "a", None),  # nothing computes it
        (x + 1, "shifted", "silu"),
        (1 + x, "shifted", "silu"),
        (x + 2, "shifted", None),
        (x + number(1.1, within=0.2), "shifted", "silu"),
        (x + scalar(), "shifted", "silu"),
        (x + 1, "silu", None),
        (3 / x, "quotient", "b"),
        (x / 3, "quotient", None),  # a Div has an order
        (silu + 1, "shifted", "a"),
        (x - 1 | 1 + x, "shifted", "silu"),
        (op({"Neg", "Sigmoid"}, x), "gate", "a"),
        (op("Split", x), "large", "shifted"),
        (op("Split", x), "small", None),  # a second result
        (op("Sigmoid", tensor("x", where=Graph.is_constant)), "gate", None),
        (op("Sigmoid", x, where=lambda graph, node: False), "gate", None),
        (op("Sigmoid", x, x), "gate", None),  # of one input
    ],
)
def test_match(graph: Graph, pattern: Pattern, result: str, x: str | None) -> None:
    match = pattern.match(graph, result)
    assert (match and match["x"]) == x


def test_a_named_pattern_is_one_tensor(graph: Graph) -> None:
    match = (centered * centered).match(graph, "squares", shared=True)
    assert match is not None
    assert (match["x"], match["v"]) == ("b", "centered")
    assert [node.kind for node in match.nodes] == ["Mul", "Sub", "ReduceMean"]


def test_inner_tensors_have_no_other_readers(graph: Graph) -> None:
    assert centered.match(graph, "centered") is None  # Neg reads the mean as well
    assert centered.match(graph, "centered", shared=True) is not None
    negated = op("Neg", op("ReduceMean", x))
    assert negated.match(graph, "read_outside") is None
    outputs = op("Abs", op("Neg", x))
    graph.add("Abs", ["read_outside"], ["magnitude"])
    assert outputs.match(graph, "magnitude") is None  # an inner tensor is an output


def test_known_tensors(graph: Graph) -> None:
    assert silu.match(graph, "silu", x="a") is not None
    assert silu.match(graph, "silu", x="b") is None
