"""Static shapes: inputs, all that is computed, and names that stand in several places.

The function stays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx.check.static_shapes import fixed
from quark_onnx.common.errors import ConfigError
from quark_onnx.graph import Graph
from tests.models import normal, parse, run, weight

TEXT = """g (float[N,3,H,W] x, float[N,S] t) => (float[N,4,A,B] y, float[N,S] u)
    { c = Conv <strides = [2, 2]> (x, w) y = Relu (c) u = Neg (t) }"""


def graph() -> Graph:
    return Graph.of(parse(TEXT, w=weight(4, 3, 3, 3)))


def test_shapes_of_everything_are_known_and_the_function_stays() -> None:
    before = graph()
    after, notes = fixed(before, {"x": [1, 3, 9, 11], "t": [1, 7]})
    assert notes == [
        "input 'x' has the shape [1, 3, 9, 11]",
        "input 't' has the shape [1, 7]",
    ]
    assert [after.shape(name) for name in "xtcyu"] == [
        (1, 3, 9, 11),
        (1, 7),
        (1, 4, 4, 5),
        (1, 4, 4, 5),
        (1, 7),
    ]
    onnx.checker.check_model(after.to_model(), full_check=True)
    feeds = {"x": normal(1, 3, 9, 11), "t": normal(1, 7)}
    for expected, found in zip(
        run(before.to_model(), feeds), run(after.to_model(), feeds), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    assert fixed(after) == (after, []), "there is nothing left to do"


def test_a_batch_is_one_and_other_dimensions_stay() -> None:
    after, _ = fixed(graph())
    assert (
        after.shape("x") == (1, 3, "H", "W")
        and after.shape("t") == (1, "S")
        and after.shape("u") == (1, "S")
    )


def test_a_name_has_one_size_wherever_it_stands() -> None:
    model = parse("g (float[B,L] x, float[B,L] t) => (float[B,L] y) { y = Add (x, t) }")
    after, _ = fixed(Graph.of(model), {"x": [2, 5]})
    assert after.shape("t") == after.shape("y") == (2, 5)


def test_what_has_no_name_is_learned() -> None:
    model = parse(
        "g (float[N,8] x) => (float[N,2] y) { r = Reshape (x, s) y = ReduceSum"
        " <keepdims = 0> (r, a) }"
    )
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(value, np.int64), name)
        for name, value in (("s", [-1, 2, 4]), ("a", [2]))
    )
    model.graph.output[0].type.tensor_type.shape.dim[0].ClearField("dim_param")
    assert fixed(Graph.of(model))[0].shape("y") == (1, 2)


def test_initializers_are_not_fed() -> None:
    model = parse(
        "g (float[1,3] x, float[3] w) => (float[1,3] y) { y = Add (x, w) }", w=normal(3)
    )
    after, notes = fixed(Graph.of(model))
    assert [value.name for value in after.to_model().graph.input] == [
        "x"
    ] and notes == ["input 'w' is a constant"]
    assert after.is_constant("w")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": [1]}, "no input 'z'"),
        ({"xx": [1]}, "no input 'xx'; did you mean 'x'"),
        (
            {"t": [1, 2, 3]},
            "shape of 't' has 3 dimensions, the input has 2: .*'N', 'S'",
        ),
        (
            {"x": [1, 4, 9, 9]},
            r"shape of 'x' is \[1, 4, 9, 9\], but the input has 3 for 4",
        ),
        ({"x": [1, 3, 9, 9], "t": [2, 7]}, "but the input has N = 1 for 2"),
        ({"t": [1, 0]}, "whole numbers of 1 or more"),
        ({"t": [1, 2.0]}, "whole numbers of 1 or more"),
        ({"t": [True, 2]}, "whole numbers of 1 or more"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(shapes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fixed(graph(), shapes)


def test_outputs_with_open_sizes_get_those_that_follow_from_the_inputs() -> None:
    text = """g (float[1,3,9,11] x) => (float[N,4,A,B] y, float[1,M] z)
        { y = Conv (x, w) n = NonZero (x) z = Cast <to = 1> (n) }"""
    after, notes = fixed(Graph.of(parse(text, w=weight(4, 3, 3, 3))))
    assert notes == ["output 'y' has the shape [1, 4, 7, 9]"] and after.shape("y") == (
        1,
        4,
        7,
        9,
    )
    assert after.shape("z") == (
        1,
        "M",
    ), "what depends on values stays as it was declared"
    assert fixed(after) == (after, [])


def test_an_output_without_a_shape_gets_one() -> None:
    model = parse("g (float[1,3] x) => (float[1,3] y) { y = Relu (x) }")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    after, notes = fixed(Graph.of(model))
    assert notes == ["output 'y' has the shape [1, 3]"] and after.shape("y") == (1, 3)
