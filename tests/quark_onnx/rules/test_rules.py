"""What each rule decides, on one to three nodes, as the plan's own text.

Q and W stand for 8-bit activations and weights with one scale a tensor, ``<`` for an input and
``>`` for a result.
"""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from quark_onnx import QConfig
from quark_onnx.common.registry import RULES
from quark_onnx.graph import Graph
from quark_onnx.plan import explain
from quark_onnx.planning.make_plan import make_plan
from tests.models import Array, normal, parse, weight
from tests.settings import CHANNEL, POW2, TENSOR, WIDE

Q, W = "quantize uint8 asymmetric minmax", "quantize int8 symmetric minmax"
W_AXIS = "quantize int8 symmetric axis {} minmax"


def plan_text(text: str, config: QConfig = TENSOR, **constants: Any) -> str:
    plan = make_plan(Graph.of(parse(text, **constants)), config)
    return explain(plan).replace(Q, "Q").replace(W, "W") + "\n"


def check(expected: str, text: str, config: QConfig = TENSOR, **constants: Any) -> None:
    assert plan_text(text, config, **constants) == dedent(expected).lstrip("\n")


# Layers

FMAP = "float[N,4,8,8]"
CONV_W, CONV_B = weight(4, 4, 1, 1), normal(4)


def test_conv() -> None:
    check(
        """
        conv (Conv)
          < x: Q
          < w: W
          < b: bias of x and w
          > y: Q
        """,
        f"g ({FMAP} x) => ({FMAP} y) {{ [conv] y = Conv (x, w, b) }}",
        w=CONV_W,
        b=CONV_B,
    )


def test_a_computed_weight_is_an_activation() -> None:
    check(
        """
        conv (Conv)
          < x: Q
          < w: Q
          < b: bias of x and w
          > y: Q
        """,
        f"g ({FMAP} x, float[4,4,1,1] w) => ({FMAP} y) {{ [conv] y = Conv (x, w, b) }}",
        b=CONV_B,
    )


@pytest.mark.parametrize(
    ("call", "x", "y", "shape", "axis"),
    [
        ("Conv (x, w)", "float[N,3,8]", "[N,4,8]", (4, 3, 1), 0),
        ("Conv (x, w)", "float[N,3,8,8]", "[N,4,8,8]", (4, 3, 1, 1), 0),
        ("Conv (x, w)", "float[N,3,8,8,8]", "[N,4,8,8,8]", (4, 3, 1, 1, 1), 0),
        ("Conv <group = 2> (x, w)", "float[N,6,8,8]", "[N,4,8,8]", (4, 3, 1, 1), 0),
        ("Conv <group = 4> (x, w)", "float[N,4,8,8]", "[N,4,8,8]", (4, 1, 1, 1), 0),
        ("ConvTranspose (x, w)", "float[N,3,8,8]", "[N,4,8,8]", (3, 4, 1, 1), 1),
        (
            "ConvTranspose <group = 2> (x, w)",
            "float[N,6,8,8]",
            "[N,4,8,8]",
            (6, 2, 1, 1),
            1,
        ),
        ("Gemm (x, w)", "float[N,3]", "[N,4]", (3, 4), 1),
        ("Gemm <transB = 1> (x, w)", "float[N,3]", "[N,4]", (4, 3), 0),
        ("MatMul (x, w)", "float[N,3]", "[N,4]", (3, 4), 1),
        ("MatMul (w, x)", "float[3,N]", "[4,N]", (4, 3), 0),
        ("MatMul (w, x)", "float[2,3,N]", "[2,4,N]", (2, 4, 3), 1),
    ],
)
def test_the_axis_of_the_output_channels(
    call: str, x: str, y: str, shape: tuple[int, ...], axis: int
) -> None:
    text = plan_text(
        f"g ({x} x) => (float{y} y) {{ {call.join(('y = ', ''))} }}",
        CHANNEL,
        w=weight(*shape),
    )
    assert f"< w: {W_AXIS.format(axis)}" in text
    assert shape[axis] in (
        4,
        2,
    ), "the axis has one entry for each output channel, of a group if there are groups"


