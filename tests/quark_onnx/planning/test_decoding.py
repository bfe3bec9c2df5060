"""decoding: what makes coordinates of predictions stays float, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.plan import Plan
from quark_onnx.planning.make_plan import make_plan
from tests.models import normal, parse, run, samples, weight
from tests.settings import TENSOR, WIDE

XINT8 = QConfig.of("XINT8").with_(search=0)


def planned(model: ModelProto, config: QConfig = TENSOR) -> Plan:
    return make_plan(Graph.of(model), config)


def floats(plan: Plan) -> set[str]:
    """The nodes that stay float as a decoding of coordinates."""
    return {
        name
        for name, reason in plan.kept.items()
        if reason.startswith("decoding of coordinates")
    }


def priors() -> np.ndarray:
    """Centers of 4 x 4 cells of an image, as shares of it."""
    at = (np.arange(4, dtype=np.float32) + 0.5) / 4
    return np.stack(np.meshgrid(at, at), -1).reshape(1, 16, 2)


def ssd() -> ModelProto:
    """Boxes as SSD decodes them, and scores beside them."""
    return parse(
        """g (float[1,3,4,4] x) => (float[1,16,4] boxes, float[1,16,2] scores) {
            [location] l = Conv (x, wl)
            [relu] r = Relu (l)
            [transpose] t = Transpose <perm = [0, 2, 3, 1]> (r)
            [reshape] p = Reshape (t, four)
            [first] xy = Slice (p, zero, two, last)
            [second] wh = Slice (p, two, end, last)
            [variance] s = Mul (xy, tenth)
            [size] z = Mul (s, sizes)
            [center] c = Add (z, centers)
            [exp] e = Exp (wh)
            [extent] d = Mul (e, sizes)
            [half] h = Mul (d, half_)
            [low] a = Sub (c, h)
            [high] b = Add (c, h)
            [join] boxes = Concat <axis = 2> (a, b)
            [class] k = Conv (x, wc)
            [turn] u = Transpose <perm = [0, 2, 3, 1]> (k)
            [flat] v = Reshape (u, pair)
            [softmax] scores = Softmax (v)
        }""",
        wl=weight(4, 3, 1, 1),
        wc=weight(2, 3, 1, 1, seed=1),
        four=np.int64([1, 16, 4]),
        pair=np.int64([1, 16, 2]),
        zero=np.int64([0]),
        two=np.int64([2]),
        end=np.int64([4]),
        last=np.int64([2]),
        tenth=np.float32(0.1),
        half_=np.float32(0.5),
        sizes=np.full((1, 16, 2), 0.05, np.float32),
        centers=priors(),
    )


_MOVED = {"transpose", "reshape", "first", "second"}
_DECODED = {
    "variance",
    "size",
    "center",
    "exp",
    "extent",
    "half",
    "low",
    "high",
    "join",
}


@pytest.mark.parametrize(
    "config", [TENSOR, XINT8, XINT8.with_(target="stx"), QConfig.of("MX9")], ids=str
)
def test_boxes_of_priors_are_computed_in_float_and_scores_are_not(
    config: QConfig,
) -> None:
    plan = planned(ssd(), config)
    assert floats(plan) == _MOVED | _DECODED
    assert not any(plan.quantized(name) for name in ("boxes", "p", "z", "c", "e", "d"))
    assert not plan.quantized("centers", plan.graph.producer("c"))
    assert plan.quantized("scores") and plan.quantized("x") and plan.quantized("wl")
    assert plan.quantized("r") and not plan.quantized("l"), (
        "the Relu is fused into the layer"
    )


@pytest.mark.parametrize(
    "config",
    [TENSOR.with_(safe=False), WIDE, QConfig.of("W8")],
    ids=["unsafe", "16", "W8"],
)
def test_nothing_is_kept_where_it_is_not_needed_or_not_wanted(config: QConfig) -> None:
    assert not floats(planned(ssd(), config))


def test_boxes_come_nearer_to_those_of_the_float_model() -> None:
    model = ssd()
    data = samples(model, 16)
    worst = {}
    for safe in (True, False):
        found = quantize(model, data, TENSOR.with_(safe=safe)).model
        errors = [
            np.abs(run(found, feeds)[0] - run(model, feeds)[0]).max() for feeds in data
        ]
        worst[safe] = max(errors)
    assert worst[True] < worst[False] / 2


def test_the_step_of_what_a_layer_predicts_is_all_that_is_left() -> None:
    """The result is the float decoding of rounded predictions, in float64."""
    model = ssd()
    data = samples(model, 4)
    found = quantize(model, data, TENSOR).model
    predictions = parse(
        "g (float[1,3,4,4] x) => (float[1,4,4,4] r) { l = Conv (x, wl) r = Relu (l) }",
        wl=weight(4, 3, 1, 1),
    )
    for feeds in data:
        p = (
            run(predictions, feeds)[0]
            .astype(np.float64)
            .transpose(0, 2, 3, 1)
            .reshape(1, 16, 4)
        )
        center, half = (
            p[..., :2] * 0.1 * 0.05 + priors(),
            np.exp(p[..., 2:]) * 0.05 * 0.5,
        )
        expected = np.concatenate([center - half, center + half], 2)
        assert np.abs(run(model, feeds)[0] - expected).max() < 1e-6
        step = (
            p.max() / 127
        )  # and what the rounding of x and of the weights makes of it
        assert np.abs(run(found, feeds)[0] - expected).max() < 4 * step * half.max()


def test_a_grid_that_is_computed_from_sizes_counts() -> None:
    plan = planned(
        parse(
            """g (float[1,3,H,W] x) => (float[1,2,H,W] y) {
                [conv] h = Conv (x, w)
                [shape] s = Shape <start = 2> (x)
                [ones] o = ConstantOfShape <value = float[1] {1.0}> (s)
                [count] g = CumSum (o, axis)
                [grid] y = Add (h, g)
            }""",
            w=weight(2, 3, 1, 1),
            axis=np.int64(0),
        )
    )
    assert "grid" in floats(plan) and "conv" not in plan.kept


def test_corners_of_a_center_and_a_size_stay_float() -> None:
    """As DETR decodes boxes: without priors."""
    model = parse(
        """g (float[N,8] x) => (float[N,4] y) {
            [fc] h = MatMul (x, w)
            [sigmoid] p = Sigmoid (h)
            [split] c, s = Split <axis = 1> (p, sizes)
            [half] d = Mul (s, half_)
            [low] a = Sub (c, d)
            [high] b = Add (c, d)
            [join] y = Concat <axis = 1> (a, b)
        }""",
        w=weight(8, 4),
        sizes=np.int64([2, 2]),
        half_=np.float32(0.5),
    )
    assert floats(planned(model)) == {"sigmoid", "split", "half", "low", "high", "join"}


HEADS = {
    "bias and residual": "b = Add (h, bias) c = Add (b, x) y = Mul (c, scale)",
    "joined halves": (
        "l, r = Split <axis = 1> (h, sizes) s = Sigmoid (l) y = Concat <axis = 1>"
        " (s, r)"
    ),
    "softmax in parts": (
        "e = Exp (h) s = ReduceSum <keepdims = 1> (e, axis) y = Div (e, s)"
    ),
    "one factor": "b = Mul (h, factor) y = Add (b, row)",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_other_heads_are_quantized(head: str) -> None:
    text = f"g (float[N,4] x) => (float[N,4] y) {{ h = MatMul (x, w) {head} }}"
    constants = {
        "w": weight(4, 4),
        "bias": normal(4),
        "scale": normal(1, 4),
        "sizes": np.int64([2, 2]),
        "axis": np.int64([1]),
        "factor": np.float32(2),
        "row": normal(1, 4),
    }
    used = {
        name: value
        for name, value in constants.items()
        if name in text.replace(",", " ").replace(")", " ").split()
    }
    assert not floats(planned(parse(text, **used)))


def test_arithmetic_before_a_layer_is_quantized() -> None:
    """Positions that are added to features, which a layer reads."""
    body = "h = MatMul (x, w) p = Add (h, positions) e = Exp (p) y = MatMul (e, w)"
    text = f"g (float[1,4,8] x) => (float[1,4,8] y) {{ {body} }}"
    assert not floats(planned(parse(text, w=weight(8, 8), positions=normal(1, 4, 8))))


def test_a_graph_without_layers_has_no_predictions() -> None:
    text = "g (float[1,4,8] x) => (float[1,4,8] y) { y = Mul (x, window) }"
    assert not floats(planned(parse(text, window=normal(1, 4, 8))))
