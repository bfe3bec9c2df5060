"""Shape arithmetic: a tensor that is computed from sizes or integers and read as a shape is never
quantized.

The rule holds for any operator in between. The oracle is the shape that onnxruntime computes with
the float model.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import GPTQ, AdaRound, QConfig, compare, quantize
from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Graph, ShapeArithmetic
from quark_onnx.plan import Plan
from quark_onnx.planning.make_plan import make_plan
from tests.models import Array, Feeds, normal, parse, weight

PRESETS = ["A8W8", "XINT8"]
#: Sizes of the image; a sixteenth of each is what the operators below are applied to.
SIZES = [(17, 30), (21, 29), (31, 18)]

#: Operators between a size and what reads it, as ONNX text with the name of their input.
OPERATORS = {
    "Div": "Div (c3, {})",
    "Reciprocal": "Reciprocal ({})",
    "Clip": "Clip ({}, c01, c4)",
    "Pow": "Pow ({}, c15)",
    "Sqrt": "Sqrt ({})",
    "Abs": "Abs ({})",
    "Ceil": "Ceil ({})",
    "Floor": "Floor ({})",
    "Exp": "Exp ({})",
    "Log": "Log ({})",
    "Min": "Min ({}, c15)",
    "Max": "Max ({}, c12)",
    "ReduceMax": "ReduceMax <keepdims=1> ({})",
    "Mul": "Mul ({}, c12)",
    "Add": "Add ({}, c12)",
    "MatMul": "MatMul ({}, square)",
}
CONSTANTS: dict[str, Array] = {
    "c01": np.float32(0.1),
    "c12": np.float32(1.2),
    "c15": np.float32(1.5),
    "c3": np.float32(3),
    "c4": np.float32(4),
    "least": np.float32(0.6),
    "most": np.float32(3.3),
    "sixteenth": np.float32([1 / 16, 1 / 16]),
    "square": np.float32([[0.3, 0.6], [0.8, 0.2]]),
    "ones": np.float32([1, 1]),
    "i0": np.int64([0]),
    "i1": np.int64([1]),
    "i2": np.int64([2]),
    "i4": np.int64([4]),
    "i11": np.int64([1, 1]),
    "twenty": np.float32(20),
    "kernel": weight(1, 3, 3, 3),
}
HEAD = """
    c = Conv <pads = [1, 1, 1, 1]> (x, kernel)
    s = Shape (c)
    size = Slice (s, i2, i4, i0)
    f = Cast <to = 1> (size)
    u = Mul (f, sixteenth)
