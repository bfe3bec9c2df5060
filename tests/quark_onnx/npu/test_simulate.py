"""The simulation: bit for bit what onnxruntime computes without its optimizations, and what the
engine's rules say.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper

from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.npu import Simulator, simulate
from quark_onnx.npu.integers.fixed import Fixed, rounded, summed, times, together
from quark_onnx.npu.integers.pools import engine_factor
from tests.cases import loop_over
from tests.models import Feeds, in_constant_nodes, normal, parse, run, samples, weight

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=40)
Codes = dict[str, NDArray[Any]]


def oracle(model: ModelProto, feeds: Feeds) -> Codes:
    """The codes of all tensors that onnxruntime rounds, optimizations disabled."""
    names = [
        node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"
    ]
    whole = ModelProto()
    whole.CopyFrom(model)
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return dict(zip(names, run(whole, feeds)[len(model.graph.output) :], strict=True))


def steps(found: Codes, wanted: Codes) -> NDArray[np.int64]:
    """By how many codes each element is off."""
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == wanted[name].dtype for name in wanted)
    return np.concatenate(
        [np.abs(found[name].astype(int) - wanted[name]).reshape(-1) for name in wanted]
    )


def xint8(model: ModelProto) -> ModelProto:
    config = QConfig.of("XINT8").with_(target="stx", search=0)
    return quantize(model, samples(model), config).model


def qdq(
    model: ModelProto, positions: dict[str, int], kind: type = np.int8, zero: int = 0
) -> ModelProto:
    """A float model with Q/DQ pairs at inputs, constants and the output ``y``.

    Args:
        positions: of each such tensor; biases, at 12 and beyond, are int32, other constants int8.
        kind: type of the codes of what is computed.
        zero: their zero point.
    """
    result, before, after = ModelProto(), list[onnx.NodeProto](), list[onnx.NodeProto]()
    result.CopyFrom(model)
    read = {name for node in model.graph.node for name in node.input}
    arrays = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    del result.graph.initializer[:]
    for value in [value for value in result.graph.input if value.name not in read]:
        result.graph.input.remove(value)
    constants = {
        name: array
        for name, array in arrays.items()
        if name in read and name not in positions
    }
    for name, position in positions.items():
        if name not in read and name != "y":
            continue
        constant, inner = name in arrays, f"{name}_float" if name == "y" else name
        codes = np.dtype(
            (np.int32 if position >= 12 else np.int8) if constant else kind
        )
        constants[f"{name}_scale"] = np.float32(2.0**-position)
        constants[f"{name}_zero"] = np.asarray(0 if constant else zero, codes)
        grid = [f"{name}_scale", f"{name}_zero"]
        if constant:
            limits = np.iinfo(codes)
            whole = np.rint(arrays[name].astype(np.float64) * 2.0**position).clip(
                limits.min, limits.max
            )
            constants[f"{name}_codes"] = whole.astype(codes)
        else:
            (after if name == "y" else before).append(
                helper.make_node("QuantizeLinear", [inner, *grid], [f"{name}_codes"])
            )
        out = name if name == "y" else f"{name}_read"
        (after if name == "y" else before).append(
            helper.make_node("DequantizeLinear", [f"{name}_codes", *grid], [out])
        )
    for node in result.graph.node:
        node.input[:] = [
            f"{name}_read" if name in positions else name for name in node.input
        ]
        node.output[:] = ["y_float" if name == "y" else name for name in node.output]
    nodes = [*before, *result.graph.node, *after]
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    result.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in constants.items()
    )
    return result


# Single operators: equal without exception

SINGLE = {
    "conv": "y = Conv <pads = [1,0,2,1]> (x, w, b)",
    "conv, strides and dilations": (
        "y = Conv <strides = [2,1], dilations = [1,2], pads = [2,2,0,1]> (x, w, b)"
    ),
    "conv, automatic pads": (
        'y = Conv <auto_pad = "SAME_LOWER", strides = [2,2]> (x, w, b)'
    ),
    "grouped": "y = Conv <group = 2> (x, w2, b)",
    "depthwise": "y = Conv <group = 4, pads = [1,1,1,1]> (x, w1, b)",
    "turned": (
        "y = ConvTranspose <strides = [2,2], pads = [1,0,0,1], output_padding = [1,0]>"
        " (x, w, b)"
    ),
    "turned, automatic": (
        'y = ConvTranspose <strides = [2,2], auto_pad = "SAME_UPPER"> (x, w, b)'
    ),
    "turned groups": "y = ConvTranspose <group = 2, dilations = [2,1]> (x, w2t, b)",
    "conv behind relu": "h = Conv (x, w, b) y = Relu (h)",
    "conv behind clip": "h = Conv (x, w, b) y = Clip (h, zero, six)",
    "conv behind leaky": "h = Conv (x, w, b) y = LeakyRelu <alpha = 0.1015625> (h)",
    "gemm": "f = Flatten (x) y = Gemm <transB = 1> (f, v, u)",
    "gemm, factors": (
        "f = Flatten (x) y = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (f, v, u)"
    ),
    "matmul": "y = MatMul (x, m)",
    "matmul of two": "t = Transpose <perm = [0,1,3,2]> (x) y = MatMul (x, t)",
    "add": "y = Add (x, x2)",
    "sub": "y = Sub (x, x2)",
    "mul": "y = Mul (x, x2)",
    "add a constant": "y = Add (x, c)",
    "concat": "y = Concat <axis = 1> (x, x2)",
    "max pool": (
        "y = MaxPool <kernel_shape = [3,2], strides = [2,1], pads = [1,0,1,1]> (x)"
    ),
    "max pool, ceil": (
        "y = MaxPool <kernel_shape = [3,3], strides = [2,2], ceil_mode = 1> (x)"
    ),
    "max pool, a window in the padding": (
        "y = MaxPool <kernel_shape = [2,2], strides = [3,2], pads = [0,0,1,0],"
        " ceil_mode = 1> (x)"
    ),
    "max pool, dilated": "y = MaxPool <kernel_shape = [2,2], dilations = [2,3]> (x)",
    "average pool": (
        "y = AveragePool <kernel_shape = [3,2], strides = [2,1], pads = [1,0,1,1]> (x)"
    ),
    "average pool, padding": (
        "y = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad ="
        " 1> (x)"
    ),
    "average pool, ceil": (
        "y = AveragePool <kernel_shape = [3,3], strides = [2,2], ceil_mode = 1> (x)"
    ),
    "average pool, a window beyond the padding": (
        "y = AveragePool <kernel_shape = [3,3], strides = [2,2], pads = [1,1,1,1],"
        " ceil_mode = 1, count_include_pad = 1> (x)"
    ),
    "average pool, same, padding": (
        "y = AveragePool <kernel_shape = [3,2], strides = [2,1], auto_pad ="
        ' "SAME_LOWER", count_include_pad = 1> (x)'
    ),
    "average pool, same": (
        "y = AveragePool <kernel_shape = [3,3], strides = [2,2], auto_pad ="
        ' "SAME_UPPER"> (x)'
    ),
    "global average": (
        "h = MaxPool <kernel_shape = [2,3]> (x) y = GlobalAveragePool (h)"
    ),
    "global max": "y = GlobalMaxPool (x)",
    "mean": "y = ReduceMean <axes = [1,-1], keepdims = 0> (x)",
    "pad": "y = Pad (x, room, three)",
    "pad, reflected": 'y = Pad <mode = "reflect"> (x, room)',
    "slice": "y = Slice (x, from, to, axis, step)",
    "reshape": "y = Reshape (x, shape)",
    "reshape by shape": (
        "s = Shape (x) g = Gather (s, one) j = Concat <axis = 0> (g, rest) y = Reshape"
        " (x, j)"
    ),
    "transpose": "y = Transpose <perm = [0,3,1,2]> (x)",
    "squeeze": "q = Unsqueeze (x, one) y = Squeeze (q, one)",
    "split": "a, d = Split <axis = 1> (x) y = Sub (a, d)",
    "depth to space": 'y = DepthToSpace <blocksize = 2, mode = "CRD"> (x)',
    "relu": "y = Relu (x)",
    "leaky": "y = LeakyRelu <alpha = 0.25> (x)",
    "prelu": "y = PRelu (x, slope)",
    "bounds": "l = Max (x, c) y = Min (l, six)",
    "leaky, a tenth": "y = LeakyRelu <alpha = 0.1> (x)",
    "hard sigmoid": "y = HardSigmoid <alpha = 0.125, beta = 0.5> (x)",
    "hard sigmoid, a sixth": "y = HardSigmoid <alpha = 0.16666667, beta = 0.5> (x)",
    "hard swish": "y = HardSwish (x)",
    "scaled": "y = Mul (x, tenth)",
    "identity": "y = Identity (x)",
}


def single(text: str) -> ModelProto:
    """A float graph on two inputs of shape 2 x 4 x 5 x 6, and all constants that the texts above
    name.
    """
    return parse(
        f"g (float[2,4,5,6] x, float[2,4,5,6] x2) => (float y) {{ {text} }}",
        w=weight(4, 4, 3, 3),
        w1=weight(4, 1, 3, 3),
        w2=weight(4, 2, 3, 2),
        w2t=weight(4, 2, 3, 2),
        b=normal(4),
        v=weight(7, 120),
        u=normal(7),
        m=weight(6, 3),
        c=normal(4, 1, 1),
        zero=np.float32(0),
        six=np.float32(0.8125),
        three=np.float32(0.75),
        tenth=np.float32(0.1),
        slope=np.float32([[[0.5]], [[0.25]], [[-1.0]], [[0.1015625]]]),
        room=np.int64([0, 1, 1, 2, 0, 0, 2, 1]),
        **{"from": np.int64([3, 5])},
        to=np.int64([0, -100]),
        axis=np.int64([1, 3]),
        step=np.int64([-2, -1]),
        shape=np.int64([0, -1, 3]),
        one=np.int64([1]),
        rest=np.int64([-1]),
    )


#: Where a float32 rounds: a division that it does as a product.
ROUNDS = {
    "global average of 30": "y = GlobalAveragePool (x)",
    "average of 15": "y = AveragePool <kernel_shape = [3,5]> (x)",
}
POSITIONS = {"x": 5, "x2": 7, "y": 4, "b": 12, "u": 12} | dict.fromkeys(
    ("w", "w1", "w2", "w2t", "v", "m", "c"), 7
)
FORMS: dict[str, tuple[type, int]] = {"int8": (np.int8, 0), "uint8": (np.uint8, 128)}


def wide(model: ModelProto) -> Feeds:
    """Inputs some of which lie beyond the codes."""
    random = np.random.default_rng(1)
    return {
        value.name: random.normal(0, 1.5, (2, 4, 5, 6)).astype(np.float32)
        for value in model.graph.input
    }


@loop_over("form", tuple(FORMS))
@loop_over("case", tuple(SINGLE))
def test_single_operators_are_equal_to_onnxruntime(case: str, form: str) -> None:
    model = qdq(single(SINGLE[case]), POSITIONS, *FORMS[form])
    wanted, found = oracle(model, wide(model)), simulate(model, wide(model))
    assert not steps(found.codes, wanted).any()
    assert np.unique(wanted["y_codes"]).size > 5  # the case is about something
    assert not found.inexact
    assert np.array_equal(found.outputs["y"], run(model, wide(model))[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ROUNDS)
def test_where_float32_rounds_only_ties_differ(case: str, form: str) -> None:
    model = qdq(single(ROUNDS[case]), POSITIONS, *FORMS[form])
    wanted = oracle(model, wide(model))
    assert np.mean(steps(simulate(model, wide(model)).codes, wanted) == 0) > 0.95
    assert not unexplained(model, wide(model), wanted)


def unexplained(model: ModelProto, feeds: Feeds, wanted: Codes) -> list[str]:
    """Codes that differ, each from inputs that are the same, although the exact number lies at no
    tie.
    """
    found, strange = simulate(model, feeds, codes=wanted).codes, list[str]()
    constants = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    for node in (node for node in model.graph.node if node.op_type == "QuantizeLinear"):
        off = found[node.output[0]] != wanted[node.output[0]]
        if not off.any():
            continue
        exact = simulate(model, feeds, codes=wanted, until=node.input[0]).outputs[
            node.input[0]
        ][off]
        units = exact.astype(np.float64) / constants[node.input[1]]
        distance = np.abs(units - np.floor(units) - 0.5)
        difference = (
            found[node.output[0]][off].astype(int) - wanted[node.output[0]][off]
        )
        if (distance > 1e-6 * np.maximum(1, np.abs(units))).any() or (
            np.abs(difference) > 1
        ).any():
            strange.append(f"{node.name}: {units} became {wanted[node.output[0]][off]}")
    return strange


# Resize: every way to find the nearest input


@loop_over("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@loop_over("way", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"])
@loop_over("factors", [(2, 3), (1, 0.5), (1.5, 2.2)])
def test_resize(way: str, rounding: str, factors: tuple[float, float]) -> None:
    attributes = (
        f'mode = "nearest", coordinate_transformation_mode = "{way}", nearest_mode ='
        f' "{rounding}"'
    )
    model = single(f"y = Resize <{attributes}> (x, , scales)")
    model.graph.initializer.append(
        numpy_helper.from_array(np.float32([1, 1, *factors]), "scales")
    )
    model = qdq(model, POSITIONS | {"y": 5})
    assert not steps(
        simulate(model, wide(model)).codes, oracle(model, wide(model))
    ).any()


def test_resize_to_sizes() -> None:
    model = single('y = Resize <mode = "nearest"> (x, , , sizes)')
    model.graph.initializer.append(
        numpy_helper.from_array(np.int64([2, 4, 7, 1]), "sizes")
    )
    model = qdq(model, POSITIONS | {"y": 5})
    assert not steps(
        simulate(model, wide(model)).codes, oracle(model, wide(model))
    ).any()


# Rounding, shifts, saturation: by hand


def pair(source: int, target: int, kind: type = np.int8, zero: int = 0) -> ModelProto:
    """Codes at one position become codes at another one."""
    model = parse("g (float[N] x) => (float[N] y) { y = Identity (x) }")
    return qdq(model, {"x": source, "y": target}, kind, zero)


@pytest.mark.parametrize(
    ("target", "rounding", "wanted"),
    [
        (0, "even", [-2, -2, -1, 0, 0, 0, 0, 0, 1, 2, 2]),
        (0, "up", [-2, -1, -1, 0, 0, 0, 0, 1, 1, 2, 2]),
        (1, "even", [-4, -3, -2, -1, 0, 0, 0, 1, 2, 3, 4]),
        (4, "even", [-32, -24, -16, -8, -4, 0, 4, 8, 16, 24, 32]),
        (7, "up", [-128, -128, -128, -64, -32, 0, 32, 64, 127, 127, 127]),
    ],
)
def test_ties_and_shifts_to_either_side(
    target: int, rounding: Any, wanted: list[int]
) -> None:
    model = pair(2, target)
    quarters = np.float32([-8, -6, -4, -2, -1, 0, 1, 2, 4, 6, 8]) / 4
    found = simulate(model, {"x": quarters}, rounding)
    assert found.codes["y_codes"].tolist() == wanted
    if rounding == "even":
        assert (
            found.codes["y_codes"].tolist()
            == oracle(model, {"x": quarters})["y_codes"].tolist()
        )


def test_constants_may_be_nodes() -> None:
    model = xint8(
        parse(
            "g (float[1,3,8,8] x) => (float y) { h = Conv (x, w, b) y = Relu (h) }",
            w=weight(4, 3, 3, 3),
            b=normal(4),
        )
    )
    (feeds,) = samples(model, 1)
    expected = simulate(model, feeds, "even")
    found = simulate(in_constant_nodes(model), feeds, "even")
    assert not steps(found.codes, expected.codes).any()
    assert np.array_equal(found.outputs["y"], expected.outputs["y"])


def test_unsigned_codes_around_128() -> None:
    found = simulate(
        pair(1, 0, np.uint8, 128), {"x": np.float32([-100, -0.5, 0.5, 1.5, 100])}, "up"
    )
    assert found.codes["x_codes"].tolist() == [0, 127, 129, 131, 255]
    assert found.codes["y_codes"].tolist() == [64, 128, 129, 130, 192]


def test_inputs_are_rounded_as_on_a_cpu() -> None:
    found = simulate(pair(0, 0), {"x": np.float32([-2.5, -1.5, 0.5, 2.5])}, "up")
    assert found.codes["x_codes"].tolist() == [-2, -2, 0, 2]


def test_the_bias_of_a_conv_is_finer_than_its_products() -> None:
    """Products at position 0 + 1, a bias of 2**-12, and an output of position 0: 0.5 plus the least
    bit is no tie.
    """
    text = "g (float[1,1,2] x) => (float[1,1,2] y) { y = Conv (x, w, b) }"
    model = qdq(
        parse(text, w=np.float32([[[0.5]]]), b=np.float32([2.0**-12])),
        {"x": 0, "w": 1, "b": 12, "y": 0},
    )
    assert simulate(model, {"x": np.float32([[[1, 2]]])}).codes["y_codes"].tolist() == [
        [[1, 1]]
    ]


@pytest.mark.parametrize(
    ("alpha", "exact"),
    [(26 / 256, [-10, -8, -1, 5]), (0.1, [-10, -7, -1, 5]), (0.125, [-12, -9, -1, 5])],
)
def test_leaky_relu_is_rounded_once(alpha: float, exact: list[int]) -> None:
    """-74 * 26 / 256 = -7.5156; -5 * float32(0.1) lies below -0.5, where float32 has a tie."""
    text = f"g (float[4] x) => (float[4] y) {{ y = LeakyRelu <alpha = {alpha}> (x) }}"
    model, feeds = (
        qdq(parse(text), {"x": 0, "y": 0}),
        {"x": np.float32([-100, -74, -5, 5])},
    )
    assert simulate(model, feeds, "up").codes["y_codes"].tolist() == exact
    [expected] = run(model, feeds)
    assert simulate(model, feeds).codes["y_codes"].tolist() == expected.tolist()


fixed_numbers = st.builds(
    Fixed,
    st.lists(st.integers(-(2**30), 2**30), min_size=3, max_size=3).map(np.array),
    st.integers(-6, 12),
    st.integers(1, 60),
)


def fractions(number: Fixed) -> list[Fraction]:
    return [
        Fraction(int(value)) / number.divisor / Fraction(2) ** number.position
        for value in number.values
    ]


@EXAMPLES
@given(fixed_numbers, st.integers(-80, 20))
def test_rounding_against_fractions(number: Fixed, position: int) -> None:
    units = [value * Fraction(2) ** position for value in fractions(number)]
    even, up = (rounded(number, position, way).tolist() for way in ("even", "up"))
    assert even == [round(unit) for unit in units]  # Python rounds a Fraction to even
    assert up == [floor(unit + Fraction(1, 2)) for unit in units]


@EXAMPLES
@given(fixed_numbers, fixed_numbers)
def test_sums_and_products_against_fractions(first: Fixed, second: Fixed) -> None:
    one, other = fractions(first), fractions(second)
    assert fractions(together(np.add, first, second)) == [
        a + b for a, b in zip(one, other, strict=True)
    ]
    assert fractions(together(np.maximum, first, second)) == list(map(max, one, other))
    if first.reach * second.reach < 2**60:
        assert fractions(times(first, second)) == [
            a * b for a, b in zip(one, other, strict=True)
        ]


def test_what_int64_cannot_hold_is_an_error() -> None:
    large = Fixed(np.array([2**40]), 0)
    for attempt in (
        lambda: rounded(large, 20, "up"),
        lambda: times(large, large),
        lambda: Fixed(large.values << 20, 0),
    ):
        with pytest.raises(OverflowError, match=r"it needs integers of \d+ bits"):
            attempt()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=1))
def test_every_float32_is_an_integer_under_a_position(values: list[float]) -> None:
    assert fractions(Fixed.exactly(np.float32(values))) == [
        Fraction(value) for value in values
    ]


def test_sums_that_float64_would_round() -> None:
    long = Fixed(np.full((1, 1024), 2**30 + 1), 0)
    with pytest.raises(OverflowError, match="71 bits, and float64 is exact up to 53"):
        summed(long, Fixed(long.values.T, 0), 1024, np.matmul)


# Averages of the engine


@pytest.mark.parametrize(
    ("kernel", "k", "n"),
    [
        ((3, 3), 7, 6),
        ((5, 5), 10, 8),
        ((6, 6), 7, 8),
        ((7, 7), 21, 10),
        ((14, 14), 21, 12),
        ((2, 2), 1, 2),
    ],
)
def test_engine_factors(kernel: tuple[int, int], k: int, n: int) -> None:
    assert engine_factor(kernel) == (kernel[0] * kernel[1], k, n)


def test_the_engine_multiplies_and_shifts() -> None:
    """Nine codes of 100 make 900; 900 * 7 / 64 = 98.4."""
    model = qdq(
        parse("g (float[1,1,3,3] x) => (float y) { y = GlobalAveragePool (x) }"),
        {"x": 0, "y": 0},
    )
    feeds = {"x": np.full((1, 1, 3, 3), 100, np.float32)}
    assert simulate(model, feeds).codes["y_codes"].item() == 100
    assert simulate(model, feeds, average="dpu").codes["y_codes"].item() == 98


@pytest.mark.parametrize("written", ["initializer", "node"])
def test_a_factor_that_the_model_has_is_not_applied_twice(written: str) -> None:
    """amd-quark's form: 49 * 21 / 1024 behind an average of 7 x 7, as the value of a Constant."""
    factor = 49 * 21 / 1024
    node = (
        f"factor = Constant <value = float {{{factor}}}> ()"
        if written == "node"
        else ""
    )
    text = (
        f"g (float[1,2,7,7] x) => (float y) {{ h = GlobalAveragePool (x) {node} y = Mul"
        " (h, factor) }"
    )
    constants = {"factor": np.float32(factor)} if written == "initializer" else {}
    model = qdq(parse(text, **constants), {"x": 4, "y": 6}, np.uint8, 128)
    feeds = {"x": normal(1, 2, 7, 7) + np.float32([[[[0.9]], [[-0.3]]]])}
    exact, engine = (
        simulate(model, feeds, average=each).codes["y_codes"]
        for each in ("exact", "dpu")
    )  # type: ignore[arg-type]
    assert exact.tolist() == engine.tolist() == oracle(model, feeds)["y_codes"].tolist()


