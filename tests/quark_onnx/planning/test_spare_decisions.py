"""What only decisions read stays float: the readers decide, for any operator and at any preset.

A value that becomes an integer, a boolean, an index or a position is not a signal: a rounding error
gives another one, and no small error. The rule holds back to the last layer with weights, through
bodies and functions.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.check.inlined import inlined
from quark_onnx.common.registry import PRESETS
from quark_onnx.graph import Graph
from quark_onnx.plan import Plan
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.subgraph_plans import all_plans, plan_bodies
from tests.cases import loop_over
from tests.models import Array, Feeds, normal, parse, run, weight
from tests.settings import POW2, TENSOR

REASON = "it is read only as an integer, a position or a decision"
CONFIGS = {
    name: QConfig.of(name)
    for name in (
        "A8W8",
        "S8S8",
        "XINT8",
        "A16W8",
        "FP8E4M3",
        "BFP16",
        "BF16",
        "MXFP4E2M1",
    )
}


def planned(model: ModelProto, config: QConfig = TENSOR) -> Plan:
    return make_plan(Graph.of(inlined(model)), config)


def assert_float(plan: Plan, *tensors: str) -> None:
    """No tensor is quantized, for any reader."""
    rounded = {
        name
        for name in tensors
        for node in (None, *plan.graph.consumers(name))
        if plan.quantized(name, node)
    }
    assert not rounded, str(plan)


# Labels as indices


TABLE = normal(5, 8)
LABELS = """g (float[N,16] x) => (float[N,16,8] y) {
    low = Constant <value = float {0.0}> ()
    high = Constant <value = float {3.0}> ()
    [clip] c = Clip (x, low, high)
    i = Cast <to = 7> (c)
    [gather] y = Gather (table, i)
}"""


def labels(count: int = 16) -> list[Feeds]:
    random = np.random.default_rng(0)
    return [{"x": np.float32(random.integers(-1, 4, (1, 16)))} for _ in range(count)]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_index_is_right_at_every_preset(preset: str) -> None:
    result = quantize(parse(LABELS, table=TABLE), labels(), preset)
    for sample in labels():
        (rows,) = run(result.model, sample)
        nearest = ((rows[..., None, :] - TABLE) ** 2).sum(-1).argmin(-1)
        assert np.array_equal(nearest, sample["x"].clip(0, 3).astype(int))
    if QConfig.of(preset).measures:
        assert result.report.kept_nodes["clip"] == (
            f"{REASON} (Cast), which rounding would change"
        )


# Readers


#: Operators that decide by the tensor v (float[4,6]), with the constants of ``CONSTANTS``.
READERS = {
    "Cast to int64": "i = Cast <to = 7> (v) y = Gather (flat, i)",
    "Cast to int32": "y = Cast <to = 6> (v)",
    "Cast to uint8": "y = Cast <to = 2> (v)",
    "Cast to bool": "y = Cast <to = 9> (v)",
    "Equal": "y = Equal (v, one)",
    "Less": "y = Less (v, one)",
    "LessOrEqual": "y = LessOrEqual (v, one)",
    "Greater": "y = Greater (one, v)",
    "GreaterOrEqual": "y = GreaterOrEqual (v, one)",
    "Where": "b = Cast <to = 9> (v) y = Where (b, grid, zero)",
    "ArgMax": "y = ArgMax <axis = 1> (v)",
    "ArgMin": "y = ArgMin <axis = 1> (v)",
    "TopK": "values, y = TopK (v, two)",
    "TopK, whose values decide, too": "best, y = TopK (v, two) z = Less (best, one)",
    "OneHot": "y = OneHot (v, depth, on_off)",
    "NonZero": "y = NonZero (v)",
    "IsNaN": "y = IsNaN (v)",
    "Cast to string": "y = Cast <to = 8> (v)",
    "Hardmax": "y = Hardmax (v)",
    "Sign": "y = Sign (v)",
    "Unique": "y = Unique (v)",
    "CastLike": "y = CastLike (v, two)",
    "Unique of a vector": "r = Reshape (v, flat_shape) y, i, n = com.microsoft.Unique (r)",
    "Imputer": (
        "y = ai.onnx.ml.Imputer"
        " <imputed_value_floats = [5.0], replaced_value_float = -1.0> (v)"
    ),
    "Binarizer": "y = ai.onnx.ml.Binarizer <threshold = 1.0> (v)",
    "OneHotEncoder": "y = ai.onnx.ml.OneHotEncoder <cats_int64s = [1, 2]> (v)",
    "LabelEncoder": (
        "y = ai.onnx.ml.LabelEncoder"
        " <keys_floats = [1.0, 2.0], values_floats = [5.0, 6.0]> (v)"
    ),
    "LabelEncoder of texts": (
        "y = ai.onnx.ml.LabelEncoder"
        ' <keys_floats = [1.0, 2.0], values_strings = ["a", "b"]> (v)'
    ),
    "TreeEnsembleRegressor": (
        "y = ai.onnx.ml.TreeEnsembleRegressor <n_targets = 1, nodes_treeids = [0, 0, 0],"
        " nodes_nodeids = [0, 1, 2], nodes_featureids = [0, 0, 0],"
        ' nodes_values = [1.0, 0.0, 0.0], nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"],'
        " nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0],"
        " target_treeids = [0, 0], target_nodeids = [1, 2], target_ids = [0, 0],"
        " target_weights = [1.0, 2.0]> (v)"
    ),
    "GatherElements": "i = Cast <to = 7> (v) y = GatherElements (grid, i)",
    "GatherND": "i = Cast <to = 7> (v) r = Slice (i, at0, two, at1) y = GatherND (grid, r)",
    "ScatterElements": "i = Cast <to = 7> (v) y = ScatterElements (grid, i, ones)",
    "GridSample": "r = Reshape (v, four) y = GridSample (image, r)",
    "RoiAlign": (
        "r = Slice (v, at0, fours, at1)"
        " y = RoiAlign <sampling_ratio = 2> (image, r, zeros)"
    ),
    "DeformConv": "r = Reshape (v, offsets) y = DeformConv (photo, kernel, r)",
    "NonMaxSuppression": (
        "r = Slice (v, at0, fours, at1) b = Unsqueeze (r, at0)"
        " y = NonMaxSuppression (b, scores, two)"
    ),
}
CONSTANTS: dict[str, Array] = {
    "one": np.float32(1),
    "zero": np.float32(0),
    "two": np.int64([2]),
    "depth": np.float32(4),
    "on_off": np.float32([0, 1]),
    "flat": normal(9),
    "grid": normal(4, 6),
    "ones": np.ones((4, 6), np.float32),
    "at0": np.int64([0]),
    "at1": np.int64([1]),
    "fours": np.int64([4]),
    "four": np.int64([1, 2, 6, 2]),
    "image": normal(1, 2, 5, 5),
    "zeros": np.zeros(4, np.int64),
    "offsets": np.int64([1, 2, 4, 3]),
    "photo": normal(1, 2, 4, 3),
    "kernel": weight(3, 2, 1, 1),
    "scores": np.abs(normal(1, 1, 4)),
    "factor": np.float32([[1.5], [1], [2], [1]]),
    "shape": np.int64([4, 6]),
    "flat_shape": np.int64([-1]),
    "w": weight(6, 6),
}


def decided_by(reader: str, path: str) -> ModelProto:
    """A model in which a reader decides by v, which a path computes of x."""
    text = READERS[reader]
    used = {
        name: array
        for name, array in CONSTANTS.items()
        if set(f" {path} {text} ".replace(",", " ").replace(")", " ").split())
        & {name, f"({name}"}
    }
    # DeformConv exists since opset 19.
    model = parse(f"g (float[4,6] x) => (y) {{ {path} {text} }}", opset=19, **used)
    model.opset_import.add(domain="ai.onnx.ml", version=3)
    model.opset_import.add(domain="com.microsoft", version=1)
    return model


@loop_over("reader", {name: name for name in READERS})
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_readers_that_decide(config: QConfig, reader: str) -> None:
    path = (
        "[mul] h = Mul (x, factor) [add] s = Add (h, one) [move] v = Reshape (s, shape)"
    )
    plan = planned(decided_by(reader, path), config)
    assert_float(plan, "x", "h", "s", "v")
    for name in ("mul", "add", "move"):
        assert plan.kept[name].startswith(REASON)


@loop_over("reader", {name: name for name in READERS})
def test_decisions_are_those_of_the_float_model(reader: str) -> None:
    path = (
        "[mul] h = Mul (x, factor) [add] s = Add (h, one) [move] v = Reshape (s, shape)"
    )
    model = decided_by(reader, path)
    random = np.random.default_rng(3)
    feeds = [{"x": np.float32(random.integers(-1, 2, (4, 6)))} for _ in range(8)]
    result = quantize(model, feeds, TENSOR)
    for each in feeds:
        found, expected = run(result.model, each)[0], run(model, each)[0]
        if expected.dtype.kind == "f":  # the rows that an index picks are rounded
            np.testing.assert_allclose(found, expected, atol=0.05)
        else:
            np.testing.assert_array_equal(found, expected)


# Operators between


#: Operators that compute v (float[4,6]) of h.
BETWEEN = {
    "Add": "v = Add (h, one)",
    "Sub": "v = Sub (one, h)",
    "Div": "v = Div (h, factor)",
    "Neg": "v = Neg (h)",
    "Abs": "v = Abs (h)",
    "Clip": "v = Clip (h, zero, one)",
    "Relu": "v = Relu (h)",
    "Sigmoid": "v = Sigmoid (h)",
    "Tanh": "v = Tanh (h)",
    "Softmax": "v = Softmax (h)",
    "Floor": "v = Floor (h)",
    "Max": "v = Max (h, zero)",
    "Reshape": "v = Reshape (h, shape)",
    "Transpose": "v = Transpose (h)",
    "Slice": "v = Slice (h, at0, fours, at1)",
    "Split": "v, z = Split <axis = 1> (h, threes)",
    "Concat": "v = Concat <axis = 0> (h, h)",
    "Pad": "v = Pad (h, pads)",
    "Expand": "v = Expand (h, shape)",
    "ReduceMean": "v = ReduceMean <axes = [1]> (h)",
    "CumSum": "v = CumSum (h, axis)",
    "Where": "b = Cast <to = 9> (h) v = Where (b, h, zero)",
    "Gather": "v = Gather (h, two)",
    "LayerNormalization": "v = LayerNormalization (h, scale)",
}


@loop_over("step", BETWEEN)
@pytest.mark.parametrize("config", [TENSOR, POW2], ids=["tensor", "pow2"])
def test_operators_between_stay_float_too(config: QConfig, step: str) -> None:
    model = parse(
        f"g (float[4,6] x) => (y) {{ [mul] h = Mul (x, factor) {step} y = ArgMax (v) }}",
        **CONSTANTS,
        threes=np.int64([3, 3]),
        pads=np.int64([0, 0, 1, 1]),
        axis=np.int64(1),
        scale=np.ones(6, np.float32),
    )
    assert_float(planned(model, config), "x", "h", "v")


# Layers


LAYERS = {
    "MatMul": "[layer] h = MatMul (x, w)",
    "Gemm": "[layer] h = Gemm (x, w)",
    "Einsum": '[layer] h = Einsum <equation = "ij,jk->ik"> (x, w)',
    "Conv": "[layer] h = Conv (x, k)",
}


def scored(layer: str, tail: str = "p = Sigmoid (h) y = ArgMax (p)") -> ModelProto:
    rank = "float[1,3,4,4] x" if layer == "Conv" else "float[4,6] x"
    constants: dict[str, Array] = {"w": CONSTANTS["w"]}
    if layer == "Conv":
        constants = {"k": weight(4, 3, 1, 1)}
    return parse(f"g ({rank}) => (y) {{ {LAYERS[layer]} {tail} }}", **constants)


@loop_over("layer", {name: name for name in LAYERS})
def test_a_layer_is_quantized_and_its_result_is_not(layer: str) -> None:
    plan = planned(scored(layer))
    assert plan.quantized("x")
    assert plan.quantized("k" if layer == "Conv" else "w")
    assert "layer" not in plan.kept
    assert_float(plan, "h", "p")


@pytest.mark.parametrize(
    "config",
    [
        POW2,
        QConfig.of("BF16"),
        TENSOR.with_(target="stx"),
        TENSOR.with_(safe=False),
    ],
    ids=["pow2", "BF16", "target", "unsafe"],
)
def test_engines_that_round_every_result_keep_that_of_a_layer(config: QConfig) -> None:
    """A convolution without codes for its result cannot run on an integer engine."""
    assert planned(scored("Conv"), config).quantized("h")


def test_the_report_names_a_classifier_s_last_nodes() -> None:
    model = scored("Gemm", "[tail] p = Sigmoid (h) y = ArgMax (p)")
    feeds = [{"x": normal(4, 6, seed=at)} for at in range(8)]
    report = quantize(model, feeds, TENSOR).report
    assert report.kept_nodes["tail"].startswith(f"{REASON} (ArgMax)")
    assert report.operators["Gemm"] == (1, 1)


# Signals


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ("y, h", "h = Abs (x) y = ArgMax (h)"),
        ("y, s", "h = Abs (x) y = ArgMax (h) s = MatMul (h, w)"),
        ("y, v", "h = Abs (x) v, y = TopK (h, two)"),
        ("y, s", "h = Abs (x) y = Cast <to = 7> (h) s = Neg (h)"),
        ("y", "h = Abs (x) b = Greater (h, one) y = Where (b, h, zero)"),
        ("y", "h = Abs (x) n = Size (h) k = Neg (h) y = Mul (k, one)"),
    ],
    ids=["output", "layer", "values", "another", "both", "size"],
)
def test_a_signal_that_is_read_as_a_decision_as_well_is_quantized(
    outputs: str, text: str
) -> None:
    model = parse(f"g (float[4,6] x) => ({outputs}) {{ {text} }}", **CONSTANTS)
    assert planned(model).quantized("h")


@pytest.mark.parametrize(
    "like",
    [
        "c = CastLike (grid, v)",
        "c = EyeLike (v)",
        "c = RandomNormalLike (v)",
        "c = RandomUniformLike (v)",
    ],
)
def test_a_shape_or_a_type_that_is_read_is_no_signal(like: str) -> None:
    """The float result of the reader does not depend on the values of the labels."""
    path = f"[mul] v = Mul (x, factor) {like} z = MatMul (c, w)"
    plan = planned(decided_by("Cast to int64", path))
    assert_float(plan, "x", "v")


def test_codes_are_no_decisions() -> None:
    model = parse(
        """g (float[4,6] x) => (float[4,6] y) {
            h = Abs (x) q = QuantizeLinear (h, s, z) y = DequantizeLinear (q, s, z)
        }""",
        s=np.float32(0.1),
        z=np.uint8(0),
    )
    plan = make_plan(Graph.of(model), TENSOR.with_(keep_existing=True))
    assert not any(reason.startswith(REASON) for reason in plan.kept.values())


# Bodies and functions


def branch(inner: str, captured: str = "x") -> ModelProto:
    return parse(
        f"""g (float[N,16] x, bool c) => (float[N,16,8] y) {{
            {captured}
            y = If (c) <
                then_branch = a () => (float[N,16,8] p) {{ {inner} }},
                else_branch = b () => (float[N,16,8] q) {{
                    j = Cast <to = 7> (u) q = Gather (table, j)
                }}
            >
        }}""",
        table=TABLE,
        zero=np.float32(0),
        three=np.float32(3),
    )


@pytest.mark.parametrize(
    "preset", ["A8W8", "XINT8", "FP8E4M3", "BFP16", "W8", "DYNAMIC"]
)
@pytest.mark.parametrize(
    "model",
    [
        branch(
            "v = Add (u, zero) [clip] d = Clip (v, zero, three)"
            " i = Cast <to = 7> (d) p = Gather (table, i)",
            "u = Clip (x, zero, three)",
        ),
        parse(
            """g (float[N,16] x) => (float[N,16,8] y) {
                y = Loop (n, t, start) <body = l (int64 k, bool on, float[N,16,8] s) => (bool go, float[N,16,8] r) {
                    go = Identity (on) d = Clip (x, zero, three) i = Cast <to = 7> (d)
                    e = Gather (table, i) r = Add (s, e)
                }>
            }""",  # noqa: E501
            n=np.int64(1),
            t=np.bool_(True),
            start=np.zeros((1, 16, 8), np.float32),
            table=TABLE,
            zero=np.float32(0),
            three=np.float32(3),
        ),
        parse(
            """<ir_version: 8, opset_import: ["": 17, "own": 1]>
            g (float[N,16] x) => (float[N,16,8] y) { i = own.label (x) y = Gather (table, i) }
            <domain: "own", opset_import: ["": 17]>
            label (x) => (i) {
                low = Constant <value = float {0.0}> ()
                high = Constant <value = float {3.0}> ()
                c = Clip (x, low, high) i = Cast <to = 7> (c)
            }""",
        ),
    ],
    ids=["If", "Loop", "function"],
)
def test_labels_in_bodies_and_functions(model: ModelProto, preset: str) -> None:
    if not model.graph.initializer:
        model = parse_with_table(model)
    feeds = labels(8)
    if len(model.graph.input) == 2:
        feeds = [each | {"c": np.array(at % 2 == 1)} for at, each in enumerate(feeds)]
    result = quantize(model, feeds, preset)
    for sample in feeds:
        (rows,) = run(result.model, sample)
        nearest = ((rows[..., None, :] - TABLE) ** 2).sum(-1).argmin(-1)
        assert np.array_equal(nearest, sample["x"].clip(0, 3).astype(int))


def parse_with_table(model: ModelProto) -> ModelProto:
    """The model with the table, which the text of a model with functions cannot take along."""
    changed = ModelProto()
    changed.CopyFrom(model)
    changed.graph.initializer.extend(parse(LABELS, table=TABLE).graph.initializer)
    return changed


def test_the_tensors_of_a_body_that_an_outer_node_decides_by() -> None:
    model = parse(
        """g (float[4,6] x, bool c) => (int64[1,6] y) {
            v = If (c) <
                then_branch = a () => (float[4,6] p) { h = Abs (x) p = Neg (h) },
                else_branch = b () => (float[4,6] q) { k = Sigmoid (x) q = Neg (k) }
            >
            y = ArgMax (v)
        }"""
    )
    graph = Graph.of(model)
    for plan in (make_plan(graph, TENSOR), *all_plans(plan_bodies(graph, TENSOR))):
        assert_float(plan, "x", "h", "k", "p", "q", "v")


def test_a_table_of_positions_is_no_weight() -> None:
    """Weight-only and dynamic runs quantize tables, but not one that holds indices."""
    model = parse(
        """g (int64[N] t) => (float[N,8] y) {
            f = Gather (positions, t) i = Cast <to = 7> (f) y = Gather (table, i)
        }""",
        positions=np.arange(4000, dtype=np.float32) % 5,
        table=TABLE,
    )
    feeds = [{"t": np.arange(at, 4000, 40)} for at in range(4)]
    for preset in ("W8", "INT4", "DYNAMIC", "A8W8", "XINT8"):
        result = quantize(model, feeds, preset)
        for sample in feeds:
            (rows,) = run(result.model, sample)
            nearest = ((rows[..., None, :] - TABLE) ** 2).sum(-1).argmin(-1)
            assert np.array_equal(nearest, sample["t"] % 5), preset


# A mask decoder


def mask_decoder() -> ModelProto:
    """A mask decoder as in Segment Anything: points with labels -1 (padding), 0, 1, 2 and 3."""
    kinds = "\n".join(
        f"b{kind} = Equal (l, k{kind}) f{kind} = Cast <to = 1> (b{kind})"
        f" e{kind} = Mul (f{kind}, m{kind}) t{kind + 1} = Add (t{kind}, e{kind})"
        for kind in range(4)
    )
    return parse(
        f"""g (float[1,5,2] points, float[1,5] labels, float[1,16,8,8] image)
            => (float[1,6,8,8] masks) {{
            [pad_points] c = Concat <axis = 1> (points, origin)
            [pad_labels] n = Concat <axis = 1> (labels, padding)
            [column] l = Unsqueeze (n, last)
            s = Div (c, size) g = MatMul (s, gauss) a = Sin (g) b = Cos (g)
            p = Concat <axis = 2> (a, b)
            absent = Equal (l, nothing) present = Not (absent)
            fp = Cast <to = 1> (present) pp = Mul (p, fp)
            fa = Cast <to = 1> (absent) pa = Mul (fa, mp) t0 = Add (pp, pa)
            {kinds}
            q = MatMul (t4, wq) rows = Reshape (image, flat) k = Transpose <perm = [0, 2, 1]> (rows)
            z = MatMul (q, rows) r = Softmax (z) o = MatMul (r, k) u = MatMul (o, wo)
            v = Add (u, q) h = MatMul (v, rows) masks = Reshape (h, shape)
        }}""",
        **{f"k{kind}": np.float32(kind) for kind in range(4)},
        **{f"m{kind}": normal(1, 1, 16, seed=kind) for kind in range(4)},
        mp=normal(1, 1, 16, seed=9),
        origin=np.zeros((1, 1, 2), np.float32),
        padding=-np.ones((1, 1), np.float32),
        nothing=np.float32(-1),
        last=np.int64([2]),
        size=np.float32(64),
        gauss=normal(2, 8, seed=4),
        wq=weight(16, 16, seed=5),
        wo=weight(16, 16, seed=6),
        flat=np.int64([1, 16, 64]),
        shape=np.int64([1, 6, 8, 8]),
    )


def clicks(count: int) -> list[Feeds]:
    random = np.random.default_rng(1)
    return [
        {
            "points": np.float32(random.uniform(0, 64, (1, 5, 2))),
            "labels": np.float32(random.integers(-1, 4, (1, 5))),
            "image": np.float32(random.normal(0, 1, (1, 16, 8, 8))),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "FP8E4M3"])
def test_a_mask_decoder_knows_the_labels_of_its_points(preset: str) -> None:
    result = quantize(mask_decoder(), clicks(32), preset)
    for name in ("pad_labels", "column"):
        assert result.report.kept_nodes[name].startswith(f"{REASON} (Equal)")
    excluded = QConfig.of(preset).with_(exclude=("pad_labels", "column"))
    by_hand = quantize(mask_decoder(), clicks(32), excluded)
    assert result.report.worst_sqnr == pytest.approx(by_hand.report.worst_sqnr)