def test_a_stack_of_matrices_has_one_scale() -> None:
    """Integer kernels take no more, and channels of equal range need no more."""
    text = "g (float[2,N,64] x) => (float[2,N,4] y) { [fc] y = MatMul (x, w) }"
    stack = weight(2, 64, 4)
    assert plan_text(text, CHANNEL, w=stack) == "fc (MatMul)\n  < x: Q\n  < w: W\n"
    stack[1] /= 100
    assert "< w: quantize int8 symmetric each output channel" in plan_text(
        text, CHANNEL, w=stack
    )


def test_gemm_leaves_its_result_to_its_readers() -> None:
    check(
        """
        fc (Gemm)
          < x: Q
          < w: W
          < b: bias of x and w
        """,
        "g (float[N,6] x) => (float[N,3] y) { [fc] y = Gemm (x, w, b) }",
        w=weight(6, 3),
        b=normal(3),
    )


@pytest.mark.parametrize(
    ("call", "bias"),
    [
        ("Gemm <alpha = 2.0> (x, w, b)", (3,)),
        ("Gemm <beta = 2.0> (x, w, b)", (3,)),
        ("Gemm (x, w, b)", ()),
    ],
    ids=["alpha", "beta", "scalar"],
)
def test_a_scaled_or_broadcast_bias_stays_float(
    call: str, bias: tuple[int, ...]
) -> None:
    check(
        """
        fc (Gemm)
          < x: Q
          < w: W
        """,
        f"g (float[N,6] x) => (float[N,3] y) {{ [fc] y = {call} }}",
        w=weight(6, 3),
        b=normal(*bias),
    )


def test_integer_only_hardware_gets_the_result_too() -> None:
    check(
        """
        fc (MatMul)
          < x: quantize int8 symmetric pow2 minmse
          < w: quantize int8 symmetric pow2 minmse
          > y: quantize int8 symmetric pow2 minmse
        """,
        "g (float[N,6] x) => (float[N,3] y) { [fc] y = MatMul (x, w) }",
        POW2,
        w=weight(6, 3),
    )


def test_biases_can_be_left_float() -> None:
    text = plan_text(
        f"g ({FMAP} x) => ({FMAP} y) {{ [conv] y = Conv (x, w, b) }}",
        TENSOR.with_(bias=False),
        w=CONV_W,
        b=CONV_B,
    )
    assert "< w: W" in text and "< b: float bias of x and w" in text


# Activation functions


def test_relu_is_fused_into_its_layer() -> None:
    check(
        """
        conv (Conv)
          < x: Q
          < w: W
          > h: float: fused into relu (Relu)
        relu (Relu)
          < h: float: fused into relu (Relu)
          > y: Q
        """,
        f"g ({FMAP} x) => ({FMAP} y) {{ [conv] h = Conv (x, w) [relu] y = Relu (h) }}",
        w=CONV_W,
    )


@pytest.mark.parametrize("reason", ["output", "reader"])
def test_relu_is_not_fused_if_its_input_is_needed(reason: str) -> None:
    outputs, extra = (
        (f", {FMAP} h", "")
        if reason == "output"
        else (f", {FMAP} z", "[n] z = Neg (h)")
    )
    text = plan_text(
        f"g ({FMAP} x) => ({FMAP} y{outputs}) {{ [conv] h = Conv (x, w) [relu] y = Relu"
        f" (h) {extra} }}",
        w=CONV_W,
    )
    assert "relu (Relu)\n  < h: Q\n  > y: Q\n" in text


@pytest.mark.parametrize("op", ["Relu (x)", "Clip (x, k)", "Where (m, x, k)"])
def test_between_floats_an_operator_that_follows_its_inputs_is_float(op: str) -> None:
    text = plan_text(
        f"g (float[N,6] x, bool[N,6] m) => (float[N,6] y) {{ [op] y = {op} }}",
        TENSOR.with_(follow_inputs=("Relu", "Clip", "Where")),
        k=np.float32(0.5),
    )
    assert text.endswith(
        "float: its input is float, and its operator type follows it\n"
    )


@pytest.mark.parametrize("op", ["Relu (h)", "Clip (h, k)", "Where (m, h, h)"])
def test_after_a_quantized_input_an_operator_that_follows_it_is_quantized(
    op: str,
) -> None:
    text = plan_text(
        f"""g (float[N,6] x, bool[N,6] m) => (float[N,6] y)
        {{ h = Sigmoid (x) z = Neg (h) [op] y = {op} }}""",
        TENSOR.with_(follow_inputs=("Relu", "Clip", "Where")),
        k=np.float32(0.5),
    )
    assert text.endswith("  > y: Q\n")