def test_the_square_of_an_average_is_no_correction() -> None:
    """Nine codes of 100: 100**2 / 128 = 78.1; with the engine's factor 98.4**2 / 128 = 75.7."""
    model = qdq(
        parse(
            "g (float[1,1,3,3] x) => (float y)"
            " { h = GlobalAveragePool (x) y = Mul (h, h) }"
        ),
        {"x": 0, "y": -7},
    )
    feeds = {"x": np.full((1, 1, 3, 3), 100, np.float32)}
    assert simulate(model, feeds).codes["y_codes"].item() == 78
    assert simulate(model, feeds, average="dpu").codes["y_codes"].item() == 76


def test_the_engine_has_a_sixth_of_its_own() -> None:
    """2731 / 2**14, so that a gate is greater by 1/8192.

    The float32 sixth of the model differs from both.
    """
    text = (
        "g (float[1,256] x) => (float y) {{ y = HardSigmoid <alpha = {}, beta = 0.5>"
        " (x) }}"
    )
    x = np.arange(-128, 128, dtype=np.float32)[None] / 64
    sixth, found = Fraction(float(np.float32(1 / 6))), dict[str, list[int]]()
    model = qdq(parse(text.format("0.16666667")), {"x": 6, "y": 14}, np.int16)
    for gate, factor in (("exact", Fraction(1)), ("dpu", Fraction(2731 * 6, 1 << 14))):
        wanted = [
            round(
                min(max(Fraction(float(v)) * sixth + Fraction(1, 2), 0), 1)
                * factor
                * 2**14
            )
            for v in x[0]
        ]
        found[gate] = simulate(model, {"x": x}, gate=gate).codes["y_codes"][0].tolist()  # type: ignore[arg-type]
        assert found[gate] == wanted
    assert found["exact"] != found["dpu"]
    other = qdq(parse(text.format("0.2")), {"x": 6, "y": 7})
    codes = [
        simulate(other, {"x": x}, gate=gate).codes["y_codes"].tolist()
        for gate in ("exact", "dpu")
    ]  # type: ignore[arg-type]
    assert codes[0] == codes[1]