"""


def images(sizes: list[tuple[int, int]] = SIZES) -> list[Feeds]:
    return [{"x": normal(1, 3, *size, seed=at)} for at, size in enumerate(sizes)]


def pairs(consumer: str) -> ModelProto:
    """A model with an output for each pair of operators, resized to what they compute of the size
    of the image.
    """
    lines, outputs = list[str](), list[str]()
    for at, (first, second) in enumerate(product(OPERATORS, OPERATORS)):
        one, two, bounded, y = (
            f"{word}{at}" for word in ("one", "two", "bounded", "y")
        )
        lines += [
            f"a{at} = {OPERATORS[first].format('u')}",
            f"{one} = Expand (a{at}, i2)",
        ]  # after a reduction
        lines += [
            f"b{at} = {OPERATORS[second].format(one)}",
            f"{two} = Expand (b{at}, i2)",
        ]
        lines += [f"{bounded} = Clip ({two}, least, most)"]
        if consumer == "scales":
            lines += [f"scales{at} = Concat <axis = 0> (ones, {bounded})"]
            lines += [f'{y} = Resize <mode = "nearest"> (c, , scales{at})']
        else:
            lines += [
                f"large{at} = Mul ({bounded}, twenty)",
                f"whole{at} = Cast <to = 7> (large{at})",
            ]
            lines += [f"sizes{at} = Concat <axis = 0> (i11, whole{at})"]
            lines += [f'{y} = Resize <mode = "nearest"> (c, , , sizes{at})']
        outputs.append(f"float[1,1,A{at},B{at}] {y}")
    text = (
        f"g (float[1,3,H,W] x) => ({', '.join(outputs)}) {{ {HEAD} {' '.join(lines)} }}"
    )
    return parse(text, **CONSTANTS)


def shapes(model: ModelProto, feeds: list[Feeds]) -> list[list[tuple[int, ...]]]:
    session = open_session(model, optimize=False)
    return [[value.shape for value in session.run(None, each)] for each in feeds]


def assert_same_shapes(model: ModelProto, preset: str, feeds: list[Feeds]) -> Plan:
    result = quantize(model, feeds[:1], preset)
    assert shapes(result.model, feeds) == shapes(model, feeds)
    return result.plan


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("consumer", ["scales", "sizes"])
def test_whatever_computes_a_resize_is_exact(consumer: str, preset: str) -> None:
    """For every pair of operators in front of the scales or sizes of a Resize, and for several
    sizes of the image.
    """
    plan = assert_same_shapes(pairs(consumer), preset, images())
    assert plan.quantized("x") and plan.quantized("kernel")


def as_consumer(lines: str, output: str = "float[N] y") -> ModelProto:
    """A model in which a count ``n`` of one element and a float ``v`` of it are read."""
    return parse(
        f"""g (float[1,3,H,W] x) => ({output}) {{ {HEAD}
            r = Reciprocal (u)  e = Exp (r)  m = ReduceMax <keepdims = 1> (e)  v = Sqrt (m)
            large = Mul (v, ten)  n = Cast <to = 7> (large)
            flat = Reshape (c, minus)
            {lines} }}""",
        ten=np.float32([7.3]),
        minus=np.int64([-1]),
        zero=np.int64(0),
        values=np.float32([0, 1]),
        none=np.float32(0),
        last=np.int64([-1]),
        i3=np.int64([3]),
        **CONSTANTS,
    )


CONSUMERS = {
    "Reshape": (
        "k = Concat <axis = 0> (n, i1)  part = Slice (flat, i0, n)  y = Reshape"
        " (part, k)"
    ),
    "Expand": "one = ReduceMax <keepdims = 0> (flat)  y = Expand (one, n)",
    "Tile": "y = Tile (flat, n)",
    "Slice": "y = Slice (flat, i0, n)",
    "Pad": "p = Concat <axis = 0> (i0, n)  y = Pad (flat, p)",
    "Gather": "k = Range (zero, scalar, step)  y = Gather (flat, k)",
    "Range of floats": "fl = Squeeze (v)  y = Range (none, fl, c01)",
    "ConstantOfShape": (
        "zeros = ConstantOfShape (n)  part = Slice (flat, i0, n)  y = Add (zeros, part)"
    ),
    "TopK": "y, z = TopK (flat, n)",
    "OneHot": "d = Squeeze (large)  g = Floor (d)  y = OneHot (i2, g, values)",
    "Split": (
        "s1 = Shape (flat)  m1 = Sub (s1, n)  k = Concat <axis = 0> (n, m1)  y, z ="
        " Split <axis = 0> (flat, k)"
    ),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_whatever_reads_a_shape_reads_it_exactly(consumer: str, preset: str) -> None:
    """Each operator that reads a shape, a count, a bound or an index, behind operators of no list."""  # noqa: E501
    lines = CONSUMERS[consumer]
    if "scalar" in lines:
        lines = f"scalar = Squeeze (n)  step = Squeeze (i1)  {lines}"
    model = as_consumer(
        lines, "float[N,M] y" if consumer in ("Reshape", "OneHot") else "float[N] y"
    )
    assert_same_shapes(model, preset, images())


BODIES = {
    "an If captures what reads it": (
        """
        scales = Concat <axis = 0> (ones, v, v)
        y = If (yes) <
            then_branch = t () => (float[1,1,A,B] a) { a = Resize <mode = "nearest"> (c, , scales) },
            else_branch = e () => (float[1,1,C,D] b) { b = Identity (c) }>"""  # noqa: E501
    ),
    "an If computes it": (
        """
        scales = If (yes) <
            then_branch = t () => (float[4] a) { ra = Sqrt (v)  a = Concat <axis = 0> (ones, ra, v) },
            else_branch = e () => (float[4] b) { b = Concat <axis = 0> (ones, v, v) }>
        y = Resize <mode = "nearest"> (c, , scales)"""  # noqa: E501
    ),
    "all of it is inside": (
        """
        y = If (yes) <
            then_branch = t () => (float[1,1,A,B] a) {
                rel = Relu (c)  si = Shape (rel)  sp = Slice (si, i2, i4, i0)  sf = Cast <to = 1> (sp)
                q = Div (fifty, sf)  scales = Concat <axis = 0> (ones, q)
                a = Resize <mode = "nearest"> (rel, , scales)
            },
            else_branch = e () => (float[1,1,C,D] b) { b = Identity (c) }>"""  # noqa: E501
    ),
    "a Loop counts to it": (
        """
        rel = Relu (c)  total = ReduceMax <keepdims = 0> (rel)  trips = Squeeze (n)
        final, y = Loop (trips, yes, total) <
            body = step (int64 i, bool go, float state) => (bool again, float next, float each) {
                again = Identity (go)  next = Add (state, total)  each = Identity (next)
            }>"""
    ),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("way", BODIES)
def test_through_bodies(way: str, preset: str) -> None:
    """Shape arithmetic is followed into the bodies of If and Loop, and out of them."""
    model = as_consumer(
        BODIES[way], "float[N] y" if "Loop" in way else "float[1,1,P,Q] y"
    )
    model.graph.initializer.append(helper.make_tensor("yes", 9, [], [True]))
    model.graph.initializer.append(helper.make_tensor("fifty", 1, [1], [50.3]))
    assert_same_shapes(model, preset, images())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_range_of_floats_that_come_from_outside(preset: str) -> None:
    """A few values that are read as a shape stay exact even where they are an input of the model."""  # noqa: E501
    model = parse(
        """g (float start, float limit, float delta) => (float[N] y) {
            way = Sub (limit, start)  steps = Div (way, delta)  up = Ceil (steps)  count = Cast <to = 7> (up)
            one = Unsqueeze (count, axis)  z = Expand (delta, one)  r = Range (start, limit, delta)  y = Add (z, r)
        }""",  # noqa: E501
        axis=np.int64([0]),
    )
    values = [(1.0, 5.3, 2.0), (0.3, 7.1, 0.11), (2.0, 90.0, 1.7)]
    feeds: list[Feeds] = [
        {
            name: np.asarray(v, np.float32)
            for name, v in zip(("start", "limit", "delta"), each, strict=True)
        }
        for each in values
    ]
    assert_same_shapes(model, preset, feeds)


def planned(text: str, preset: str = "A8W8", **constants: Array) -> Plan:
    return make_plan(Graph.of(parse(text, **constants)), QConfig.of(preset))


@pytest.mark.parametrize("preset", PRESETS)
def test_constants_are_shared_with_a_signal(preset: str) -> None:
    """A constant that a signal reads rounded is exact for what computes a shape, and as a scale."""
    plan = planned(
        """g (float[1,3,H,W] x) => (float[1,3,A,B] y) {
            z = Mul (x, both)  s = Shape (z)  f = Cast <to = 1> (s)
            d = Div (f, both)  k = Abs (d)  n = Cast <to = 7> (k)
            r = Resize (z, , both)  y = Expand (r, n)
        }""",
        preset,
        both=np.float32([1, 1, 2.37, 1.93]).reshape(4),
    )
    by_kind = {node.op_type: node for node in plan.graph.nodes}
    assert plan.quantized("both", by_kind["Mul"]) and plan.quantized("z")
    assert not plan.quantized("both", by_kind["Div"]) and not plan.quantized(
        "both", by_kind["Resize"]
    )


def test_a_factor_computed_from_a_size_stays_float() -> None:
    """The scale of an attention is a few values computed from sizes alone.

    What it is multiplied by is a signal.
    """
    plan = planned(
        """g (float[1,N,8] q) => (float[1,N,8] y) {
            s = Shape (q)  i = Gather (s, last)  f = Cast <to = 1> (i)  root = Sqrt (f)  k = Reciprocal (root)
            r = Relu (q)  y = Mul (r, k)
        }""",  # noqa: E501
        "XINT8",
        last=np.int64(2),
    )
    assert not any(plan.quantized(name) for name in ("f", "root", "k"))
    assert plan.quantized("r") and plan.quantized("y")


SIGNALS = {
    "an embedding": (
        """g (int64[N] x) => (float[N,8] y) { e = Gather (table, x)  r = MatMul (e, w)  y = Relu (r) }""",  # noqa: E501
        "e",
    ),
    "an embedding of positions": (
        """g (float[N,8] x) => (float[N,8] y) {
            s = Shape (x)  n = Gather (s, zero)  p = Range (zero, n, one)  e = Gather (table, p)
            a = Add (x, e)  r = MatMul (a, w)  y = Relu (r)
        }""",
        "e",
    ),
    "a table in a Constant node": (
        """g (int64[N] x) => (float[N,4] y) {
            t = Constant <value = float[2,4] {1, 2, 3, 4, 5, 6, 7, 8}> ()  e = Gather (t, x)  r = MatMul (e, w4)
            y = Relu (r)
        }""",  # noqa: E501
        "e",
    ),
    "pixels": (
        """g (uint8[1,3,H,W] x) => (float[1,4,A,B] y) {
            f = Cast <to = 1> (x)  e = Div (f, most)  c = Conv (e, kernel)  y = Relu (c)
        }""",
        "e",
    ),
    "pixels whose classes are positions": (
        """g (uint8[1,3,H,W] x) => (float[A,8] y) {
            f = Cast <to = 1> (x)  e = Div (f, most)  c = Conv (e, kernel)  r = Relu (c)  m = GlobalMaxPool (r)
            v = Flatten (m)  i = ArgMax <axis = 1, keepdims = 0> (v)  y = Gather (table, i)
        }""",  # noqa: E501
        "e",  # r is read by ArgMax alone, and stays float for that
    ),
    "pixels that steer as well": (
        """g (uint8[1,3,H,W] x) => (float[1,4,A,B] y) {
            f = Cast <to = 1> (x)  e = Div (f, most)  mean = ReduceMean <keepdims = 0> (e)
            n = Cast <to = 7> (mean)  k = Unsqueeze (n, axis)  c = Conv (e, kernel)  r = Relu (c)  y = Expand (r, k)
        }""",  # noqa: E501
        "e",
    ),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", SIGNALS)
def test_integers_that_become_a_signal_are_quantized(name: str, preset: str) -> None:
    """A learned table or weight makes a signal of integers.

    Pixels are one for all that does not read a shape.
    """
    text, signal = SIGNALS[name]
    plan = planned(
        text,
        preset,
        table=weight(30, 8),
        w=weight(8, 8),
        w4=weight(4, 4),
        kernel=weight(4, 3, 3, 3),
        most=np.float32(255),
        zero=np.int64(0),
        one=np.int64(1),
        axis=np.int64([0]),
    )
    readers = plan.graph.consumers(signal)
    assert any(plan.quantized(signal, reader) for reader in readers)


def resized(scale: float) -> ModelProto:
    scales = np.float32([1, 1, scale, scale])
    return parse(
        """g (float[1,3,H,W] x) => (float[1,3,A,B] y) { y = Resize <mode = "nearest"> (x, , scales) }""",  # noqa: E501
        scales=scales,
    )


def test_compare_names_the_output_and_both_shapes() -> None:
    """Models whose outputs have other shapes are no stand-ins for each other."""
    with pytest.raises(
        ModelError, match=r"output 'y' has shape \(1, 3, 51, 90\).*\(1, 3, 34, 60\)"
    ):
        compare(resized(2), resized(3), images()[:1])


@pytest.mark.parametrize("preset", PRESETS)
def test_one_error_where_a_shape_is_rounded_after_all(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search and the accuracy gate name the output and both shapes, and write nothing."""
    model = as_consumer(
        'k = Concat <axis = 0> (ones, v, v)  y = Resize <mode = "nearest"> (c, , k)',
        "float[1,1,A,B] y",
    )
    monkeypatch.setattr(ShapeArithmetic, "reason", lambda *_: "")
    monkeypatch.setattr(ShapeArithmetic, "computed_by", lambda *_: "")
    monkeypatch.setattr(ShapeArithmetic, "exact_inputs", lambda *_: {})
    monkeypatch.setattr(ShapeArithmetic, "decision", lambda *_: None)
    config = QConfig.of(preset).with_(safe=False)
    with pytest.raises(
        ModelError, match=r"output 'y' has shape \(.* and \(1, 1, .*float model"
    ):
        quantize(model, images(), config)


