"""Rows of inputs: their products with the weight are what onnxruntime computes, at any place of the
output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quark_onnx.graph import Graph
from quark_onnx.kernels import im2col
from quark_onnx.patterns.conv_and_gemm import Layer
from quark_onnx.refine.layer_problems import flat, window_of
from tests.models import run

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=60)
Floats = NDArray[np.float32]


def computed(
    op: str, x: Floats, weight: Floats, **attributes: Any
) -> tuple[Floats, Any, Graph]:
    """What onnxruntime computes, the node and its graph."""
    node = helper.make_node(op, ["x", "w"], ["y"], **attributes)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * x.ndim)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(
        [node], "g", inputs, outputs, [numpy_helper.from_array(weight, "w")]
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    [y] = run(model, {"x": x})
    own = Graph.of(model)
    return y, own.nodes[0], own


def check(op: str, x: Floats, weight: Floats, wanted: int, **attributes: Any) -> None:
    y, node, graph = computed(op, x, weight, **attributes)
    layer = Layer.of(graph, node)
    assert layer is not None
    matrix = flat(layer.weight(graph))
    spatial = op.startswith("Conv")
    count = im2col.count_places(y.shape, spatial=spatial)
    [places] = im2col.places_of(count, wanted, [count])
    assert len(places) == min(count, wanted) == len(set(places.tolist()))
    if spatial:
        window = window_of(node, x.shape[2:], y.shape[2:], weight.shape[2:])
        rows = im2col.windowed([x], places[None], y.shape[2:], window, layer.groups)[0]
        expected = im2col.at_places([y], places[None], layer.groups)[0]
        codes = np.rint(x * 10).astype(np.int64) + 7  # 7 stands for 0
        taken = (
            im2col.windowed(
                [codes], places[None], y.shape[2:], window, layer.groups, 7
            )[0]
            - 7
        )
        np.testing.assert_array_equal(taken, np.rint(rows * 10))
    else:
        rows, expected = (im2col.rows_at([each], places[None])[0] for each in (x, y))
    found = rows.astype(np.float64) @ matrix.swapaxes(1, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def draw_sizes(data: st.DataObject, rank: int, low: int, high: int) -> list[int]:
    return data.draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))


@given(data=st.data(), rank=st.integers(1, 3), seed=st.integers(0, 99))
@EXAMPLES
def test_convolutions(data: st.DataObject, rank: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    groups, each, outputs = data.draw(
        st.sampled_from([(1, 3, 4), (2, 2, 3), (4, 1, 1), (3, 1, 2)])
    )
    kernel, strides, dilations = (draw_sizes(data, rank, 1, 3) for _ in range(3))
    size = draw_sizes(data, rank, 3, 7)
    auto = data.draw(
        st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID", None])
    )
    if str(auto).startswith("SAME"):
        dilations = [1] * rank  # onnxruntime refuses others
    attributes: dict[str, Any] = {
        "strides": strides,
        "dilations": dilations,
        "group": groups,
    }
    if auto == "NOTSET":
        attributes["pads"] = draw_sizes(data, 2 * rank, 0, 2)
    if auto is not None:
        attributes["auto_pad"] = auto
    pads = attributes.get("pads", [0] * 2 * rank)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    fits = [
        r <= s + pads[a] + pads[a + rank]
        for a, (r, s) in enumerate(zip(reach, size, strict=True))
    ]
    assume(all(fits) or str(auto).startswith("SAME"))
    x = random.normal(size=(data.draw(st.integers(1, 3)), groups * each, *size)).astype(
        np.float32
    )
    weight = random.normal(size=(groups * outputs, each, *kernel)).astype(np.float32)
    check("Conv", x, weight, data.draw(st.sampled_from([5, 10**6])), **attributes)


@given(data=st.data(), rank=st.integers(1, 3), seed=st.integers(0, 99))
@EXAMPLES
def test_transposed_convolutions(data: st.DataObject, rank: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    groups, each, outputs = data.draw(
        st.sampled_from([(1, 3, 4), (2, 2, 3), (3, 1, 1)])
    )
    kernel, strides, dilations = (draw_sizes(data, rank, 1, 3) for _ in range(3))
    size = draw_sizes(data, rank, 2, 5)
    attributes: dict[str, Any] = {
        "strides": strides,
        "dilations": dilations,
        "group": groups,
    }
    form = data.draw(
        st.sampled_from(
            ["plain", "pads", "extra", "shape", "SAME_UPPER", "SAME_LOWER", "VALID"]
        )
    )
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    whole = [s * (n - 1) + r for s, n, r in zip(strides, size, reach, strict=True)]
    extra = [
        data.draw(st.integers(0, s - 1)) for s in strides
    ]  # onnxruntime refuses more since 1.32
    if form in ("pads", "extra"):
        attributes["pads"] = pads = draw_sizes(data, 2 * rank, 0, 1)
        assume(all(w > pads[a] + pads[a + rank] for a, w in enumerate(whole)))
    if form == "extra":
        attributes["output_padding"] = extra
    if form == "shape":
        attributes["output_shape"] = [
            data.draw(st.integers(max(1, w - 2), w)) for w in whole
        ]
        if data.draw(st.booleans()):
            attributes["auto_pad"] = data.draw(
                st.sampled_from(["SAME_UPPER", "SAME_LOWER"])
            )
    if form.isupper():
        assume(
            form == "VALID"
            or all(w >= s * n for w, s, n in zip(whole, strides, size, strict=True))
        )
        attributes["auto_pad"] = form
    x = random.normal(size=(data.draw(st.integers(1, 3)), groups * each, *size)).astype(
        np.float32
    )
    weight = random.normal(size=(groups * each, outputs, *kernel)).astype(np.float32)
    check(
        "ConvTranspose", x, weight, data.draw(st.sampled_from([5, 10**6])), **attributes
    )


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (2, 1, 3, 8)], ids=str)
def test_products(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    x, weight = (
        random.normal(size=shape).astype(np.float32),
        random.normal(size=(8, 3)).astype(np.float32),
    )
    for wanted in (2, 100):
        check("MatMul", x, weight, wanted)
    if len(shape) == 2:
        check("Gemm", x, weight, 3)
        check("Gemm", x, weight.T.copy(), 3, transB=1)


@given(count=st.integers(0, 50), wanted=st.integers(0, 60), seed=st.integers(0, 9))
@EXAMPLES
def test_places_are_some_of_all(count: int, wanted: int, seed: int) -> None:
    [found, other] = im2col.places_of(count, wanted, [seed, seed + 1])
    assert len(found) == min(count, wanted)
    assert len(set(found)) == len(found) and ((found >= 0) & (found < count)).all()
    np.testing.assert_array_equal(
        im2col.places_of(count, wanted, [seed + 1, seed]), [other, found]
    )


@pytest.mark.parametrize(
    ("count", "wanted"), [(1000, 97), (3136, 50), (49, 7), (12544, 512), (7, 7)]
)
def test_places_lie_evenly_in_random_order(count: int, wanted: int) -> None:
    [found, other] = im2col.places_of(count, wanted, [0, 1])
    gaps = np.diff(np.append(np.sort(found), np.sort(found)[0] + count))
    assert gaps.max() <= 2 * -(-count // wanted)
    assert (np.diff(found) < 0).any()
    assert found.tolist() != other.tolist()


@given(data=st.data(), seed=st.integers(0, 99))
@EXAMPLES
def test_several_tensors_at_once_are_what_each_is_alone(
    data: st.DataObject, seed: int
) -> None:
    random = np.random.default_rng(seed)
    kernel, strides, pads = (
        tuple(draw_sizes(data, 2, low, high)) for low, high in ((1, 3), (1, 2), (0, 2))
    )
    window, groups = (
        im2col.Window(kernel, strides, (1, 1), pads, data.draw(st.booleans())),
        2,
    )
    xs = list(random.integers(0, 256, (3, 2, 4, 5, 6)).astype(np.uint8))
    places = im2col.places_of(
        2 * 5 * 6, data.draw(st.integers(1, 70)), [seed, seed + 1, seed + 2]
    )
    rows = im2col.windowed(xs, places, (5, 6), window, groups, 7)
    for x, own, found in zip(xs, places, rows, strict=True):
        np.testing.assert_array_equal(
            found, im2col.windowed([x], own[None], (5, 6), window, groups, 7)[0]
        )
    for x, own, found in zip(
        xs, places, im2col.at_places(xs, places, groups), strict=True
    ):
        for place, values in zip(own, found.swapaxes(0, 1), strict=True):
            batch, row, column = np.unravel_index(place, (2, 5, 6))
            np.testing.assert_array_equal(values.reshape(-1), x[batch, :, row, column])
    places %= 2 * 4 * 5
    for x, own, found in zip(xs, places, im2col.rows_at(xs, places), strict=True):
        np.testing.assert_array_equal(found[0], x.reshape(-1, 6)[own])
