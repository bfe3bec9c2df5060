"""make_plan: the plan follows from the graph alone, not from the order in which a file lists
independent nodes.
"""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from quark_onnx import (
    Override,
    QConfig,
    QuantizationSpec,
    TensorOverride,
    npu,
    quantize,
)
from quark_onnx.graph import Graph
from quark_onnx.plan import Quantize, SameAs, Use
from quark_onnx.planning.make_plan import make_plan
from tests import models
from tests.cases import loop_over
from tests.models import normal, weight
from tests.settings import ALL, TENSOR

UNARY = (
    ("MaxPool", {"kernel_shape": [1, 1]}),
    ("Transpose", {"perm": [0, 1, 3, 2]}),
    ("Identity", {}),
    ("Relu", {}),
    ("Sigmoid", {}),
    ("LeakyRelu", {}),
    ("GlobalAveragePool", {}),
    ("Tanh", {}),
    ("Flatten", {}),
)
BINARY = ("Add", "Mul", "MatMul", "Div")


def random_nodes(generator: random.Random, count: int = 14) -> list[onnx.NodeProto]:
    """Operators on tensors of 4 dimensions, each reading any earlier ones."""
    tensors, nodes = ["x"], list[onnx.NodeProto]()
    for index in range(count):
        result = f"t{index}"
        if generator.random() < 0.65:
            kind, attributes = generator.choice(UNARY)
            nodes.append(
                helper.make_node(
                    kind,
                    [generator.choice(tensors)],
                    [result],
                    f"n{index}",
                    **attributes,
                )
            )
            if kind == "Flatten":
                continue  # of two dimensions: nobody goes on from it
        else:
            pair = [generator.choice(tensors), generator.choice(tensors)]
            nodes.append(
                helper.make_node(generator.choice(BINARY), pair, [result], f"n{index}")
            )
        tensors.append(result)
    return nodes


def shuffled(
    nodes: list[onnx.NodeProto], generator: random.Random
) -> list[onnx.NodeProto]:
    """Another topological order of the nodes."""
    known, left, result = {"x"}, list(nodes), list[onnx.NodeProto]()
    while left:
        ready = [node for node in left if known.issuperset(node.input)]
        node = generator.choice(ready)
        left.remove(node)
        known.update(node.output)
        result.append(node)
    return result


def model_of(nodes: list[onnx.NodeProto]) -> ModelProto:
    used = {name for node in nodes for name in node.input}
    ends = [name for node in nodes for name in node.output if name not in used]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
            for name in sorted(ends)
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def decisions(nodes: list[onnx.NodeProto], config: QConfig) -> dict[str, str]:
    """The format of each tensor as each node reads it, by its root."""
    plan = make_plan(Graph.of(model_of(nodes)), config)
    return {
        f"{tensor} in {node.name}": str(plan.entry(plan.use(tensor, node)))
        for node in plan.graph.nodes
        for tensor in (*node.inputs, *node.outputs)
    }


@loop_over("target", ["", "stx"])
@loop_over("config", ["tensor", "pow2"])
@loop_over("seed", range(60))
def test_the_order_of_independent_nodes_does_not_matter(
    seed: int, config: str, target: str
) -> None:
    generator = random.Random(seed)
    nodes = random_nodes(generator)
    settings = ALL[config].with_(target=target)
    expected = decisions(nodes, settings)
    for _ in range(4):
        assert decisions(shuffled(nodes, generator), settings) == expected


def parse(body: str) -> Graph:
    return Graph.of(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {body}')
    )


def test_a_scale_is_handed_on_that_a_later_sibling_asked_for() -> None:
    """The pool stands before the LeakyRelu that wants their common input quantized."""
    graph = parse(
        """g (float[1, 3, 4, 4] x) => (float[?, ?, ?, ?] p, float[?, ?, ?, ?] r) {
        h = Cos (x)
        p = MaxPool <kernel_shape = [2, 2]> (h)
        r = LeakyRelu (h)
    }"""
    )
    plan = make_plan(graph, TENSOR)
    assert isinstance(plan.entries[Use("h")], Quantize)
    assert plan.entries[Use("p")] == SameAs(Use("h"))


FOCUS = """g (float[1, 3, 8, 8] x) => (float[?, ?, ?, ?] y)
    <float[2, 6, 1, 1] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, int64[1] first = {0},
     int64[1] second = {1}, int64[1] end = {100}, int64[1] axis = {3}, int64[1] step = {2},
     int64[1] rows = {2}> {
        a = Slice (x, first, end, rows, step)
        p = Slice (a, first, end, axis, step)
        b = Slice (x, second, end, rows, step)
        q = Slice (b, second, end, axis, step)
        c = Concat <axis = 1> (p, q)
        y = Conv (c, w)
    }"""