# What is computed in float


def bfloat16(x: float) -> float:
    """The nearest number with eight bits, ties to even, by exact fractions.

    The smallest numbers apart.
    """
    if not x:
        return x
    unit = Fraction(2) ** (floor(np.log2(abs(x))) - 7)
    return float(round(Fraction(x) / unit) * unit)


def engine_softmax(x: list[float]) -> list[float]:
    """Number by number, as amd-quark's graph has it."""
    powers = []
    for value in x:
        n = floor(bfloat16(value * bfloat16(1.4426950408889634)))
        rest = bfloat16(value - bfloat16(n * bfloat16(0.6931471805599453)))
        power = bfloat16(rest * 0.21875 + 0.486328125)
        power = bfloat16(rest * power + 1)
        powers.append(bfloat16(bfloat16(rest * power + 1) * 2.0**n))
    total = bfloat16(sum(powers))
    return [bfloat16(power / total) for power in powers]


def test_the_engine_takes_powers_by_a_polynomial() -> None:
    model = qdq(
        parse("g (float[2,5] x) => (float y) { y = Softmax <axis = -1> (x) }"),
        {"x": 3, "y": 7},
    )
    x = np.random.default_rng(3).integers(-40, 40, (2, 5)) / np.float32(8)
    [first, second] = (
        simulate(model, {"x": x}),
        simulate(model, {"x": x}, softmax="dpu"),
    )
    wanted = [
        np.rint(np.multiply(engine_softmax(row), 128)).clip(-128, 127)
        for row in x.tolist()
    ]
    np.testing.assert_array_equal(second.codes["y_codes"], wanted)
    assert first.inexact == ("y_codes",) and second.inexact == ()
    assert (
        0
        < np.abs(first.codes["y_codes"].astype(int) - second.codes["y_codes"]).max()
        <= 1
    )


