"""What the rules of operators that move and pick values decide: see test_rules.py for how to read
it.
"""

from __future__ import annotations

import numpy as np
import pytest

from quark_onnx import quantize
from tests.models import normal, parse, run
from tests.quark_onnx.rules.test_rules import check, plan_text
from tests.settings import POW2, TENSOR

SUM_THEN = (
    "g (float[2,4,8,8] x{more}) => (float{y} y) {{ [sum] h = Add (x, x) [op] y ="
    " {call} }}"
)
HEADER = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'


def after_a_sum(
    call: str, y: str, more: str = "", opset: int = 18, **constants: object
) -> str:
    """What the plan says of an operator whose input is quantized."""
    text = HEADER.format(opset=opset) + SUM_THEN.format(call=call, y=y, more=more)
    return plan_text(text, **constants).split("op (")[1].split("\n", 1)[1]


@pytest.mark.parametrize(
    ("call", "y", "opset"),
    [
        ("ReduceMax (h)", "[1,1,1,1]", 18),
        ("ReduceMin (h)", "[1,1,1,1]", 18),
        ("ReverseSequence (h, ints)", "[2,4,8,8]", 18),
        ("Compress <axis = 0> (h, bools)", "[M,4,8,8]", 18),
        ("GatherElements (h, index)", "[1,1,1,1]", 18),
        ("GatherND (h, rows)", "[1,8,8]", 18),
        ("com.microsoft.GatherND (h, rows)", "[1,8,8]", 18),
        ("Trilu (h)", "[2,4,8,8]", 18),
        ("com.microsoft.Trilu (h)", "[2,4,8,8]", 18),
        ("CenterCropPad (h, shape)", "[2,4,8,9]", 18),
        ("Dropout (h)", "[2,4,8,8]", 18),
        ("Dropout (h, ratio, no)", "[2,4,8,8]", 18),
        ("MaxRoiPool <pooled_shape = [2,2]> (h, rois)", "[1,4,2,2]", 18),
        ("GridSample (h, grid)", "[2,4,2,2]", 18),
        ('GridSample <mode = "nearest"> (h, grid)', "[2,4,2,2]", 18),
        ("com.microsoft.GridSample (h, grid)", "[2,4,2,2]", 18),
    ],
)
def test_selections_and_rearrangements_inherit(call: str, y: str, opset: int) -> None:
    constants = {
        "ints": np.int64([1, 2, 1, 2]),
        "bools": np.array([True, False]),
        "index": np.int64([[[[0]]]]),
        "rows": np.int64([[0, 1]]),
        "shape": np.int64([2, 4, 8, 9]),
        "ratio": np.float32(0.5),
        "no": np.array(False),
        "rois": np.float32([[0, 0, 0, 4, 4]]),
        "grid": normal(2, 2, 2, 2),
    }
    used = {
        name: value for name, value in constants.items() if name in call.split("(")[1]
    }
    assert after_a_sum(call, y, opset=opset, **used) == "  < h: Q\n  > y: same as h\n"


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "XINT8"])
@pytest.mark.parametrize("opset", [8, 11, 12])
@pytest.mark.parametrize("kind", ["ReduceMax", "ReduceMin"])
def test_extremes_are_quantized_at_every_opset(
    kind: str, opset: int, preset: str
) -> None:
    """Below opset 12 they take no bytes, which onnxruntime gives them if scales are shared."""
    model = parse(
        "g (float[4,8] x) => (float[4] y)"
        f"{{ r = Tanh (x) y = {kind} <axes = [1], keepdims = 0> (r) }}",
        opset=opset,
    )
    feeds = {"x": normal(4, 8)}
    [found] = run(quantize(model, [feeds], preset).model, feeds, optimize=True)
    extreme = np.max if kind == "ReduceMax" else np.min
    np.testing.assert_allclose(found, extreme(np.tanh(feeds["x"]), axis=1), atol=0.02)


def test_an_unpooled_value_keeps_its_scale() -> None:
    text = plan_text("""g (float[1,1,2,2] x, int64[1,1,2,2] i) => (float[1,1,4,4] y) {
            h = Add (x, x)
            [op] y = MaxUnpool <kernel_shape = [2,2], strides = [2,2]> (h, i)
        }""")
    assert text.endswith("op (MaxUnpool)\n  < h: Q\n  > y: same as h\n")


@pytest.mark.parametrize(
    ("call", "y"),
    [
        (
            "RoiAlign <output_height = 2, output_width = 2> (h, rois, batch)",
            "[1,4,2,2]",
        ),
        ("com.microsoft.CropAndResize (h, rois, batch, crop)", "[1,4,2,2]"),
        ('GridSample <mode = "cubic"> (h, grid)', "[2,4,2,2]"),
    ],
)
def test_samples_that_leave_the_range_do_not_inherit(call: str, y: str) -> None:
    constants = {
        "rois": np.float32([[0, 0, 4, 4]]),
        "batch": np.int64([0]),
        "crop": np.int32([2, 2]),
        "grid": normal(2, 2, 2, 2),
    }
    used = {
        name: value for name, value in constants.items() if name in call.split("(")[1]
    }
    opset = 20 if "cubic" in call else 18
    assert after_a_sum(call, y, opset=opset, **used) == "  < h: Q\n  > y: Q\n"