def test_an_integer_engine_gets_the_codes_of_an_input_that_is_cut_first() -> None:
    """All slices have the scale of the picture, and none is computed in float."""
    plan = make_plan(parse(FOCUS), TENSOR.with_(target="stx"))
    assert isinstance(plan.entries[Use("x")], Quantize)
    for piece in "apbq":
        assert plan.root(Use(piece)) == Use("x")
    forecast = npu.deploy_forecast(parse(FOCUS).to_model(), "stx", kind="A8W8").best
    assert {placed.device for placed in forecast.placements} == {"NPU"}
    # Elsewhere slices of floats cost little, and pieces are rounded once, after they are joined.
    assert Use("x") not in make_plan(parse(FOCUS), TENSOR).entries


def test_rows_and_columns_that_are_cut_are_lifted_with_channels_last_too() -> None:
    text = FOCUS.replace("[1, 3, 8, 8] x", "[1, 8, 8, 3] x")
    text = text.replace("axis = {3}", "axis = {2}").replace("rows = {2}", "rows = {1}")
    text = text.replace("<axis = 1> (p, q)", "<axis = 3> (p, q)")
    text = text.replace(
        "y = Conv (c, w)", "t = Transpose <perm = [0, 3, 1, 2]> (c)  y = Conv (t, w)"
    )
    plan = make_plan(parse(text), TENSOR.with_(target="stx"))
    for piece in "apbq":
        assert plan.root(Use(piece)) == Use("x")


@pytest.mark.parametrize(
    "other", ["Cos (x)", "Slice (x, first, end, rows)", "Identity (x)"]
)
def test_a_float_reader_of_an_input_leaves_its_slices_float(other: str) -> None:
    """The pair before the slices would round what it reads."""
    body = FOCUS.replace(
        "float[?, ?, ?, ?] y)", "float[?, ?, ?, ?] y, float[?, ?, ?, ?] z)"
    )
    body = body.replace("a = Slice", f"z = {other} a = Slice")
    plan = make_plan(parse(body), TENSOR.with_(target="stx"))
    assert Use("x") not in plan.entries and isinstance(plan.entry(Use("p")), Quantize)


@pytest.mark.parametrize(
    "override",
    [TensorOverride("x", keep=True), TensorOverride("x", readers=("top",), keep=True)],
)
def test_an_input_that_the_user_keeps_float_gets_no_pair_before_its_slices(
    override: TensorOverride,
) -> None:
    graph = parse(FOCUS.replace("a = Slice", "[top] a = Slice"))
    plan = make_plan(graph, TENSOR.with_(target="stx", tensors=(override,)))
    reader = graph.producer("a")
    assert reader is not None and not plan.quantized("x", reader)
    assert isinstance(plan.entry(Use("p")), Quantize)


def test_an_input_has_the_range_that_the_user_gives_it_before_its_slices() -> None:
    given = TensorOverride("x", low=0.0, high=1.0)
    plan = make_plan(parse(FOCUS), TENSOR.with_(target="stx", tensors=(given,)))
    entry = plan.entries[Use("x")]
    assert isinstance(entry, Quantize) and entry.given == given
    assert plan.root(Use("p")) == Use("x")


def test_the_range_that_the_user_gives_a_slice_is_not_that_of_the_others() -> None:
    given = TensorOverride("p", low=0.0, high=1.0)
    plan = make_plan(parse(FOCUS), TENSOR.with_(target="stx", tensors=(given,)))
    for tensor in "xabq":
        entry = plan.entry(Use(tensor))
        assert not isinstance(entry, Quantize) or entry.given is None


CHANNELS = {
    "Split": "p, q = Split <axis = 1> (x)",
    "Slice": "p = Slice (x, first, end, axis)  q = Slice (x, second, all, axis)",
    "Gather": "p = Gather <axis = 1> (x, low)  q = Gather <axis = 1> (x, high)",
    "one": "p = Slice (x, first, end, axis)  q = Neg (p)",
}
LAST = {
    name: cut.replace("axis = 1", "axis = 3")
    for name, cut in CHANNELS.items()
    if name != "one"
}


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "A16W8"])
@pytest.mark.parametrize("cut", CHANNELS.values(), ids=CHANNELS)
def test_channels_of_small_values_keep_codes_of_their_own(
    cut: str, preset: str
) -> None:
    """One scale for a thousand times greater channels would round these to zero."""
    _has_codes_for_small_channels(cut, preset, "y = Conv (p, w)  z = Conv (q, w)", 1)