def test_powers_that_the_engine_has_no_numbers_for() -> None:
    model = qdq(
        parse("g (float[1,2] x) => (float y) { y = Softmax <axis = -1> (x) }"),
        {"x": -3, "y": 7},
    )
    with pytest.raises(
        ModelError,
        match="cannot be simulated: its inputs reach from 8 to 400, and the engine",
    ):
        simulate(model, {"x": np.float32([[8, 400]])}, softmax="dpu")
    with pytest.raises(
        ConfigError, match="softmax is 'exact'; it is one of 'float', 'dpu'"
    ):
        simulate(model, {"x": np.float32([[8, 400]])}, softmax="exact")  # type: ignore[arg-type]


@pytest.mark.parametrize("operator", ["Softmax", "Sigmoid", "Tanh"])
def test_what_is_computed_in_float_is_marked(operator: str) -> None:
    model = qdq(
        parse(f"g (float[2,9] x) => (float[2,9] y) {{ y = {operator} (x) }}"),
        {"x": 4, "y": 7},
    )
    feeds = {"x": normal(2, 9, scale=2)}
    found = simulate(model, feeds, "up")
    assert found.inexact == ("y_codes",)
    assert not steps(found.codes, oracle(model, feeds)).any()


@pytest.mark.parametrize(
    "line",
    [
        "Elu (x)",
        "LogSoftmax <axis = 3> (x)",
        "LayerNormalization (x, w)",
        "InstanceNormalization (x, v, u)",
        'Resize <mode = "linear"> (x, , scales)',
    ],
)
def test_operators_without_documented_integers_are_computed_in_float(line: str) -> None:
    """By ONNX's definition: equal to onnxruntime but next to ties, and named as inexact."""
    size = 8 if "Resize" in line else 4
    model = qdq(
        parse(
            f"g (float[1,3,4,4] x) => (float[1,3,{size},{size}] y) {{ y = {line} }}",
            w=np.ones(4, np.float32),
            v=np.ones(3, np.float32),
            u=np.zeros(3, np.float32),
            scales=np.float32([1, 1, 2, 2]),
        ),
        {"x": 4, "y": 5},
    )
    feeds = {"x": normal(1, 3, 4, 4, scale=2)}
    found = simulate(model, feeds)
    assert found.inexact == ("y_codes",)
    assert steps(found.codes, oracle(model, feeds)).max() <= 1


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_log_softmax_before_opset_13_covers_all_axes_from_its_own(axis: int) -> None:
    text = f"g (float[2,3,4] x) => (float[2,3,4] y) {{ y = LogSoftmax <axis = {axis}> (x) }}"
    model = qdq(parse(text, opset=11), {"x": 4, "y": 4})
    feeds = {"x": normal(2, 3, 4, scale=2)}
    assert steps(simulate(model, feeds).codes, oracle(model, feeds)).max() <= 1