def test_a_following_relu_of_a_layer_is_quantized() -> None:
    text = plan_text(
        f"g ({FMAP} x) => ({FMAP} y) {{ [conv] h = Conv (x, w) [relu] y = Relu (h) }}",
        TENSOR.with_(follow_inputs=("Relu",)),
        w=CONV_W,
    )
    assert "fused into relu (Relu)\n  > y: Q\n" in text


@pytest.mark.parametrize("op", ["Relu", "Clip", "LeakyRelu", "HardSwish", "PRelu"])
def test_input_and_result(op: str) -> None:
    inputs = "x, k" if op == "PRelu" else "x"
    text = plan_text(
        f"g (float[N,6] x) => (float[N,6] y) {{ [op] y = {op} ({inputs}) }}",
        k=np.float32([0.1]),
    )
    slope = "  < k: Q\n" if op == "PRelu" else ""
    assert text == f"op ({op})\n  < x: Q\n{slope}  > y: Q\n"


@pytest.mark.parametrize(
    ("op", "low", "high"),
    [("Sigmoid", 0, 1), ("HardSigmoid", 0, 1), ("Softmax", 0, 1), ("Tanh", -1, 1)],
)
def test_a_result_whose_bounds_are_known_has_no_calibrator(
    op: str, low: int, high: int
) -> None:
    text = plan_text(f"g (float[N,6] x) => (float[N,6] y) {{ [op] y = {op} (x) }}")
    assert (
        text
        == f"op ({op})\n  < x: Q\n  > y: quantize uint8 asymmetric [{low}, {high}]\n"
    )


# Arithmetic

TWO = "g (float[N,6] x, float[N,6] z) => (float[N,6] y)"


def test_a_denominator_stays_float() -> None:
    """A few codes do not tell the smallest ones apart, which decide over the result."""
    body = f"{TWO} {{ [op] y = Div (x, z) }}"
    reason = "it is a denominator: the smallest ones matter most"
    assert plan_text(body) == f"op (Div)\n  < x: Q\n  < z: float: {reason}\n  > y: Q\n"
    assert (
        plan_text(body, TENSOR.with_(safe=False))
        == "op (Div)\n  < x: Q\n  < z: Q\n  > y: Q\n"
    )


def test_cubic_interpolation_stays_float() -> None:
    text = plan_text(
        "g (float[N,4,8,8] x) => (float[N,4,16,16] y) { [op] y = Resize <mode ="
        ' "cubic"> (x, , scales) }',
        scales=np.float32([1, 1, 2, 2]),
    )
    assert (
        text == "op (Resize)  float: onnxruntime has no integer cubic interpolation\n"
    )


@pytest.mark.parametrize("call", ["Add (x, z)", "Sub (x, z)", "Mul (x, z)"])
def test_arithmetic(call: str) -> None:
    assert (
        plan_text(f"{TWO} {{ [op] y = {call} }}")
        == f"op ({call[:3]})\n  < x: Q\n  < z: Q\n  > y: Q\n"
    )


def test_where() -> None:
    check(
        """
        pick (Where)
          < x: Q
          < z: Q
          > y: Q
        """,
        "g (float[N,6] x, float[N,6] z, bool[N,6] c) => (float[N,6] y) { [pick] y ="
        " Where (c, x, z) }",
    )


@pytest.mark.parametrize("call", ["Add (x, k)", "Where (c, x, k)", "Mul (k, x)"])
def test_masks_stay_float(call: str) -> None:
    text = f"g (float[N,6] x, bool[N,6] c) => (float[N,6] y) {{ [op] y = {call} }}"
    reason = "'k' holds values that mean 'never'; no scale spans them and real values"
    assert (
        plan_text(text, k=np.float32(-1e9))
        == f"op ({call.split()[0]})  float: {reason}\n"
    )


def test_what_is_computed_from_integers_stays_float() -> None:
    check(
        """
        cast (Cast)  float: no quantization rule for this operator
        mask (Mul)  float: 'f' is computed from integers alone: a mask or a position, not a signal
        """,
        "g (float[N,6] x, int64[N,6] m) => (float[N,6] y) { [cast] f = Cast <to = 1>"
        " (m) [mask] y = Mul (x, f) }",
    )