def test_overlapping_blocks_add_up() -> None:
    check(
        """
        op (Col2Im)
          < x: Q
          > y: Q
        """,
        '<ir_version: 8, opset_import: ["" : 18]> g (float[1,4,9] x) => (float[1,1,4,4]'
        " y) { [op] y = Col2Im (x, image, block) }",
        image=np.int64([4, 4]),
        block=np.int64([2, 2]),
    )


def test_training_stays_float() -> None:
    text = plan_text(
        "g (float[N,6] x) => (float[N,6] y) { [op] y = Dropout (x, r, t) }",
        r=np.float32(0.5),
        t=np.True_,
    )
    assert text == "op (Dropout)  float: it may be asked to drop values at random\n"


@pytest.mark.parametrize("call", ["GatherElements (t, i)", "GatherND (t, i)"])
def test_a_table_is_stored_quantized(call: str) -> None:
    text = plan_text(
        f"g (int64[3,2] i) => (float y) {{ [op] y = {call} }}", t=normal(5, 6)
    )
    assert text.split("\n", 1)[1] == "  < t: Q\n  > y: same as t\n"


@pytest.mark.parametrize("call", ["ScatterElements (x, i, u)", "ScatterND (x, j, u)"])
def test_scattered_values_have_scales_of_their_own(call: str) -> None:
    head = (
        "g (float[4,4] x, int64[4,4] i, int64[4,1] j, float[4,4] u) => (float[4,4] y)"
    )
    text = plan_text(f"{head} {{ [op] y = {call} }}")
    assert text.split("\n", 1)[1] == "  < x: Q\n  < u: Q\n  > y: Q\n"


def test_values_written_to_a_cache() -> None:
    check(
        """
        op (TensorScatter)
          < x: Q
          < u: Q
          > y: Q
        """,
        '<ir_version: 11, opset_import: ["" : 24]> g (float[2,4,8] x, float[2,1,8] u,'
        " int64[2] i) => (float[2,4,8] y) { [op] y = TensorScatter (x, u, i) }",
    )


def test_a_scattered_mask_stays_float() -> None:
    text = plan_text(
        "g (float[4,4] x, int64[4,4] i) => (float[4,4] y) { [op] y = ScatterElements"
        " (x, i, u) }",
        u=np.full((4, 4), -1e9, np.float32),
    )
    assert (
        text
        == "op (ScatterElements)  float: 'u' holds values that mean 'never'; no scale"
        " spans them and real values\n"
    )


RANKING = "it ranks values, of which few codes make many equal"


def test_ranking_stays_float() -> None:
    text = (
        "g (float[N,6] x) => (float[N,2] y, int64[N,2] i) { h = Add (x, x) [op] y, i ="
        " TopK (h, k) }"
    )
    assert f"op (TopK)  float: {RANKING}\n" in plan_text(text, k=np.int64([2]))
    assert plan_text(text, TENSOR.with_(safe=False), k=np.int64([2])).endswith(
        "  < h: Q\n  > y: same as h\n"
    )


DECIDED = "it is read only as an integer, a position or a decision"


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_indices_have_no_scale(op: str) -> None:
    text = f"g (float[N,6] x) => (int64[1,6] y) {{ [op] y = {op} (x) }}"
    decided = f"  < x: float: {DECIDED} ({op}), which rounding would change\n"
    assert plan_text(text) == f"op ({op})  float: {RANKING}\n{decided}"
    assert plan_text(text, POW2) == f"op ({op})\n{decided}"


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_an_integer_engine_rounds_what_a_layer_hands_to_it(op: str) -> None:
    text = (
        "g (float[N,6] x) => (int64[1,6] y)"
        f" {{ [layer] h = MatMul (x, w) [op] y = {op} (h) }}"
    )
    assert plan_text(text, POW2, w=np.eye(6, dtype=np.float32)).endswith(
        f"op ({op})\n  < h: quantize int8 symmetric pow2 minmse\n"
    )


def test_boxes_are_selected_in_float() -> None:
    text = (
        "g (float[1,9,4] x, float[1,2,9] s) => (int64[M,3] y) { [op] y ="
        " NonMaxSuppression (x, s) }"
    )
    reason = "it selects boxes by small differences of overlaps and scores"
    why = f"{DECIDED} (NonMaxSuppression), which rounding would change"
    assert (
        plan_text(text)
        == plan_text(text, POW2)
        == f"op (NonMaxSuppression)  float: {reason}\n"
        f"  < x: float: {why}\n  < s: float: {why}\n"
    )
