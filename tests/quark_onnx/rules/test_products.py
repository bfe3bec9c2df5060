"""What the rules of fused and recurrent layers, attention and Einsum decide: see test_rules.py for
how to read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quark_onnx import QConfig, quantize
from quark_onnx.config import Override
from quark_onnx.graph import Graph
from quark_onnx.plan import Quantize, Use
from quark_onnx.planning.make_plan import make_plan
from tests.models import normal, parse, run, weight
from tests.quark_onnx.rules.test_rules import check, plan_text
from tests.settings import CHANNEL, POW2, WIDE

HEADER = '<ir_version: 11, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
P = "quantize int8 symmetric pow2 minmse"
BF16, DYNAMIC, INT4 = (QConfig.of(name) for name in ("BF16", "DYNAMIC", "INT4"))
BLOCKS = QConfig.of("BFP16")


def text_of(
    text: str, config: QConfig = CHANNEL, *, opset: int = 21, **constants: Any
) -> str:
    """The plan of one operator, W standing for a weight of any axis."""
    plan = plan_text(HEADER.format(opset=opset) + text, config, **constants).split(
        "\n", 1
    )[1]
    for axis in range(3):
        plan = plan.replace(f"quantize int8 symmetric axis {axis} minmax", f"W{axis}")
    return plan


def axes(
    text: str, config: QConfig = BLOCKS, *, opset: int = 21, **constants: Any
) -> dict[str, int | None]:
    """The axis of the blocks of each tensor: that of the sum."""
    plan = make_plan(
        Graph.of(parse(HEADER.format(opset=opset) + text, **constants)), config
    )
    return {
        str(use): e.axis
        for use, e in plan.entries.items()
        if isinstance(e, Quantize) and e.axis is not None
    }


# Recurrent layers

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
BOTH = 'direction = "bidirectional", hidden_size = 4'


def recurrent(kind: str) -> dict[str, Any]:
    gates = GATES[kind] * 4
    return {
        "w": weight(2, gates, 6),
        "r": weight(2, gates, 4),
        "b": normal(2, 2 * gates),
    }


def layer(kind: str) -> str:
    return (
        "g (float[5,N,6] x) => (float[5,2,N,4] y, float[2,N,4] h) { [op] y, h ="
        f" {kind} <{BOTH}> (x, w, r, b) }}"
    )


@pytest.mark.parametrize("kind", GATES)
def test_recurrent_weights_have_a_scale_for_each_unit(kind: str) -> None:
    """Of each gate, and each direction."""
    rows = "quantize int8 symmetric each output channel minmax"
    expected = f"  < w: {rows}\n  < r: {rows}\n"
    assert text_of(layer(kind), **recurrent(kind)) == expected
    assert text_of(layer(kind), DYNAMIC, **recurrent(kind)).endswith(expected)
    assert (
        text_of(layer(kind), INT4, **recurrent(kind)).count("axis 2 blocks of 32") == 2
    )


@pytest.mark.parametrize("kind", GATES)
def test_recurrent_layers_without_float_arithmetic(kind: str) -> None:
    bias = "bias of x and w"
    expected = (
        f"  < x: {P}\n  < w: {P}\n  < r: {P}\n  < b: {bias}\n  > y: {P}\n  > h: {P}\n"
    )
    assert text_of(layer(kind), POW2, **recurrent(kind)) == expected
    assert text_of(layer(kind), BF16, **recurrent(kind)).count("quantize bfloat16") == 6
    assert axes(layer(kind), **recurrent(kind)) == {"x": 2, "w": 2, "r": 2, "b": 0}


def test_computed_recurrent_weights_stay_float() -> None:
    text = layer("GRU").replace(
        "float[5,N,6] x", "float[5,N,6] x, float[2,12,6] w, float[2,12,4] r"
    )
    assert text_of(text, b=normal(2, 24)) == ""


# Convolutions

FMAP = "float[N,4,8,8]"


def test_a_fused_convolution_adds_before_it_rounds() -> None:
    text = (
        f"g ({FMAP} x, {FMAP} z) => ({FMAP} y) {{ [op] y = com.microsoft.FusedConv (x,"
        " w, b, z) }"
    )
    constants = {"w": weight(4, 4, 1, 1), "b": normal(4)}
    assert (
        text_of(text, **constants)
        == "  < x: Q\n  < w: W0\n  < b: bias of x and w\n  < z: Q\n  > y: Q\n"
    )
    assert axes(text, **constants).items() >= {"x": 1, "w": 1}.items()
    assert " x" not in text_of(text, DYNAMIC, **constants), (
        "no integer form of it is written"
    )


def test_offsets_are_positions() -> None:
    text = (
        f"g ({FMAP} x, float[N,18,6,6] o) => (float[N,4,6,6] y) {{ [op] y = DeformConv"
        " (x, w, o, b) }"
    )
    constants = {"w": weight(4, 4, 3, 3), "b": normal(4)}
    why = (
        "it is read only as an integer, a position or a decision (DeformConv), which"
        " rounding would change"
    )
    assert text_of(text, **constants) == (
        f"  < x: Q\n  < w: W0\n  < o: float: {why}\n  < b: bias of x and w\n  > y: Q\n"
    )
    assert axes(text, **constants).items() >= {"x": 1, "w": 1}.items()


@pytest.mark.parametrize(("domain", "opset"), [("", 27), ("com.microsoft.", 21)])
def test_the_state_of_a_convolution_runs_on(domain: str, opset: int) -> None:
    text = f"""g (float[N,4,8] x, float[N,4,2] s) => (float[N,4,8] y, float[N,4,2] t)
        {{ [op] y, t = {domain}CausalConvWithState (x, w, b, s) }}"""
    constants = {"w": weight(4, 1, 3), "b": normal(4)}
    assert (
        text_of(text, opset=opset, **constants)
        == "  < x: Q\n  < w: W0\n  < b: bias of x and w\n  > y: Q\n"
    )


# Matrix products


@pytest.mark.parametrize(
    "op", ["FusedMatMul", "FusedMatMulActivation", "TransposeMatMul"]
)
@pytest.mark.parametrize(
    ("turned", "shape", "own", "summed"), [(0, (6, 3), 1, 0), (1, (3, 6), 0, 1)]
)
def test_a_fused_product(
    op: str, turned: int, shape: tuple[int, int], own: int, summed: int
) -> None:
    text = (
        f"g (float[N,6] x) => (float[N,3] y) {{ [op] y = com.microsoft.{op} <transB ="
        f" {turned}> (x, w) }}"
    )
    assert text_of(text, w=weight(*shape)) == f"  < x: Q\n  < w: W{own}\n"
    assert axes(text, w=weight(*shape)).items() >= {"x": 1, "w": summed}.items()
    assert text_of(text, POW2, w=weight(*shape)).count(P) == 3
    assert " x" not in text_of(text, DYNAMIC, w=weight(*shape)), (
        "no integer form of it is written"
    )


@pytest.mark.parametrize(
    ("attributes", "x", "z", "x_axis", "z_axis"),
    [
        ("transA = 0, transB = 0", "2,5,6", "2,6,3", 2, 1),
        ("transA = 1, transB = 1", "2,6,5", "2,3,6", 1, 2),
        ("transBatchA = 1, transBatchB = 1", "5,2,6", "6,2,3", 2, 0),
        (
            "transA = 1, transBatchA = 1, transB = 1, transBatchB = 1",
            "6,2,5",
            "3,2,6",
            0,
            2,
        ),
    ],
)
def test_the_axis_of_a_fused_sum(
    attributes: str, x: str, z: str, x_axis: int, z_axis: int
) -> None:
    call = f"com.microsoft.FusedMatMul <{attributes}> (x, z)"
    assert axes(
        f"g (float[{x}] x, float[{z}] z) => (float[2,5,3] y) {{ [op] y = {call} }}"
    ) == {
        "x": x_axis,
        "z": z_axis,
    }


def test_a_stack_of_fused_matrices_has_one_scale() -> None:
    text = (
        "g (float[2,5,6] x) => (float[2,5,3] y) { [op] y = com.microsoft.FusedMatMul"
        " (x, w) }"
    )
    assert text_of(text, w=weight(2, 6, 3)) == "  < x: Q\n  < w: W\n"


def test_a_fused_gemm() -> None:
    text = (
        "g (float[N,6] x) => (float[N,3] y) { [op] y = com.microsoft.FusedGemm"
        ' <activation = "Relu"> (x, w, b) }'
    )
    assert (
        text_of(text, w=weight(6, 3), b=normal(3))
        == "  < x: Q\n  < w: W1\n  < b: bias of x and w\n"
    )
    assert " x" not in text_of(text, DYNAMIC, w=weight(6, 3), b=normal(3)), (
        "no integer form of it is written"
    )


def test_a_product_with_its_gelu() -> None:
    text = (
        "g (float[N,6] x) => (float[N,3] y) { [op] y = com.microsoft.GemmFastGelu (x,"
        " w, b) }"
    )
    assert text_of(text, w=weight(6, 3), b=normal(3)) == "  < x: Q\n  < w: W1\n"


def test_a_bias_is_added_to_an_einsum_before_rounding() -> None:
    check(
        """
        fc (Einsum)
          < x: Q
          < w: W
        bias (Add)  float: it adds a bias to a product that is not rounded yet
        """,
        'g (float[N,6] x) => (float[N,3] y) { [fc] h = Einsum <equation = "nk,km->nm">'
        " (x, w) [bias] y = Add (h, b) }",
        w=weight(6, 3),
        b=normal(3),
    )


@pytest.mark.parametrize(
    ("equation", "x", "shape", "own", "summed"),
    [
        ("nk,km->nm", "N,6", (6, 3), 1, {"x": 1, "w": 0}),
        ("nk,mk->nm", "N,6", (3, 6), 0, {"x": 1, "w": 1}),
        ("nk,km", "N,6", (6, 3), 1, {"x": 1, "w": 0}),
        (" b t k , h k d -> b h t d ", "2,5,6", (3, 6, 4), 2, {"x": 2, "w": 1}),
        ("...k,km->...m", "2,5,6", (6, 3), 1, {"x": 2, "w": 0}),
        ("...ij,...jk->...ik", "5,6", (6, 3), 1, {"x": 1, "w": 0}),
        ("...ij,...jk", "2,5,6", (2, 6, 3), 2, {"x": 2, "w": 1}),
        ("...ij,...kj->...ik", "2,5,6", (1, 3, 6), 1, {"x": 2, "w": 2}),
        ("i...j,j...k->i...k", "5,2,6", (6, 1, 3), 2, {"x": 2, "w": 0}),
        ("j...,jk...->k...", "6,2", (6, 3, 1), 1, {"x": 0, "w": 0}),
        ("...j,kj...->...k", "2,6", (3, 6, 1), 0, {"x": 1, "w": 1}),
    ],
)
def test_the_axes_of_an_equation(
    equation: str, x: str, shape: tuple[int, ...], own: int, summed: dict[str, int]
) -> None:
    text = (
        f'g (float[{x}] x) => (float y) {{ [op] y = Einsum <equation = "{equation}">'
        " (x, w) }"
    )
    assert text_of(text, w=weight(*shape)) == f"  < x: Q\n  < w: W{own}\n"
    assert axes(text, w=weight(*shape)).items() >= summed.items()


@pytest.mark.parametrize(
    "equation", ["ik,k->i", "...k,k->...", "ik,k", "...ik,k->i..."]
)
@pytest.mark.parametrize("config", ["A8W4", "INT4", "W8"])
@pytest.mark.parametrize("length", [8, 64])
def test_a_constant_vector_is_no_weight(
    equation: str, config: str, length: int
) -> None:
    """As in a MatMul: onnxruntime runs no blocks of a vector that is a single block."""
    model = parse(
        f"g (float[2,{length}] x) => (float[2] y) {{ [op] y = Einsum <equation ="
        f' "{equation}"> (x, w) }}',
        w=normal(length),
    )
    data = [{"x": normal(2, length)}] if config == "A8W4" else None
    [expected] = run(model, {"x": normal(2, length)})
    [found] = run(quantize(model, data, config).model, {"x": normal(2, length)})
    np.testing.assert_allclose(found, expected, atol=0.2)


def test_an_ellipsis_of_an_unknown_rank() -> None:
    text = (
        'g (float x) => (float y) { [op] y = Einsum <equation = "...ij,...jk->...ik">'
        " (x, w) }"
    )
    assert text_of(text, w=weight(6, 3)) == "  < x: Q\n  < w: W1\n"


@pytest.mark.parametrize(
    "equation", ["ij,ij->ij", "i,j->ij", "...i,...j", "...,...", "...i,i...->i..."]
)
def test_an_equation_without_a_sum_is_arithmetic(equation: str) -> None:
    x = "float[6,6]" if "ij," in equation else "float[6]"
    text = (
        f"g ({x} x, {x} z) => (float[6,6] y) {{ [op] y = Einsum <equation ="
        f' "{equation}"> (x, z) }}'
    )
    assert text_of(text) == "  < x: Q\n  < z: Q\n  > y: Q\n"


def test_an_equation_of_one_operand() -> None:
    text = (
        'g (float[5,6] x) => (float[6,5] y) { [op] y = Einsum <equation = "ij->ji">'
        " (x) }"
    )
    assert text_of(text) == "  < x: Q\n  > y: Q\n"


# Attention

ATTENTION = (
    "g (float[2,5,6] x) => (float[2,5,6] y) { [op] y = com.microsoft.Attention"
    " <num_heads = 2> (x, w, b) }"
)
PROJECTIONS = {"w": weight(6, 18), "b": normal(18)}


def test_attention_projects_with_weights() -> None:
    assert (
        text_of(ATTENTION, **PROJECTIONS)
        == "  < x: Q\n  < w: W1\n  < b: bias of x and w\n"
    )
    assert (
        text_of(ATTENTION, POW2, **PROJECTIONS)
        == f"  < x: {P}\n  < w: {P}\n  < b: bias of x and w\n  > y: {P}\n"
    )
    assert axes(ATTENTION, **PROJECTIONS).items() >= {"x": 2, "w": 0}.items()
    dynamic = text_of(ATTENTION, DYNAMIC, **PROJECTIONS)
    assert dynamic.startswith("  < x: quantize uint8 asymmetric dynamic\n  < w: W1\n")


def test_both_projections_of_a_longformer() -> None:
    text = """g (float[2,5,6] x, float[2,5] m, int32[2,5] n) => (float[2,5,6] y) {
        [op] y = com.microsoft.LongformerAttention <num_heads = 2, window = 2> (x, w, b, m, v, c, n) }"""  # noqa: E501
    constants = {**PROJECTIONS, "v": weight(6, 18, seed=1), "c": normal(18, seed=1)}
    expected = (
        "  < x: Q\n  < w: W1\n  < b: bias of x and w\n  < v: W1\n  < c: bias of x"
        " and v\n"
    )
    assert text_of(text, **constants) == expected


def test_both_projections_of_a_decoder() -> None:
    text = """g (float[5,2,6] x, float[5,2,6] z) => (float[5,2,6] y) {
        [op] y = com.microsoft.DecoderAttention <num_heads = 2> (x, z, w, v) }"""
    assert (
        text_of(text, w=weight(6, 6), v=weight(6, 12))
        == "  < x: Q\n  < z: Q\n  < w: W1\n  < v: W1\n"
    )
    assert text_of(text, POW2, w=weight(6, 6), v=weight(6, 12)).count(P) == 5


OTHERS = {
    "Attention": 23,
    "LinearAttention": 27,
    "com.microsoft.MultiHeadAttention": 21,
    "com.microsoft.GroupQueryAttention": 21,
    "com.microsoft.SparseAttention": 21,
}


@pytest.mark.parametrize("op", OTHERS)
def test_attention_without_weights_stays_float(op: str) -> None:
    results = "y, s" if op == "LinearAttention" else "y"
    inputs = "float[2,5,6] q, float[2,5,6] k, float[2,5,6] v"
    text = f"g ({inputs}) => (float[2,5,6] y) {{ [op] {results} = {op} (q, k, v) }}"
    for config in (CHANNEL, WIDE, POW2):
        plan = plan_text(HEADER.format(opset=OTHERS[op]) + text, config)
        assert plan.endswith(
            "float: no runtime has an integer form of it: its scores would have no"
            " scale\n"
        )
        assert plan.count("\n") == 1
    wide = text_of(text, BF16, opset=OTHERS[op]).replace("quantize bfloat16", "Q")
    assert wide == "  < q: Q\n  < k: Q\n  < v: Q\n  > y: Q\n"


@pytest.mark.parametrize(
    "op",
    [
        "RotaryEmbedding",
        "com.microsoft.RotaryEmbedding",
        "com.microsoft.MRotaryEmbedding",
    ],
)
def test_rotations_stay_float(op: str) -> None:
    order = "x, i, c, c" if "microsoft" in op else "x, c, c, i"
    text = (
        f"g (float[2,3,5,6] x, int64[2,5] i) => (float[2,3,5,6] y) {{ [op] y = {op}"
        f" ({order}) }}"
    )
    assert "float: onnxruntime rotates floats alone" in plan_text(
        HEADER.format(opset=23) + text, c=normal(8, 3)
    )
    assert text_of(text, POW2, opset=23, c=normal(8, 3)) == f"  < x: {P}\n  > y: {P}\n"


def test_a_softmax_with_its_mask_stays_float() -> None:
    call = "com.microsoft.BiasSoftmax <axis = 2, is_inner_broadcast = 0> (x, m)"
    text = (
        f"g (float[2,5,6] x, float[2,5,6] m) => (float[2,5,6] y) {{ [op] y = {call} }}"
    )
    assert "float: it adds a mask before its softmax" in plan_text(
        HEADER.format(opset=17) + text
    )
    assert (
        text_of(text, POW2)
        == f"  < x: {P}\n  > y: quantize int8 symmetric pow2 [0, 1]\n"
    )


# Embeddings

TABLES = {
    "t": normal(9, 6),
    "p": normal(8, 6, seed=1),
    "s": normal(2, 6, seed=2),
    "k": normal(6),
}
EMBEDDING = """g (int32[2,5] i, int32[2,5] j) => (float[2,5,6] y) {
    [op] y, m = com.microsoft.EmbedLayerNormalization (i, j, t, p, s, k, k) }"""


def test_the_tables_of_an_embedding_are_weights() -> None:
    assert text_of(EMBEDDING, **TABLES) == "  < t: W0\n  < p: W0\n  < s: W0\n"
    wide = text_of(EMBEDDING, WIDE, **TABLES)
    assert (
        wide
        == "  < t: W0\n  < p: W0\n  < s: W0\n  > y: quantize uint16 asymmetric minmax\n"
    )


def test_an_override_reaches_the_weights_of_a_layer() -> None:
    fine = CHANNEL.with_(
        overrides=(
            Override(
                op_types=("LSTM",), weight=CHANNEL.weight.with_(per_channel=False)
            ),
        )
    )
    plan = make_plan(Graph.of(parse(layer("LSTM"), **recurrent("LSTM"))), fine)
    entry = plan.entries[Use("w")]
    assert isinstance(entry, Quantize) and entry.axis is None