BIASED = "g (float[{}] x) => (float[{}] y) {{ [fc] h = MatMul (x, w) [bias] y = Add (h, b) }}"
#: onnxruntime fuses no stack of matrices whose number is unknown.
OPEN_STACK, MATRIX, STACK = (
    BIASED.format(*[each] * 2) for each in ("N,4,6", "N,6", "2,4,6")
)


def test_a_bias_is_added_before_rounding() -> None:
    check(
        """
        fc (MatMul)
          < x: Q
          < w: W
        bias (Add)  float: it adds a bias to a product that is not rounded yet
        """,
        OPEN_STACK,
        w=weight(6, 6),
        b=normal(6),
    )


@pytest.mark.parametrize("text", [MATRIX, STACK], ids=["matrix", "stack"])
def test_a_bias_is_that_of_the_gemm_that_onnxruntime_makes(text: str) -> None:
    check(
        """
        fc (MatMul)
          < x: Q
          < w: W
        bias (Add)  float: it adds a bias to a product that is not rounded yet
          < b: bias of x and w
        """,
        text,
        w=weight(6, 6),
        b=normal(6),
    )


@pytest.mark.parametrize(
    ("text", "config", "bias"),
    [
        (MATRIX, WIDE, normal(6)),
        (MATRIX, TENSOR.with_(form="operators"), normal(6)),
        (MATRIX, QConfig.of("A8W4"), normal(6)),
        (MATRIX, QConfig.of("DYNAMIC"), normal(6)),
        (MATRIX, QConfig.of("W8"), normal(6)),
        (MATRIX, TENSOR, normal(1)),
    ],
    ids=["16 bits", "operators", "4 bits", "dynamic", "weights", "one value"],
)
def test_a_bias_beside_a_product_without_an_integer_kernel_stays_float(
    text: str, config: QConfig, bias: Array
) -> None:
    assert "bias of" not in plan_text(text, config, w=weight(6, 6), b=bias)


def test_integer_only_hardware_adds_a_bias_after_rounding() -> None:
    text = plan_text(MATRIX, POW2, w=weight(6, 6), b=normal(6))
    assert (
        text.count("quantize int8 symmetric pow2 minmse") == 6 and "float" not in text
    )


@pytest.mark.parametrize(
    ("config", "float_nodes"),
    [(TENSOR, 2), (POW2, 2), (WIDE, 0)],
    ids=["8", "pow2", "16"],
)
def test_a_residual_stream_needs_more_than_8_bits(
    config: QConfig, float_nodes: int
) -> None:
    text = plan_text(
        f"{TWO} {{ [res] h = Add (x, z) [norm] y = LayerNormalization (h, k) }}",
        config,
        k=normal(6),
    )
    assert (
        text.count(
            "float: the residual stream around a layer normalization is too wide for 8"
            " bits"
        )
        == float_nodes
    )


def test_unless_safety_is_off() -> None:
    text = plan_text(
        f"{TWO} {{ [res] h = Add (x, z) [norm] y = LayerNormalization (h, k) }}",
        TENSOR.with_(safe=False),
        k=normal(6),
    )
    assert "float:" not in text


# Several origins


def test_concat_gives_each_input_its_own_scale() -> None:
    check(
        """
        join (Concat)
          < x: Q
          < z: Q
          > y: Q
        """,
        "g (float[N,6] x, float[N,6] z) => (float[N,12] y) { [join] y = Concat <axis ="
        " 1> (x, z) }",
    )


FOCUS = """g (float[1,3,8,8] x) => (float[1,6,4,8] y) {
    a = Slice (x, zero, eight, two, by) b = Slice (x, one, eight, two, by)
    [join] y = Concat <axis = 1> (a, b)
}"""
SLICES = {
    "zero": np.int64([0]),
    "one": np.int64([1]),
    "two": np.int64([2]),
    "by": np.int64([2]),
    "eight": np.int64([8]),
}


def test_slices_of_an_input_are_joined_before_they_are_rounded() -> None:
    assert plan_text(FOCUS, **SLICES).endswith("join (Concat)\n  > y: Q\n")


def test_slices_of_an_input_are_rounded_for_an_integer_engine() -> None:
    text = plan_text(FOCUS, POW2, **SLICES).split("join (Concat)\n")[1]
    assert [line.split(":")[0] for line in text.splitlines()] == [
        "  < a",
        "  < b",
        "  > y",
    ]


