"""composites: a function in several operators is quantized as the operator that computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.planning.make_plan import make_plan
from tests.cases import loop_over
from tests.models import normal, parse, run, weight
from tests.settings import POW2, TENSOR, WIDE

WIDTH = 16
#: From the sum s, of shape (N, 16), to the normalized n.
LAYER_NORMS = {
    "quotient": (
        "m = ReduceMean <axes = [-1]> (s) d = Sub (s, m) q = Pow (d, two) v ="
        " ReduceMean <axes = [-1]> (q) e = Add (v, small) r = Sqrt (e) c = Div (d, r)"
        " g = Mul (c, scale) n = Add (g, shift)"
    ),
    "reciprocal": (
        "m = ReduceMean <axes = [1]> (s) d = Sub (s, m) q = Mul (d, d) v ="
        " ReduceMean <axes = [1]> (q) e = Add (small, v) r = Sqrt (e) i ="
        " Reciprocal (r) c = Mul (i, d) g = Mul (scale, c) n = Add (shift, g)"
    ),
    "moments of TensorFlow": (
        "m = ReduceMean <axes = [1]> (s) d = Sub (s, m) q = Mul (d, d) v ="
        " ReduceMean <axes = [1]> (q) e = Add (v, small) r = Sqrt (e) i = Reciprocal"
        " (r) a = Mul (i, scale) f = Mul (s, a) o = Mul (m, a) b = Sub (shift, o) n ="
        " Add (f, b)"
    ),
    "moments of TensorFlow as sums": (
        "t = ReduceSum (s, last) m = Mul (t, inverse) q = Mul (s, s) z2 = ReduceSum (q,"
        " last) h = Mul (inverse, z2) o = Mul (m, m) v = Sub (h, o) e = Add (v, small) r"
        " = Sqrt (e) i = Reciprocal (r) a = Mul (i, scale) f = Mul (s, a) k = Mul (m, a)"
        " b = Sub (shift, k) n = Add (f, b)"
    ),
    "jax": (
        "t = ReduceSum <keepdims = 0> (s, last) q = Mul (s, s) z2 = ReduceSum <keepdims"
        " = 0> (q, last) h = Mul (z2, inverse) m = Mul (t, inverse) o = Mul (m, m) v ="
        " Sub (h, o) k = Max (zero, v) kr = Reshape (k, column) ke = Expand (kr, column)"
        " e = Add (ke, small) r = Sqrt (e) i = Reciprocal (r) a = Mul (i, scale) mr ="
        " Reshape (m, column) me = Expand (mr, column) d = Sub (s, me) c = Mul (d, a) n"
        " = Add (c, shift)"
    ),
    "difference of moments": (
        "m = ReduceMean <axes = [-1]> (s) q = Pow (s, two) h = ReduceMean <axes ="
        " [-1]> (q) o = Pow (m, two) v = Sub (h, o) k = Relu (v) e = Add (k, small) i ="
        " Pow (e, half_less) d = Sub (s, m) c = Mul (d, i) g = Mul (c, scale) n = Add"
        " (g, shift)"
    ),
    "torch.std": (
        "m = ReduceMean <axes = [-1]> (s) d = Sub (s, m) m2 = ReduceMean <axes = [-1]>"
        " (s) d2 = Sub (s, m2) q = Mul (d2, d2) v = ReduceMean <axes = [-1]> (q) z2 ="
        " Mul (v, sixteen) w2 = Div (z2, fifteen) r = Sqrt (w2) e = Add (r, small) c ="
        " Div (d, e) g = Mul (c, scale) n = Add (g, shift)"
    ),
}
RMS_NORMS = {
    "torch": (
        "q = Pow (s, two) v = ReduceMean <axes = [-1]> (q) e = Add (v, small) r ="
        " Sqrt (e) i = Reciprocal (r) c = Mul (s, i) n = Mul (scale, c)"
    ),
    "power": (
        "q = Mul (s, s) v = ReduceMean <axes = [-1]> (q) e = Add (v, small) r = Pow"
        " (e, half_less) n = Mul (s, r)"
    ),
    "sum": (
        "q = Mul (s, s) t = ReduceSum (q, last) v = Div (t, sixteen) e = Add (v, small)"
        " r = Sqrt (e) i = Reciprocal (r) a = Mul (i, scale) n = Mul (s, a)"
    ),
}
UNIT_LENGTHS = {
    "torch": (
        "l = ReduceL2 <axes = [-1]> (s) c = Clip (l, small) k = Shape (s) e = Expand"
        " (c, k) n = Div (s, e)"
    ),
    "plain": "l = ReduceL2 <axes = [-1]> (s) n = Div (s, l)",
    "root": (
        "q = Mul (s, s) v = ReduceSum (q, last) c = Max (v, small) r = Sqrt (c) i ="
        " Div (one, r) n = Mul (s, i)"
    ),
    "sum of squares": (
        "v = ReduceSumSquare <axes = [-1]> (s) e = Add (v, small) r = Sqrt (e) n ="
        " Div (s, r)"
    ),
}
GELUS = {
    "erf": (
        "a = Div (s, root) f = Erf (a) b = Add (f, one) c = Mul (s, b) n = Mul (c,"
        " half)"
    ),
    "cube of GPT-2": (
        "h = Mul (half, s) p = Pow (s, three) c = Mul (cubic, p) a = Add (s, c) f ="
        " Mul (factor, a) t = Tanh (f) o = Add (t, one) n = Mul (h, o)"
    ),
    "square": (
        "q = Mul (s, s) c = Mul (q, cubic) a = Add (one, c) b = Mul (s, factor) f ="
        " Mul (b, a) t = Tanh (f) o = Add (one, t) p = Mul (s, o) n = Mul (p, half)"
    ),
    "products": (
        "q = Mul (s, s) p = Mul (q, s) c = Mul (p, cubic) a = Add (s, c) f = Mul (a,"
        " factor) t = Tanh (f) o = Add (t, one) p2 = Mul (s, o) n = Mul (half, p2)"
    ),
    "jax": (
        "q = Mul (cubic, s) p = Mul (s, q) c = Mul (s, p) a = Add (s, c) f = Mul"
        " (factor, a) t = Tanh (f) o = Add (one, t) h = Mul (half, o) n = Mul (s, h)"
    ),
}
SOFTMAXES = {
    "plain": "x1 = Exp (s) t = ReduceSum (x1, last) n = Div (x1, t)",
    "shifted": (
        "m = ReduceMax <axes = [-1]> (s) d = Sub (s, m) x1 = Exp (d) t = ReduceSum (x1,"
        " last) i = Reciprocal (t) n = Mul (x1, i)"
    ),
    "jax": (
        "m = ReduceMax <axes = [-1], keepdims = 0> (s) k = Max (lowest, m) mr = Reshape"
        " (k, column) me = Expand (mr, column) d = Sub (s, me) x1 = Exp (d) t ="
        " ReduceSum <keepdims = 0> (x1, last) tr = Reshape (t, column) te = Expand (tr,"
        " column) n = Div (x1, te)"
    ),
}
ALL = {
    f"{function}: {name}": text
    for function, forms in (
        ("layer norm", LAYER_NORMS),
        ("RMS norm", RMS_NORMS),
        ("L2 norm", UNIT_LENGTHS),
        ("Gelu", GELUS),
        ("Softmax", SOFTMAXES),
    )
    for name, text in forms.items()
}
NUMBERS: dict[str, Any] = {
    "half": 0.5,
    "one": 1.0,
    "two": 2.0,
    "three": 3.0,
    "root": 2**0.5,
    "cubic": 0.044715,
    "factor": (2 / np.pi) ** 0.5,
    "half_less": -0.5,
    "zero": 0.0,
    "inverse": 1 / WIDTH,
    "fifteen": WIDTH - 1,
    "sixteen": WIDTH,
    "lowest": -np.inf,
}
CONSTANTS = {
    **{name: np.float32(value) for name, value in NUMBERS.items()},
    "small": np.float32(1e-6),
    "scale": 1 + normal(WIDTH, seed=3, scale=0.1),
    "shift": normal(WIDTH, seed=4, scale=0.1),
    "last": np.int64([-1]),
    "column": np.int64([4, 1]),
}


def block(function: str, opset: int = 13) -> ModelProto:
    """A residual sum s, a function from s to n, and a layer that reads n."""
    return parse(
        f"""g (float[4,{WIDTH}] x) => (float[4,8] y) {{
            [first] z = MatMul (x, w)
            [sum] s = Add (x, z)
            {function}
            [second] y = MatMul (n, u)
        }}""",
        opset=opset,
        w=weight(WIDTH, WIDTH),
        u=weight(WIDTH, 8, seed=1),
        **CONSTANTS,
    )


def wide(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Samples of a residual stream: one channel is 60 times as large as the others."""
    factors = np.ones(WIDTH, np.float32)
    factors[3] = 60
    return [
        {"x": normal(4, WIDTH, seed=seed + each) * factors} for each in range(count)
    ]


