"""Every preset with every spelling of a constant: a weight is a weight, however the file writes it
down.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from calibrators.onnx_runtime.session import open_session
from calibrators.onnx_runtime.tensors import initializers
from quark_onnx import QConfig, quantize
from quark_onnx.api import Result
from quark_onnx.common.registry import PRESETS
from tests.models import Feeds, interface, normal, parse, weight
from tests.models import samples as draw
from tests.settings import portable

SIZE = 32
FIRST, SECOND, BIAS = (
    weight(SIZE, SIZE),
    weight(SIZE, SIZE, seed=1),
    normal(SIZE, scale=0.1),
)
WEIGHTS = {"w": FIRST, "b": BIAS, "v": SECOND}
#: Which spelling has to come out as which other one.
SPELLINGS = {
    "input": "initializer",
    "constant": "initializer",
    "function": "initializer",
    "constants inside": "initializers inside",
    "rearranged inside": "initializers inside",
    "captured": "initializers inside",
    "captured input": "initializers inside",
    "constants in a loop": "initializers in a loop",
}


# Models


def stored(name: str, array: NDArray[Any]) -> NodeProto:
    return helper.make_node(
        "Constant", [], [name], value=numpy_helper.from_array(array)
    )


def layers(tag: str, source: str, result: str) -> list[NodeProto]:
    """Two matrix products; the names of what is in a body are its own."""
    return [
        helper.make_node(
            "MatMul", [source, f"{tag}w"], [f"{tag}m"], name=f"{tag}first"
        ),
        helper.make_node("Add", [f"{tag}m", f"{tag}b"], [f"{tag}a"], name=f"{tag}add"),
        helper.make_node("Tanh", [f"{tag}a"], [f"{tag}r"], name=f"{tag}tanh"),
        helper.make_node(
            "MatMul", [f"{tag}r", f"{tag}v"], [result], name=f"{tag}second"
        ),
    ]


def floats(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def constants(tag: str, how: str) -> tuple[list[NodeProto], list[TensorProto]]:
    """The constants of ``layers``, as nodes or as initializers."""
    if how.startswith("constants"):
        return [stored(f"{tag}{name}", array) for name, array in WEIGHTS.items()], []
    if how.startswith("rearranged"):
        nodes = [
            stored(f"{tag}{name}_stored", array.T.copy())
            for name, array in WEIGHTS.items()
        ]
        nodes += [
            helper.make_node("Transpose", [f"{tag}{name}_stored"], [f"{tag}{name}"])
            for name in "wv"
        ]
        return [
            *nodes,
            helper.make_node("Identity", [f"{tag}b_stored"], [f"{tag}b"]),
        ], []
    if how.startswith("captured"):
        return [
            helper.make_node("Identity", [name], [f"{tag}{name}"]) for name in WEIGHTS
        ], []
    return [], [
        numpy_helper.from_array(array, f"{tag}{name}")
        for name, array in WEIGHTS.items()
    ]


def body(tag: str, how: str, source: str) -> GraphProto:
    nodes, tensors = constants(tag, how)
    nodes += layers(tag, source, f"{tag}y")
    return helper.make_graph(nodes, tag, [], [floats(f"{tag}y", "N", SIZE)], tensors)


def loop_body(how: str) -> GraphProto:
    inner = body("l", how, "state")
    step = helper.make_tensor_value_info("step", TensorProto.INT64, [])
    going, on = (
        helper.make_tensor_value_info(name, TensorProto.BOOL, [])
        for name in ("going", "on")
    )
    nodes = [helper.make_node("Identity", ["going"], ["on"]), *inner.node]
    inputs, outputs = (
        [step, going, floats("state", "N", SIZE)],
        [on, floats("ly", "N", SIZE)],
    )
    return helper.make_graph(nodes, "l", inputs, outputs, inner.initializer)


@cache
def model_of(how: str) -> ModelProto:
    inputs, functions = [floats("x", "N", SIZE)], []
    outer = [numpy_helper.from_array(array, name) for name, array in WEIGHTS.items()]
    nodes = layers("", "x", "y")
    if "loop" in how:
        outer = [numpy_helper.from_array(np.int64(2), "times")]
        nodes = [
            helper.make_node("Loop", ["times", "", "x"], ["y"], body=loop_body(how))
        ]
    elif "inside" in how or "captured" in how:
        outer = outer if "captured" in how else []
        inputs.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
        branches = {
            "then_branch": body("t", how, "x"),
            "else_branch": body("e", how, "x"),
        }
        nodes = [helper.make_node("If", ["c"], ["y"], **branches)]
    elif how == "constant":
        nodes, outer = (
            [*(stored(name, array) for name, array in WEIGHTS.items()), *nodes],
            [],
        )
    elif how == "function":
        parts = [*(stored(name, array) for name, array in WEIGHTS.items()), *nodes]
        functions = [
            helper.make_function(
                "own", "Dense", ["x"], ["y"], parts, [helper.make_opsetid("", 17)]
            )
        ]
        nodes, outer = [helper.make_node("Dense", ["x"], ["y"], domain="own")], []
    if "input" in how:
        inputs += [floats(name, *array.shape) for name, array in WEIGHTS.items()]
    graph = helper.make_graph(nodes, "g", inputs, [floats("y", "N", SIZE)], outer)
    imports = [
        helper.make_opsetid("", 17),
        *([helper.make_opsetid("own", 1)] if functions else []),
    ]
    return helper.make_model(
        graph, opset_imports=imports, ir_version=8, functions=functions
    )


def samples(how: str) -> list[Feeds]:
    data: list[Feeds] = [{"x": normal(4, SIZE, seed=seed)} for seed in range(4)]
    if "c" in {value.name for value in model_of(how).graph.input}:
        return [
            {**feeds, "c": np.array(place % 2 == 0)} for place, feeds in enumerate(data)
        ]
    return data


def expected(how: str, x: NDArray[Any]) -> NDArray[np.float64]:
    """What the model computes, in float64."""
    first, bias, second = (array.astype(np.float64) for array in WEIGHTS.values())
    y = x.astype(np.float64)
    for _ in range(2 if "loop" in how else 1):
        y = np.tanh(y @ first + bias) @ second
    return y


def computed(model: ModelProto, how: str) -> NDArray[Any]:
    session = open_session(model)
    return np.concatenate([session.run(None, feeds)[0] for feeds in samples(how)])


def large_floats(model: ModelProto) -> int:
    """How many weights are still float, as initializers or as Constant nodes, in bodies too."""
    tensors = list(initializers(model.graph))
    tensors += [
        attribute.t for node in nodes_of(model.graph) for attribute in node.attribute
    ]
    return sum(
        t.data_type == TensorProto.FLOAT and np.prod(t.dims) == SIZE * SIZE
        for t in tensors
    )


def nodes_of(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes_of(inner)


def quantized(how: str, preset: str) -> Result:
    config = portable(QConfig.of(preset))
    return quantize(model_of(how), samples(how) if config.measures else None, config)


@cache
def plain(how: str, preset: str) -> tuple[Result, NDArray[Any]]:
    """The model that the usual notation gives, and its outputs."""
    result = quantized(how, preset)
    return result, computed(result.model, how)


# Tests


#: Presets that are written differently from one another; the others get the spelling that is
#: hardest to see.
KINDS = ["A8W8", "XINT8", "W8", "INT4", "DYNAMIC"]
CASES = [
    (preset, how)
    for preset in PRESETS
    for how in (SPELLINGS if preset in KINDS else ["constants inside"])
]


@pytest.mark.parametrize(("preset", "how"), CASES)
def test_a_weight_is_quantized_however_it_is_spelled(preset: str, how: str) -> None:
    """A constant is a constant in every spelling: initializer, initializer that is an input,
    Constant node, in the graph or in a body, behind a node that only rearranges it. The result is
    that of plain initializers.
    """
    before = model_of(how).SerializeToString(deterministic=True)
    result = quantized(how, preset)
    usual, outputs = plain(SPELLINGS[how], preset)
    assert model_of(how).SerializeToString(deterministic=True) == before, (
        "the caller's model is never changed"
    )
    onnx.checker.check_model(result.model, full_check=True)
    assert [value.name for value in result.model.graph.input] == list(samples(how)[0])
    done, total = result.report.operators["MatMul"]
    assert done == total == (4 if "inside" in how or "captured" in how else 2)
    assert large_floats(result.model) == large_floats(usual.model)
    found = computed(result.model, how)
    np.testing.assert_allclose(
        found, outputs, rtol=0, atol=1e-5 * np.abs(outputs).max()
    )
    exact = np.concatenate([expected(how, feeds["x"]) for feeds in samples(how)])
    assert 10 * np.log10(np.square(exact).sum() / np.square(found - exact).sum()) > 5


@pytest.mark.parametrize(
    "how", ["constant", "constants inside", "constants in a loop", "input"]
)
def test_constants_are_stored_where_nothing_else_is_done_to_the_graph(how: str) -> None:
    """A spelling is no rewrite that has to be verified or that a user asks for with ``prepare``."""
    config = QConfig.of("W8").with_(prepare=False)
    assert large_floats(quantize(model_of(how), None, config).model) == 0


def resizing() -> ModelProto:
    """A detector's neck: the scales of a Resize are an initializer and an input."""
    model = parse(
        """g (float[N,4,6,6] x) => (float[N,4,A,B] y) {
            [first] a = Conv <pads = [1,1,1,1]> (x, k)
            [up] r = Resize <mode = "nearest"> (a, , s)
            [second] y = Conv <pads = [1,1,1,1]> (r, l)
        }""",
        k=weight(4, 4, 3, 3),
        l=weight(4, 4, 3, 3, seed=1),
        s=np.float32([1, 1, 2, 2]),
    )
    for tensor in model.graph.initializer:
        model.graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    return model


@pytest.mark.parametrize("preset", PRESETS)
def test_scales_of_a_resize_that_are_an_input(preset: str) -> None:
    """What computes a shape from an overridable initializer computes it from a constant."""
    model, config = resizing(), portable(QConfig.of(preset))
    data = draw(model, 3)
    result = quantize(model, data if config.measures else None, config)
    assert result.report.operators["Conv"] == (2, 2)
    reference, session = open_session(model), open_session(result.model)
    for feeds in data:
        wanted, [found] = reference.run(None, feeds)[0], session.run(None, feeds)
        assert found.shape == wanted.shape == (1, 4, 12, 12)
        assert (
            10 * np.log10(np.square(wanted).sum() / np.square(found - wanted).sum()) > 5
        )


def test_the_interface_of_what_is_no_initializer_stays() -> None:
    usual = quantized("captured", "A8W8").model
    assert interface(usual) == interface(model_of("captured"))