def test_concat_with_a_position_stays_float() -> None:
    text = plan_text("""g (float[N,6] x, int64[N,6] m) => (float[N,12] y) {
            f = Cast <to = 1> (m)
            [join] y = Concat <axis = 1> (x, f)
        }""")
    assert text.endswith(
        "join (Concat)  float: 'f' is a mask or a position, not a signal\n"
    )


SUM_THEN = "g ({x} x) => ({y} y) {{ [sum] h = Add (x, x) [op] y = {call} }}"


def after_a_sum(call: str, x: str, y: str, **constants: Any) -> str:
    """What the plan says of an operator whose input is quantized."""
    return (
        plan_text(SUM_THEN.format(x=x, y=y, call=call), **constants)
        .split("op (")[1]
        .split("\n", 1)[1]
    )


@pytest.mark.parametrize(
    ("call", "value", "result"),
    [
        ("Pad (h, p)", None, "same as h"),
        ("Pad (h, p, k)", 0.0, "same as h"),
        ('Pad <mode = "reflect"> (h, p)', None, "same as h"),
        ('Pad <mode = "edge"> (h, p)', None, "same as h"),
        ("Pad (h, p, k)", 2.0, "Q"),
    ],
)
def test_padding_that_adds_no_new_value_inherits(
    call: str, value: float | None, result: str
) -> None:
    constants = {} if value is None else {"k": np.float32(value)}
    text = after_a_sum(
        call, "float[N,6]", "float[N,8]", p=np.int64([0, 1, 0, 1]), **constants
    )
    assert text == f"  < h: Q\n  > y: {result}\n"


def test_padding_with_never_stays_float() -> None:
    text = plan_text(
        SUM_THEN.format(x="float[N,6]", y="float[N,8]", call="Pad (h, p, k)"),
        p=np.int64([0, 1, 0, 1]),
        k=np.float32(-np.inf),
    )
    assert "op (Pad)  float: it pads with a value that means 'never'\n" in text


# Passing through

ONE = np.float32([1, 1, 2, 2])


@pytest.mark.parametrize(
    ("call", "y", "result"),
    [
        ("Reshape (h, shape)", "[N,M]", "same as h"),
        ("Flatten (h)", "[N,256]", "same as h"),
        ("Transpose (h)", "[8,8,4,N]", "same as h"),
        ("Squeeze (h, four)", "[A,B,C]", "same as h"),
        ("Unsqueeze (h, four)", "[N,4,8,8,1]", "same as h"),
        ("DepthToSpace <blocksize = 2> (h)", "[N,1,16,16]", "same as h"),
        ("SpaceToDepth <blocksize = 2> (h)", "[N,16,4,4]", "same as h"),
        ("MaxPool <kernel_shape = [2,2]> (h)", "[N,4,7,7]", "same as h"),
        ("GlobalMaxPool (h)", "[N,4,1,1]", "same as h"),
        ("Slice (h, zero, one)", "[1,4,8,8]", "same as h"),
        ("Gather (h, zero)", "[1,4,8,8]", "same as h"),
        ("Expand (h, one)", "[N,4,8,8]", "same as h"),
        ("Tile (h, tiles)", "[N,4,8,8]", "same as h"),
        ("Split <num_outputs = 1> (h)", "[N,4,8,8]", "same as h"),
        ('Resize <mode = "nearest"> (h, , scales)', "[N,4,16,16]", "same as h"),
        ('Resize <mode = "linear"> (h, , scales)', "[N,4,16,16]", "same as h"),
        ("AveragePool <kernel_shape = [2,2]> (h)", "[N,4,7,7]", "Q"),
        ("GlobalAveragePool (h)", "[N,4,1,1]", "Q"),
        ("ReduceMean (h)", "[1,1,1,1]", "Q"),
        ("InstanceNormalization (h, k, k)", "[N,4,8,8]", "Q"),
        ("BatchNormalization (h, k, k, k, k)", "[N,4,8,8]", "Q"),
    ],
)
def test_selections_and_rearrangements_inherit_and_averages_do_not(
    call: str, y: str, result: str
) -> None:
    text = plan_text(
        '<ir_version: 8, opset_import: ["" : 18]>'
        f" {SUM_THEN.format(x=FMAP, y='float' + y, call=call)}",
        shape=np.int64([0, -1]),
        four=np.int64([4 if "Un" in call else 0]),
        zero=np.int64([0]),
        one=np.int64([1]),
        tiles=np.int64([1, 1, 1, 1]),
        scales=ONE,
        k=normal(4),
    )
    name = call.split()[0]
    assert text.endswith(f"op ({name})\n  < h: Q\n  > y: {result}\n")