def sqnr(model: ModelProto, config: QConfig) -> float:
    done = quantize(model, wide(16), config.with_(search=0)).model
    signal = noise = 0.0
    for feeds in wide(8, seed=100):
        expected = run(model, feeds)[0].astype(np.float64)
        signal += float(np.sum(expected**2))
        noise += float(np.sum((expected - run(done, feeds)[0]) ** 2))
    return 10 * float(np.log10(signal / noise))


def kept(model: ModelProto, config: QConfig) -> set[str]:
    """The operator types of nodes that stay float as a part of a function."""
    graph = Graph.of(model)
    reasons = make_plan(graph, config).kept
    return {
        node.op_type
        for node in graph.nodes
        if reasons.get(node.name, "").startswith("it is a part of a decomposed")
    }


@loop_over("config", {"8": TENSOR, "pow2": POW2, "16": WIDE})
@loop_over("function", ALL)
def test_all_operators_of_a_function_stay_float(function: str, config: QConfig) -> None:
    model = block(function)
    # The sum before the function and the layers around it are no parts.
    inside = [
        node for node in model.graph.node if node.name not in ("sum", "first", "second")
    ]
    wanted = {node.op_type for node in inside} - {"Shape"}
    assert kept(model, config) == wanted


@pytest.mark.parametrize("function", ALL.values(), ids=list(ALL))
def test_a_tensor_that_others_read_is_no_inner_one(function: str) -> None:
    model = block(function)
    # The tensor that the second to last operator computes, which ends the function no more.
    inner = model.graph.node[-3].output[0]
    read = parse(
        f"g (float[4,{WIDTH}] t) => (float[4,{WIDTH}] other) {{ other = Neg (t) }}"
    )
    read.graph.node[0].input[0] = inner
    model.graph.node.append(read.graph.node[0])
    model.graph.output.extend(read.graph.output)
    # What comes before may still be a function: a layer norm without its shift.
    last = model.graph.node[-3]
    graph = Graph.of(model)
    reasons = make_plan(graph, TENSOR).kept
    [node] = [each for each in graph.nodes if each.outputs[0] == last.output[0]]
    assert not reasons.get(node.name, "").startswith("it is a part of a decomposed")


