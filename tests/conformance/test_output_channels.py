"""Every operator's weight has scales that serve its output channels, wherever these lie.

The rule: values of one output channel are summed and may share a scale; values of two never are.
Output channels that differ 200 times in range therefore have about the error, each in relation to
its own values, of channels of equal range. The oracle is the operator in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from quark_onnx import QConfig, analyze, quantize
from quark_onnx.common.registry import RULES
from quark_onnx.graph import Graph
from quark_onnx.patterns.weight_axes import BY_INPUT, WeightAxes, weight_axes
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.refine.layer_problems import lattice_of, places_in
from quark_onnx.scales.compute_qparams import compute_qparams
from quark_onnx.writing.insert import insert
from tests.cases import loop_over
from tests.models import Array, Feeds, normal, parse, run
from tests.recurrent_oracle import recurrent
from tests.settings import portable

HEADER = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
Oracle = Callable[..., Array]
#: Loss in dB of channels of unequal range that rounding and chance may cause.
LOSS = 4.0
RANGE = 200.0


@dataclass(frozen=True)
class Case:
    """An operator with a weight.

    Attributes:
        text: the graph; x is its input.
        weights: shapes of the weights by name.
        channels: axes of the output channels of the weights.
        result: axes of the output channels in the result, in the same order.
        oracle: the operator in float64, of x and the weights.
        groups: parts of the first axis of a weight that are output channels too.
    """

    text: str
    weights: dict[str, tuple[int, ...]]
    channels: tuple[int, ...]
    result: tuple[int, ...]
    oracle: Oracle
    groups: int = 1


def conv(x: Array, w: Array, group: int = 1) -> Array:
    """Convolution (N, C, ...) without padding."""
    rank = w.ndim - 2
    windows = sliding_window_view(x, w.shape[2:], axis=tuple(range(2, x.ndim)))
    # (N, C, *places, *kernel)
    parts = []
    for xs, ws in zip(np.split(windows, group, 1), np.split(w, group), strict=True):
        axes = [1, *range(2 + rank, 2 + 2 * rank)]
        parts.append(
            np.moveaxis(np.tensordot(xs, ws, (axes, [1, *range(2, 2 + rank)])), -1, 1)
        )
    return np.concatenate(parts, 1)


def conv_transpose(x: Array, w: Array, group: int = 1) -> Array:
    """Transposed convolution of stride 1: a full convolution by the mirrored kernel."""
    rank = w.ndim - 2
    pads = [(0, 0), (0, 0), *((size - 1, size - 1) for size in w.shape[2:])]
    mirrored = np.flip(w, tuple(range(2, 2 + rank)))
    parts = [part.swapaxes(0, 1) for part in np.split(mirrored, group)]
    return conv(np.pad(x, pads), np.concatenate(parts), group)


def attention(x: Array, w: Array) -> Array:
    """Attention with 4 heads; w is (in, 3 * 32)."""
    q, k, v = (
        part.reshape(*part.shape[:2], 4, 8).swapaxes(1, 2)
        for part in np.split(x @ w, 3, 2)
    )
    scores = q @ k.swapaxes(2, 3) / np.sqrt(8)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = shares / shares.sum(-1, keepdims=True) @ v
    return np.asarray(mixed.swapaxes(1, 2).reshape(x.shape))


CASES: dict[str, Case] = {}
for kind, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
    for directions, way in ((1, "forward"), (2, "bidirectional")):
        call = f'{kind} <hidden_size = 16, direction = "{way}"> (x, w, r)'
        CASES[f"{kind} {way}"] = Case(
            f"g (float[6,2,32] x) => (float[6,{directions},2,16] y) {{ [op] y = {call} }}",
            {"w": (directions, gates * 16, 32), "r": (directions, gates * 16, 16)},
            (0, 1),
            (1, 3),
            recurrent(kind),
        )
for name, x, shape, group in (
    ("Conv 1-D", "1,8,20", (16, 8, 3), 1),
    ("Conv 2-D", "1,8,9,9", (16, 8, 3, 3), 1),
    ("Conv 3-D", "1,8,6,6,6", (16, 8, 3, 3, 3), 1),
    ("Conv of groups", "1,8,9,9", (16, 2, 3, 3), 4),
    ("Conv depthwise", "1,8,9,9", (8, 1, 3, 3), 8),
):
    CASES[name] = Case(
        f"g (float[{x}] x) => (float y) {{ [op] y = Conv <group = {group}> (x, w) }}",
        {"w": shape},
        (0,),
        (1,),
        lambda x, w, group=group: conv(x, w, group),
    )
for name, x, shape, group in (
    ("ConvTranspose 1-D", "1,8,9", (8, 16, 3), 1),
    ("ConvTranspose 2-D", "1,8,5,5", (8, 16, 3, 3), 1),
    ("ConvTranspose of groups", "1,32,5,5", (32, 4, 3, 3), 4),
    ("ConvTranspose depthwise", "1,8,5,5", (8, 1, 3, 3), 8),
    ("ConvTranspose of one output a group", "1,8,5,5", (8, 1, 3, 3), 4),
):
    CASES[name] = Case(
        f"g (float[{x}] x) => (float y) {{ [op] y = ConvTranspose <group = {group}> (x, w) }}",
        {"w": shape},
        (1,),
        (1,),
        lambda x, w, group=group: conv_transpose(x, w, group),
        group,
    )
CASES["FusedConv"] = Case(
    'g (float[1,8,9,9] x) => (float y) { [op] y = com.microsoft.FusedConv <activation = "Relu">'
    " (x, w) }",
    {"w": (16, 8, 3, 3)},
    (0,),
    (1,),
    lambda x, w: np.maximum(conv(x, w), 0),
)
CASES["DeformConv"] = Case(
    "g (float[1,8,9,9] x) => (float y) { [op] y = DeformConv (x, w, o) }",
    {"w": (16, 8, 3, 3)},
    (0,),
    (1,),
    conv,
)
FUSED = "com.microsoft.FusedMatMul"
RELU = 'com.microsoft.FusedGemm <activation = "Relu"> (x, w)'
ATTENTION = "com.microsoft.Attention <num_heads = 4> (x, w, b)"
#: Operator, shapes of x and w, axes of the output channels in w and in the result, oracle.
PRODUCTS: dict[
    str, tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], Oracle]
]
PRODUCTS = {
    "Gemm": ("Gemm (x, w)", "8,64", (64, 24), (1,), (1,), np.matmul),
    "Gemm transB": (
        *("Gemm <transB = 1> (x, w)", "8,64", (24, 64), (0,), (1,)),
        lambda x, w: x @ w.T,
    ),
    "Gemm left": ("Gemm (w, x)", "64,8", (24, 64), (0,), (0,), lambda x, w: w @ x),
    "Gemm left transA": (
        *("Gemm <transA = 1> (w, x)", "64,8", (64, 24), (1,), (0,)),
        lambda x, w: w.T @ x,
    ),
    "FusedGemm": (
        RELU,
        "8,64",
        (64, 24),
        (1,),
        (1,),
        lambda x, w: np.maximum(x @ w, 0),
    ),
    "MatMul": ("MatMul (x, w)", "8,64", (64, 24), (1,), (1,), np.matmul),
    "MatMul left": ("MatMul (w, x)", "64,8", (24, 64), (0,), (0,), lambda x, w: w @ x),
    "MatMul of a stack": (
        "MatMul (x, w)",
        "3,8,64",
        (3, 64, 24),
        (0, 2),
        (0, 2),
        np.matmul,
    ),
    "MatMul of a stack of one": (
        "MatMul (x, w)",
        "3,8,64",
        (1, 64, 24),
        (2,),
        (2,),
        np.matmul,
    ),
    "MatMul of a stack left": (
        *("MatMul (w, x)", "3,64,8", (3, 24, 64), (0, 1), (0, 1)),
        lambda x, w: w @ x,
    ),
    "FusedMatMul": (
        *(f"{FUSED} <transB = 1> (x, w)", "8,64", (24, 64), (0,), (1,)),
        lambda x, w: x @ w.T,
    ),
    "FusedMatMul of a stack": (
        *(f"{FUSED} (x, w)", "3,8,64", (3, 64, 24), (0, 2), (0, 2), np.matmul),
    ),
    "Attention": (ATTENTION, "2,8,32", (32, 96), (1,), (2,), attention),
}
for equation, given, stored, axes, last in (
    ("btk,kd->btd", "2,5,64", (64, 24), (1,), (2,)),
    ("btk,dk->btd", "2,5,64", (24, 64), (0,), (2,)),
    ("btk,hkd->bhtd", "2,5,64", (4, 64, 8), (0, 2), (1, 3)),
    ("btk,khd->bthd", "2,5,64", (64, 4, 8), (1, 2), (2, 3)),
    ("bthd,hde->bthe", "2,5,4,64", (4, 64, 8), (0, 2), (2, 3)),
    ("bthd,hdk->btk", "2,5,4,16", (4, 16, 24), (2,), (2,)),
):
    PRODUCTS[f"Einsum {equation}"] = (
        *(f'Einsum <equation = "{equation}"> (x, w)', given, stored, axes, last),
        lambda x, w, equation=equation: np.einsum(equation, x, w),
    )
for name, (call, given, right, channels, result, oracle) in PRODUCTS.items():
    text = f"g (float[{given}] x) => (float y) {{ [op] y = {call} }}"
    CASES[name] = Case(text, {"w": right}, channels, result, oracle)
PRESETS = [
    *("A8W8", "A16W8", "W8", "INT4", "DYNAMIC"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("S8S8", "U8U8", "UINT4", "A8W4")
    ),
]
WEIGHT_ONLY = {"W8", "INT4", "UINT4"}


def by_channel(values: Array, case: Case) -> Array:
    """Rows of the values of each output channel of a weight."""
    channels = case.channels
    if case.groups > 1:
        values = values.reshape(case.groups, -1, *values.shape[1:])
        channels = (0, *(axis + 1 for axis in channels))
    moved = np.moveaxis(values, channels, range(len(channels)))
    return moved.reshape(prod(moved.shape[: len(channels)]), -1)


def weights_of(case: Case, ratio: float) -> dict[str, NDArray[np.float32]]:
    """Weights whose output channels differ in range by a factor."""
    result = {}
    for name, shape in case.weights.items():
        values = normal(*shape).astype(np.float64)
        rows = by_channel(values, case)
        count, size = rows.shape
        # Views: rows of several axes are no view of the weight, so that factors are spread back.
        factors = np.geomspace(1, 1 / ratio, count)[
            np.random.default_rng(1).permutation(count)
        ]
        marks = by_channel(np.arange(values.size).reshape(shape), case)
        values.reshape(-1)[marks.reshape(-1)] *= np.repeat(factors, size)
        result[name] = (values / np.sqrt(size)).astype(np.float32)
    return result


def model_of(case: Case, weights: dict[str, NDArray[np.float32]]) -> ModelProto:
    constants: dict[str, Any] = dict(weights)
    if "(x, w, b)" in case.text:
        constants["b"] = np.zeros(96, np.float32)
    if "(x, w, o)" in case.text:
        constants["o"] = np.zeros((1, 18, 7, 7), np.float32)
    return onnx.shape_inference.infer_shapes(parse(HEADER + case.text, **constants))


def relative_sqnr(case: Case, preset: str, ratio: float) -> float:
    """SQNR in dB, where the error of each output channel counts relative to its own values."""
    weights = weights_of(case, ratio)
    model = model_of(case, weights)
    [given] = model.graph.input
    shape = [dim.dim_value for dim in given.type.tensor_type.shape.dim]
    data: list[Feeds] = [{"x": normal(*shape, seed=seed)} for seed in range(3)]
    config = portable(QConfig.of(preset))
    if preset not in WEIGHT_ONLY | {"DYNAMIC"}:
        # Results have one scale, and would hide what the weights lose.
        kinds = tuple({node.kind for node in Graph.of(model).nodes})
        config = config.with_(calibrator="minmax", float_results=kinds)
    quantized = quantize(model, None if preset in WEIGHT_ONLY else data, config).model
    signal = noise = np.zeros(())
    for feeds in data:
        doubles = [weights[name].astype(np.float64) for name in case.weights]
        expected = case.oracle(feeds["x"].astype(np.float64), *doubles)
        error = run(quantized, feeds, optimize=True)[0] - expected
        others = tuple(axis for axis in range(expected.ndim) if axis not in case.result)
        signal = signal + np.square(expected).sum(axis=others)
        noise = noise + np.square(error).sum(axis=others)
    # A channel that a Relu blocks has no values.
    used = signal > 0
    return float(-10 * np.log10(np.mean(noise[used] / signal[used])))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", CASES)
def test_output_channels_of_unequal_range(name: str, preset: str) -> None:
    case = CASES[name]
    even, uneven = (relative_sqnr(case, preset, ratio) for ratio in (1.0, RANGE))
    assert uneven > even - LOSS


@pytest.mark.parametrize("name", CASES)
def test_power_of_two_scales_are_those_of_tensors(name: str) -> None:
    """The format has one scale for a weight: nothing finer is written."""
    case = CASES[name]
    model = model_of(case, weights_of(case, RANGE))
    [given] = model.graph.input
    shape = [dim.dim_value for dim in given.type.tensor_type.shape.dim]
    quantized = quantize(model, [{"x": normal(*shape)}], "XINT8").model
    constants = {tensor.name: tensor for tensor in quantized.graph.initializer}
    for node in quantized.graph.node:
        if node.op_type == "DequantizeLinear":
            assert numpy_helper.to_array(constants[node.input[1]]).size == 1


@loop_over("name", tuple(CASES))
def test_the_table_knows_the_output_channels(name: str) -> None:
    """Rows of the table are the output channels, in the order of the result."""
    case = CASES[name]
    weights = weights_of(case, 1.0)
    graph = Graph.of(model_of(case, weights))
    [node] = graph.nodes
    for weight, values in weights.items():
        axes = weight_axes(graph, node, node.inputs.index(weight))
        assert axes is not None
        np.testing.assert_array_equal(axes.rows(values), by_channel(values, case))
        layout = axes.layout(values.shape)
        np.testing.assert_array_equal(layout.restored(layout.arranged(values)), values)


def test_every_row_of_the_table_has_a_rule() -> None:
    assert {kind for kind, _ in BY_INPUT} <= set(RULES)


#: Layers that optimizers know: weights on the left and stacks are none.
LAYERS = [
    name
    for name in CASES
    if name.startswith(("Conv", "Gemm", "MatMul"))
    and "left" not in name
    and "stack" not in name
]


@loop_over("preset", ["W8", "INT4"])
@loop_over("name", LAYERS)
def test_optimizers_choose_among_the_codes_of_the_file(name: str, preset: str) -> None:
    """A float model with the nearest weights of the lattice computes what the file computes."""
    case = CASES[name]
    model = model_of(case, weights_of(case, RANGE))
    graph = Graph.of(model)
    plan = make_plan(graph, QConfig.of(preset))
    plan, params = compute_qparams(graph, plan, {})
    places, skipped = places_in(graph, plan, params)
    assert not skipped
    [place] = places
    lattice = lattice_of(graph, plan, params, place)
    arranged = place.layer.weight(graph)
    nearest = lattice.nearest(arranged.reshape(*arranged.shape[:2], -1))
    stored = place.layer.as_stored(nearest.reshape(arranged.shape))
    rounded = model_of(case, {"w": stored.astype(np.float32)})
    inserted = insert(graph, plan, params).to_model()
    [given] = model.graph.input
    feeds = {"x": normal(*(dim.dim_value for dim in given.type.tensor_type.shape.dim))}
    expected, found = (run(each, feeds)[0] for each in (rounded, inserted))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_the_analysis_of_weights_has_a_row_for_each_output_channel() -> None:
    case = CASES["LSTM bidirectional"]
    weights = weights_of(case, RANGE)
    model = model_of(case, weights)
    data: list[Feeds] = [{"x": normal(6, 2, 32)}]
    quantized = quantize(model, data, "A8W8").model
    errors = {error.name: error for error in analyze(model, quantized, data).weights}
    assert {name: error.channels for name, error in errors.items()} == {
        "w": 128,
        "r": 128,
    }
    for error in errors.values():
        assert error.granularity == "channel" and error.format == "int8"
        assert error.worst_sqnr > 35 and not error.dead


def test_an_arrangement_of_the_same_shape_is_not_the_weight_itself() -> None:
    """Two groups of (4, 2, 1, 1) are transposed into the same shape."""
    layout = WeightAxes((1,), 0, groups=2).layout((4, 2, 1, 1))
    weight = np.arange(8.0).reshape(4, 2, 1, 1)
    assert layout.merged == weight.shape and not layout.is_plain
    rows = layout.arranged(weight).reshape(4, 2)
    np.testing.assert_array_equal(rows, [[0, 2], [1, 3], [4, 6], [5, 7]])
    np.testing.assert_array_equal(layout.restored(layout.arranged(weight)), weight)