def test_what_nobody_quantizes_passes_through_in_float() -> None:
    assert (
        plan_text("g (float[2,3] x) => (float[3,2] y) { [op] y = Transpose (x) }")
        == "op (Transpose)\n"
    )


def test_every_float_result_of_a_split_inherits() -> None:
    text = plan_text(
        """g (float[N,6] x) => (float[N,2] a, float[N,4] b) {
            h = Add (x, x)
            [op] a, b = Split <axis = 1> (h, sizes)
        }""",
        sizes=np.int64([2, 4]),
    )
    assert text.endswith("  < h: Q\n  > a: same as h\n  > b: same as h\n")


def test_the_indices_of_a_max_pool_are_left_alone() -> None:
    text = plan_text(f"""g ({FMAP} x) => (float[N,4,7,7] y, int64[N,4,7,7] i) {{
            h = Add (x, x)
            [op] y, i = MaxPool <kernel_shape = [2,2]> (h)
        }}""")
    assert text.endswith("op (MaxPool)\n  < h: Q\n  > y: same as h\n")


def test_an_embedding_table_is_stored_quantized() -> None:
    check(
        """
        op (Gather)
          < t: Q
          > y: same as t
        """,
        "g (int64[N] i) => (float[N,6] y) { [op] y = Gather (t, i) }",
        t=normal(5, 6),
    )


def test_quantizing_moves_before_a_rearrangement() -> None:
    check(
        """
        fc (MatMul)
          < x: Q
          < w: W
          > h: Q
        turn (Transpose)
          < h: Q
          > t: same as h
        sum (Add)
          < t: same as h
          < t: same as h
          > y: Q
        """,
        """g (float[N,6] x) => (float[6,N] y) {
            [fc] h = MatMul (x, w)
            [turn] t = Transpose (h)
            [sum] y = Add (t, t)
        }""",
        w=weight(6, 6),
    )


# No rule

UNKNOWN = (
    "g (float[N,6] x) => (float[N,6] y) { [a] h = Add (x, x) [odd] e = Bernoulli (h)"
    " [b] y = Add (e, e) }"
)


def test_an_operator_without_a_rule_stays_float_between_quantized_ones() -> None:
    text = plan_text(UNKNOWN)
    assert "odd (Bernoulli)  float: no quantization rule for this operator\n" in text
    assert (
        text.count("Q\n") == 3 + 3 + 2
    )  # both sums with all their tensors, and the tensors around Bernoulli


@pytest.mark.parametrize(
    ("call", "k"),
    [
        ("Div (x, k)", np.float32([np.inf])),
        ("Concat <axis = 0> (x, k)", np.zeros((0, 6), np.float32)),
    ],
    ids=["infinite", "empty"],
)
def test_constants_that_no_scale_fits_stay_float(call: str, k: Array) -> None:
    assert "< k: " not in plan_text(
        f"g (float[N,6] x) => (float[N,M] y) {{ [op] y = {call} }}", k=k
    )


@pytest.mark.parametrize("kind", ["int64", "float16", "double"])
def test_other_types_stay_as_they_are(kind: str) -> None:
    assert (
        plan_text(f"g ({kind}[6] x) => ({kind}[6] y) {{ [sum] y = Add (x, x) }}")
        == "sum (Add)\n"
    )


def test_every_operator_that_was_promised_has_a_rule() -> None:
    promised = """Conv ConvTranspose MatMul Gemm Add Sub Mul Div Relu Clip LeakyRelu PRelu Sigmoid HardSigmoid HardSwish
        Tanh Softmax Gelu LayerNormalization InstanceNormalization BatchNormalization MaxPool AveragePool
        GlobalAveragePool ReduceMean Concat Split Slice Reshape Flatten Transpose Squeeze Unsqueeze Pad Resize Gather
        Where DepthToSpace SpaceToDepth"""  # noqa: E501
    assert not set(promised.split()) - set(RULES)