def test_outputs_that_data_sizes_may_differ() -> None:
    """How many values a detector selects follows from the signal, so they may differ without an
    error.
    """
    text = """g (float[1,3,H,W] x) => (float[4,N] y) {
        b = Add (x, shift)  r = Relu (b)  p = NonZero (r)  y = Cast <to = 1> (p) }"""
    found = compare(
        parse(text, shift=np.float32(0)),
        parse(text, shift=np.float32(0.5)),
        images()[:1],
    )
    assert found.sqnr == -np.inf


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("optimizers", [(), (GPTQ(), AdaRound(iterations=4))])
def test_a_detector_that_selects_rows(optimizers: tuple[Any, ...], preset: str) -> None:
    """Search and optimizers meet other shapes than in float where the signal decides them, and that
    ends no run.
    """
    model = parse(
        """g (float[N,8] x) => (float[M,8] y) {
            h = MatMul (x, w)  r = Relu (h)  score = ReduceMax <keepdims = 0, axes = [1]> (r)
            whole = Sub (score, half)  over = Relu (whole)  p = NonZero (over)  i = Squeeze (p, axis)
            rows = Gather (r, i)  z = MatMul (rows, v)  y = Relu (z)
        }""",  # noqa: E501
        w=weight(8, 8),
        v=weight(8, 8, seed=1),
        half=np.float32(1.05),
        axis=np.int64([0]),
    )
    feeds: list[Feeds] = [{"x": normal(40, 8, seed=seed)} for seed in range(9)]
    result = quantize(model, feeds, QConfig.of(preset).with_(optimizers=optimizers))
    other = [
        a != b
        for a, b in zip(shapes(result.model, feeds), shapes(model, feeds), strict=True)
    ]
    assert any(other), "the test has nothing to show where both models select alike"
    told = any(
        "the data decides which rows it reads" in note for note in result.report.notes
    )
    assert told == bool(optimizers)