def test_a_linear_resize_by_a_fraction_has_the_sizes_of_onnxruntime() -> None:
    line = (
        'y = Resize <mode = "linear", coordinate_transformation_mode = "align_corners">'
        " (x, , scales)"
    )
    text = f"g (float[1,3,6,6] x) => (float[1,3,9,13] y) {{ {line} }}"
    model = parse(text, scales=np.float32([1, 1, 1.5, 2.2]))
    model = qdq(model, {"x": 4, "y": 4})
    feeds = {"x": normal(1, 3, 6, 6, scale=2)}
    assert steps(simulate(model, feeds).codes, oracle(model, feeds)).max() <= 1


@pytest.mark.parametrize(
    "line", ["ReduceSum <keepdims = 0> (x)", "ReduceMean <keepdims = 0> (x)"]
)
def test_a_scalar_has_codes_as_well(line: str) -> None:
    model = qdq(
        parse(f"g (float[2,9] x) => (float y) {{ y = {line} }}"), {"x": 4, "y": 1}
    )
    feeds = {"x": normal(2, 9, scale=2)}
    assert not steps(simulate(model, feeds).codes, oracle(model, feeds)).any()


def test_sums_are_exact() -> None:
    text = "g (float[2,9] x) => (float[2,1] y) { y = ReduceSum (x, axes) }"
    model = qdq(parse(text, axes=np.array([1])), {"x": 4, "y": 2})
    feeds = {"x": normal(2, 9, scale=2)}
    found = simulate(model, feeds)
    assert not found.inexact and not steps(found.codes, oracle(model, feeds)).any()


