"""Questions about the nodes around a tensor."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from quark_onnx.graph import Graph
from quark_onnx.graph.matching import (
    constant_number,
    constant_operand,
    is_along_last_axis,
    only_reader,
    only_use,
    other_input,
)


@pytest.fixture
def graph() -> Graph:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        agraph (float[2] x) => (float[2] y, float[2] z) {
            one = Constant <value = float {1.0}> ()
            a = Add (x, one)
            b = Mul (a, a)
            y = Relu (b)
            z = Sigmoid (y)
        }
    """)
    graph = Graph.of(model)
    graph.add_constant("pair", np.array([1.0, 2.0], np.float32))
    graph.add_constant("number", np.array([[0.5]], np.float32))
    return graph


@pytest.mark.parametrize(
    ("tensor", "kind", "expected"),
    [
        ("b", "Relu", "Relu"),
        ("b", "Sigmoid", None),
        ("a", "Mul", None),  # read twice
        ("y", "Sigmoid", None),  # an output, too
        ("z", "Relu", None),  # read by no node
    ],
)
def test_only_use(graph: Graph, tensor: str, kind: str, expected: str | None) -> None:
    node = only_use(graph, tensor, kind)
    assert (node.kind if node is not None else None) == expected


def test_only_reader_of_an_output(graph: Graph) -> None:
    reader = only_reader(graph, "y")
    assert reader is not None
    assert reader.kind == "Sigmoid"
    assert only_reader(graph, "z") is None


def test_other_input(graph: Graph) -> None:
    (node,) = graph.nodes_of({"Add"})
    assert other_input(node, "x") == "one"
    assert other_input(node, "one") == "x"


def test_constant_number(graph: Graph) -> None:
    assert constant_number(graph, "number") == 0.5
    assert constant_number(graph, "pair") is None
    assert constant_number(graph, "x") is None


def test_constant_operand(graph: Graph) -> None:
    graph.add("Add", ["pair", "new"], ["sum"])
    added = constant_operand(graph, "new", "Add")
    assert added is not None
    assert (added.node.outputs[0], added.index) == ("sum", 0)
    assert added.sizes(graph) == (2,)
    assert constant_operand(graph, "new", "Mul") is None
    graph.add("Add", ["sum", "b"], ["computed"])
    assert constant_operand(graph, "sum", "Add") is None


@pytest.mark.parametrize(
    ("axis", "expected"), [(None, True), (-1, True), (1, True), (0, False), (2, False)]
)
def test_is_along_last_axis(graph: Graph, axis: int | None, expected: bool) -> None:
    graph.add_constant("matrix", np.zeros((2, 3), np.float32))
    attributes = {} if axis is None else {"axis": axis}
    node = graph.add("Softmax", ["matrix"], ["s"], **attributes)
    assert is_along_last_axis(graph, node, -1) == expected