@pytest.mark.parametrize("preset", ["A8W8", "XINT8"])
@pytest.mark.parametrize("cut", LAST.values(), ids=LAST)
def test_channels_of_small_values_in_pictures_with_channels_last(
    cut: str, preset: str
) -> None:
    layers = """s = Transpose <perm = [0, 3, 1, 2]> (p)  y = Conv (s, w)
        t = Transpose <perm = [0, 3, 1, 2]> (q)  z = Conv (t, w)"""
    _has_codes_for_small_channels(cut, preset, layers, 3)


def _has_codes_for_small_channels(
    cut: str, preset: str, layers: str, axis: int
) -> None:
    constants = {
        "first": np.int64([0]),
        "second": np.int64([2]),
        "end": np.int64([2]),
        "all": np.int64([4]),
        "axis": np.int64([axis]),
        "low": np.int64([0, 1]),
        "high": np.int64([2, 3]),
        "w": weight(4, 2, 1, 1),
    }
    shape = [8, 8]
    shape.insert(axis - 1, 4)
    text = f"""g (float{[1, *shape]} x) => (float[1, 4, 8, 8] y, float[1, 4, 8, 8] z) {{
        {cut}  {layers}
    }}"""
    used = {k: v for k, v in constants.items() if f" {k}," in text or f" {k})" in text}
    model = models.parse(text, **used)
    sizes = np.moveaxis(np.float32([[[[1, 1, 1000, 1000]]]]), 3, axis)
    data = [{"x": normal(1, *shape, seed=seed) * sizes} for seed in range(4)]
    config = QConfig.of(preset).with_(target="stx", min_sqnr=None)
    found = models.run(quantize(model, data, config=config).model, data[0])
    for value, expected in zip(found, models.run(model, data[0]), strict=True):
        noise = np.square(value - expected.astype(np.float64)).sum()
        assert np.square(expected.astype(np.float64)).sum() > 1e3 * noise


def test_an_override_of_a_layer_reaches_the_result_that_an_activation_is_fused_into() -> (
    None
):
    graph = parse(
        """g (float[1, 3, 4, 4] x) => (float[?, ?, ?, ?] y) <float[2, 3, 1, 1] w = {1, 2, 3, 4, 5, 6}> {
        c = Conv (x, w)
        y = Relu (c)
    }"""  # noqa: E501
    )
    conv, relu = (node.name for node in graph.nodes)
    wide, narrow = (
        QuantizationSpec("uint16", symmetric=False),
        QuantizationSpec("int16"),
    )

    def dtype(*overrides: Override) -> str:
        entry = make_plan(graph, TENSOR.with_(overrides=overrides)).entry(Use("y"))
        assert isinstance(entry, Quantize)
        return entry.spec.dtype.name

    assert dtype() == "uint8"
    assert dtype(Override(conv, activation=wide)) == "uint16"
    assert dtype(Override(relu, activation=wide)) == "uint16"
    assert (
        dtype(Override(conv, activation=wide), Override(relu, activation=narrow))
        == "int16"
    )


CLASSIFIER = """<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2, 4, 4] x) => (float[N, 2] y)
    <float[2, 2, 1, 1] v = {1, 2, 3, 4}, float[2, 2, 1, 1] w = {1, 2, 3, 4}>
    { h = Conv (x, v) l = Conv (h, w) r = Relu (l) p = GlobalAveragePool (r) y = Flatten (p) }"""


@pytest.mark.parametrize("calibrator", ["mean_minmax", "best"])
def test_behind_the_last_weighted_layer_nothing_is_clipped(calibrator: str) -> None:
    config = QConfig.of("A8W8").with_(calibrator=calibrator)
    entries = make_plan(Graph.of(onnx.parser.parse_model(CLASSIFIER)), config).entries
    names = {
        use.tensor: entry.spec.calibrator.name  # type: ignore[attr-defined]
        for use, entry in entries.items()
        if isinstance(entry, Quantize) and use.tensor not in ("v", "w")
    }
    assert names.pop("x") == names.pop("h") == calibrator
    assert names and set(names.values()) == {"minmax"}


def test_a_calibrator_that_says_nothing_of_outputs_is_used_there_too() -> None:
    config = QConfig.of("A8W8").with_(calibrator="percentile")
    entries = make_plan(
        Graph.of(onnx.parser.parse_model(CLASSIFIER)), config
    ).entries.values()
    assert {"percentile"} < {
        entry.spec.calibrator.name for entry in entries if isinstance(entry, Quantize)
    }  # type: ignore[attr-defined]