@pytest.mark.parametrize("config", [TENSOR, POW2], ids=["8", "pow2"])
@pytest.mark.parametrize("function", LAYER_NORMS.values(), ids=list(LAYER_NORMS))
def test_a_decomposed_layer_norm_is_as_accurate_as_the_operator(
    function: str, config: QConfig
) -> None:
    operator = block("n = LayerNormalization <epsilon = 1e-6> (s, scale, shift)", 17)
    assert sqnr(block(function), config) > sqnr(operator, config) - 0.5


@pytest.mark.parametrize("function", RMS_NORMS.values(), ids=list(RMS_NORMS))
def test_the_residual_stream_around_an_rms_norm_stays_float(function: str) -> None:
    model = block(function)
    graph = Graph.of(model)
    [total] = [node for node in graph.nodes if node.name == "sum"]
    assert "residual stream" in make_plan(graph, TENSOR).kept[total.name]
    assert total.name not in make_plan(graph, WIDE).kept


@pytest.mark.parametrize("preset", ["BF16", "DYNAMIC", "W8", "MX9"])
def test_formats_that_engines_compute_in_keep_their_operators(preset: str) -> None:
    assert not kept(block(LAYER_NORMS["quotient"]), QConfig.of(preset))


def test_unsafe_plans_quantize_every_operator() -> None:
    assert not kept(block(LAYER_NORMS["quotient"]), TENSOR.with_(safe=False))