# Chains, as the quantizer makes them

ACTIVATIONS = [
    "",
    "Relu ({})",
    "Clip ({}, zero, six)",
    "LeakyRelu <alpha = 0.1015625> ({})",
]


@st.composite
def chains(draw: st.DrawFn) -> ModelProto:
    """A chain of operators on images, with a Gemm at its end."""
    lines, constants = (
        list[str](),
        dict[str, Any]({"zero": np.float32(0), "six": np.float32(6)}),
    )
    now, channels, size = (
        "x",
        draw(st.sampled_from([2, 4])),
        draw(st.sampled_from([8, 9])),
    )
    shape = f"1,{channels},{size},{size}"

    def write(text: str) -> str:
        name = f"t{len(lines)}"
        lines.append(f"{name} = {text}")
        return name

    def convolution(source: str, inputs: int, outputs: int, **attributes: Any) -> str:
        kernel, group, number = (
            attributes.pop("kernel", 1),
            attributes.get("group", 1),
            len(constants),
        )
        attributes["kernel_shape"] = [kernel, kernel]
        constants[f"w{number}"] = (
            weight(outputs, inputs // group, kernel, kernel, seed=number) * 1.5
        )
        constants[f"b{number}"] = normal(outputs, seed=number, scale=0.3)
        text = ", ".join(f"{name} = {value}" for name, value in attributes.items())
        return write(f"Conv <{text}> ({source}, w{number}, b{number})")

    for _ in range(draw(st.integers(1, 4))):
        kind = draw(
            st.sampled_from(
                ["conv", "conv", "add", "concat", "max", "average", "resize", "move"]
            )
        )
        if kind == "conv":
            step, wide = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
            group, pads = (
                draw(st.sampled_from([1, 2, channels])),
                [draw(st.integers(1, 2)) for _ in range(4)],
            )
            numbers = {
                "strides": [step] * 2,
                "dilations": [wide] * 2,
                "pads": [each + wide for each in pads],
            }
            now = convolution(now, channels, channels, kernel=3, group=group, **numbers)
            act = draw(st.sampled_from(ACTIVATIONS))
            now = write(act.format(now)) if act else now
        elif kind == "add":
            sum_ = write(
                f"{draw(st.sampled_from(['Add', 'Sub']))}"
                f" ({convolution(now, channels, channels)}, {now})"
            )
            now = write(f"Relu ({sum_})") if draw(st.booleans()) else sum_
        elif kind == "concat" and channels < 8:
            now, channels = (
                write(
                    f"Concat <axis = 1> ({now}, {convolution(now, channels, channels)})"
                ),
                2 * channels,
            )
        elif kind == "max":
            now = write(
                "MaxPool <kernel_shape = [3,3], strides = [2,1], pads = [1,1,1,1]>"
                f" ({now})"
            )
        elif kind == "average":
            include = draw(st.integers(0, 1))
            now = write(
                "AveragePool <kernel_shape = [2,3], pads = [1,1,0,1],"
                f" count_include_pad = {include}> ({now})"
            )
        elif kind == "resize":
            constants["scales"] = np.float32([1, 1, 2, 1])
            now = write(
                'Resize <mode = "nearest", coordinate_transformation_mode ='
                f' "asymmetric"> ({now}, , scales)'
            )
        else:
            constants["room"] = np.int64([0, 0, 1, 0, 0, 0, 0, 2])
            now = write(f"Transpose <perm = [0,1,3,2]> ({write(f'Pad ({now}, room)')})")
    constants["u"], constants["v"] = weight(channels, 5, seed=9), normal(5, seed=9)
    pooled = write(f"Flatten ({write(f'GlobalAveragePool ({now})')})")
    lines.append(f"y = Gemm ({pooled}, u, v)")
    return parse(
        f"g (float[{shape}] x) => (float[1,5] y) {{ {' '.join(lines)} }}", **constants
    )


@EXAMPLES
@given(chains(), st.integers(0, 9))
def test_chains_are_what_onnxruntime_computes(model: ModelProto, seed: int) -> None:
    used = {name for node in model.graph.node for name in node.input}
    for tensor in [
        tensor for tensor in model.graph.initializer if tensor.name not in used
    ]:
        model.graph.initializer.remove(tensor)
    quantized = xint8(model)
    [feeds] = samples(model, 1, seed=100 + seed)
    wanted = oracle(quantized, feeds)
    assert not unexplained(quantized, feeds, wanted)
    off = steps(simulate(quantized, feeds).codes, wanted)
    assert np.mean(off <= 1) >= 0.999


# Parts and errors


def test_until_stops_in_front_of_what_is_not_known() -> None:
    text = "g (float[1,4] x) => (float[1,4] y) { h = Relu (x) y = Erf (h) }"
    model = qdq(parse(text), {"x": 3, "y": 3})
    feeds = {"x": np.float32([[-1, 0.5, 1, 2]])}
    with pytest.raises(
        ModelError,
        match=(
            r"Erf 'Erf_y.*' cannot be simulated: no integer arithmetic .* until='h'"
            r" stops"
        ),
    ):
        simulate(model, feeds)
    found = simulate(model, feeds, until="h")
    assert found.outputs["h"].tolist() == [[0, 0.5, 1, 2]] and list(found.codes) == [
        "x_codes"
    ]


def test_other_scales_are_an_error_that_says_what_to_do() -> None:
    model = pair(2, 3)
    feeds = {"x": np.zeros(3, np.float32)}
    [scale] = [tensor for tensor in model.graph.initializer if tensor.name == "y_scale"]
    scale.CopyFrom(numpy_helper.from_array(np.float32(0.3), "y_scale"))
    with pytest.raises(
        ModelError,
        match=(
            r"S1 at .*: a scale of 0\.3 .*quark-onnx quantize FLOAT.onnx --preset XINT8"
        ),
    ):
        simulate(model, feeds)
    scale.CopyFrom(numpy_helper.from_array(np.float32([0.5, 0.25, 1]), "y_scale"))
    with pytest.raises(ModelError, match=r"S3 at .*: 3 scales"):
        simulate(model, feeds)


def test_float_where_integers_are_multiplied() -> None:
    model = qdq(
        parse(
            "g (float[1,1,2] x) => (float[1,1,2] y) { y = Conv (x, w) }",
            w=normal(1, 1, 1),
        ),
        {"w": 5, "y": 3},
    )
    with pytest.raises(ModelError, match="its input 'x' is float; quantize it, too"):
        simulate(model, {"x": np.zeros((1, 1, 2), np.float32)})


def test_settings_and_feeds() -> None:
    model, feeds = pair(2, 3), {"x": np.zeros(3, np.float32)}
    with pytest.raises(
        ConfigError, match="rounding is 'down'; it is one of 'even', 'up'"
    ):
        simulate(model, feeds, "down")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match="no node computes the tensor 'y_cods'; did you mean 'y_codes'",
    ):
        simulate(model, feeds, until="y_cods")
    with pytest.raises(ConfigError, match="'z_codes', which no QuantizeLinear writes"):
        simulate(model, feeds, codes={"z_codes": np.zeros(3, np.int8)})
    with pytest.raises(DataError, match="the input 'x' has no value"):
        simulate(model, {})
    with pytest.raises(DataError, match="infinite or no numbers"):
        simulate(model, {"x": np.float32([np.nan])})
    with pytest.raises(DataError, match=r"int64 of shape \(3,\), and int8"):
        simulate(model, feeds, codes={"x_codes": np.zeros(3, np.int64)})


def test_codes_of_another_machine_are_read_in_place_of_the_simulated_ones() -> None:
    found = simulate(
        pair(2, 3), {"x": np.zeros(2, np.float32)}, codes={"x_codes": np.int8([5, -7])}
    )
    assert found.codes["x_codes"].tolist() == [0, 0] and found.codes[
        "y_codes"
    ].tolist() == [10, -14]


def test_a_simulator_takes_many_samples() -> None:
    """No sample, codes or stop of an earlier run has an effect on a later one."""
    model = xint8(
        parse(
            """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
                a = Conv (x, w, b) r = Relu (a) y = Conv (r, v) }""",
            w=weight(4, 3, 1, 1),
            b=weight(4, seed=1),
            v=weight(4, 4, 1, 1, seed=2),
        )
    )
    first, second = samples(model, 2)
    simulator = Simulator(model, "up")
    codes = oracle(model, second)
    for feeds, more in (
        (first, {}),
        (second, {"codes": codes}),
        (second, {}),
        (first, {"until": next(iter(codes))}),
        (first, {}),
    ):
        found = simulator.run(feeds, **more)
        expected = simulate(model, feeds, "up", **more)
        assert found.codes.keys() == expected.codes.keys()
        for name, wanted in expected.codes.items():
            np.testing.assert_array_equal(found.codes[name], wanted)
        np.testing.assert_array_equal(
            [*found.outputs.values()], [*expected.outputs.values()]
        )
