"""What the rules of functions, reductions and normalizations decide: see test_rules.py for how to
read it.
"""

from __future__ import annotations

import numpy as np
import pytest

from quark_onnx import QConfig, quantize
from quark_onnx.common.registry import PRESETS, RULES
from tests.cases import loop_over
from tests.models import normal, parse, run
from tests.quark_onnx.rules.test_rules import check, plan_text
from tests.settings import POW2, TENSOR, WIDE

ONE = "g (float[N,4,8] x) => (float{y} y) {{ [op] y = {call} }}"
HEADER = '<ir_version: 11, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
BF16 = QConfig.of("BF16")


def one(
    call: str,
    config: QConfig = TENSOR,
    *,
    y: str = "[N,4,8]",
    opset: int = 21,
    **constants: object,
) -> str:
    """The plan of one operator, without the line of its name."""
    text = HEADER.format(opset=opset) + ONE.format(call=call, y=y)
    return plan_text(text, config, **constants).split("\n", 1)[1]


def reason(
    call: str,
    config: QConfig = TENSOR,
    *,
    y: str = "[N,4,8]",
    opset: int = 21,
    **constants: object,
) -> str:
    """Why one operator stays float, empty if it does not."""
    text = HEADER.format(opset=opset) + ONE.format(call=call, y=y)
    return plan_text(text, config, **constants).split("\n")[0].partition("  float: ")[2]


# Functions of one value

SMOOTH = ["Elu", "Selu", "Celu", "Mish", "Softplus", "Abs", "Neg", "Atan", "Asinh"]
FUSED = [
    f"com.microsoft.{name}"
    for name in ("QuickGelu", "BiasGelu", "BiasSplitGelu", "ScaledSiLU")
]


@pytest.mark.parametrize("op", [*SMOOTH, *FUSED])
def test_smooth_functions_have_input_and_result(op: str) -> None:
    call = f"{op} (x, k)" if "Bias" in op else f"{op} (x)"
    assert one(call, k=normal(8)) == "  < x: Q\n  > y: Q\n"


def test_swish() -> None:
    assert one("Swish (x)", opset=24) == "  < x: Q\n  > y: Q\n"


def test_softsign_is_bounded() -> None:
    assert one("Softsign (x)") == "  < x: Q\n  > y: quantize uint8 asymmetric [-1, 1]\n"


def test_functions_of_a_position_stay_float() -> None:
    text = plan_text(
        "g (int64[N] i) => (float[N] y) { f = Cast <to = 1> (i) [op] y = Neg (f) }"
    )
    assert text.endswith(
        "float: 'f' is computed from integers alone: a mask or a position, not a"
        " signal\n"
    )


DELICATE = {
    "Exp (x)": "small and large results differ by factors",
    "Pow (x, k)": "small and large results differ by factors",
    "Log (x)": "it is steepest where its input is smallest",
    "Sqrt (x)": "it is steepest where its input is smallest",
    "Reciprocal (x)": "it is steepest where its input is smallest",
    "Acos (x)": "it is steepest at the ends of its domain",
    "Atanh (x)": "it is steepest at the ends of its domain",
    "Sin (x)": "an angle of many turns leaves few codes to one turn",
    "Cos (x)": "an angle of many turns leaves few codes to one turn",
    "Floor (x)": "it jumps",
    "Sign (x)": "it jumps",
    "Hardmax (x)": "it jumps",
    "Mod <fmod = 1> (x, k)": "it jumps",
    "ThresholdedRelu (x)": "it jumps",
    "Shrink (x)": "it jumps",
    "LogSoftmax (x)": "it is the logarithm of probabilities",
    "Erf (x)": "it is the inner part of a decomposed Gelu",
}


@loop_over("call", tuple(DELICATE))
@loop_over("config", {"8": TENSOR, "16": WIDE})
def test_what_few_codes_ruin_stays_float(call: str, config: QConfig) -> None:
    assert reason(call, config, k=np.float32(2)).startswith(DELICATE[call])


@loop_over("call", tuple(DELICATE))
@loop_over("config", {"pow2": POW2, "bf16": BF16, "unsafe": TENSOR.with_(safe=False)})
def test_unless_there_is_no_float_or_no_safety(call: str, config: QConfig) -> None:
    if call.startswith("Mod") and config is POW2:
        return  # test_a_remainder_is_computed_in_float has it
    text = one(call, config, k=np.float32(2))
    assert [line.split(":")[0] for line in text.splitlines()] == ["  < x", "  > y"]


@pytest.mark.parametrize(
    "preset", ["XINT8", "FP16", "BFP16", "MX9", "MXFP8E4M3", "MXINT8"]
)
@pytest.mark.parametrize("safe", [True, False])
def test_a_remainder_is_computed_in_float(preset: str, safe: bool) -> None:
    """An operator that no engine of a format implements stays float, whatever else the format's
    activations are.

    AMD lists Mod among the operators for bfloat16 alone (Ryzen AI 1.8, supported operators).
    """
    why = reason(
        "Mod <fmod = 1> (x, k)", QConfig.of(preset).with_(safe=safe), k=np.float32(2)
    )
    assert (
        why == "no engine without float32 computes a remainder, but that for bfloat16"
    )


@pytest.mark.parametrize(
    ("op", "low"), [("Sin", -1), ("Cos", -1), ("Erf", -1), ("Hardmax", 0)]
)
def test_their_bounds_are_known(op: str, low: int) -> None:
    assert one(f"{op} (x)", TENSOR.with_(safe=False)).endswith(
        f"> y: quantize uint8 asymmetric [{low}, 1]\n"
    )


def test_integers_need_no_reason() -> None:
    text = plan_text(
        "g (int64[N] x, int64[N] k) => (int64[N] y) { [op] y = Mod (x, k) }"
    )
    assert "float:" not in text


# Arithmetic

TWO = "g (float[N,6] x, float[N,6] z) => (float[N,6] y)"


@pytest.mark.parametrize("op", ["Sum", "Mean", "Max", "Min"])
def test_arithmetic_of_any_number_of_operands(op: str) -> None:
    assert (
        plan_text(f"{TWO} {{ [op] y = {op} (x, z) }}")
        == f"op ({op})\n  < x: Q\n  < z: Q\n  > y: Q\n"
    )
    masked = plan_text(f"{TWO} {{ [op] y = {op} (x, z, k) }}", k=np.float32(-3e38))
    assert masked.startswith(f"op ({op})  float: 'k' holds values that mean 'never'")


def test_a_bias_that_onnxruntime_adds_stays_float() -> None:
    assert (
        one("com.microsoft.BiasAdd (x, k, x)", k=normal(8))
        == "  < x: Q\n  < x: Q\n  > y: Q\n"
    )


@pytest.mark.parametrize(
    "tail", ["y = Sqrt (h)", "y = Div (x, h)", "y = Log (h)", "y = Pow (h, half)"]
)
@pytest.mark.parametrize(
    "step",
    [
        "h = Add (s, eps)",
        "h = Max (s, eps)",
        "c = Clip (s, eps) h = Unsqueeze (c, last)",
    ],
)
def test_a_sum_that_becomes_a_denominator_stays_float(step: str, tail: str) -> None:
    body = f"[sum] s = ReduceSum <keepdims = 1> (x, last) {step} {tail}"
    constants = {
        "eps": np.float32(1e-5),
        "last": np.int64([1]),
        "half": np.float32(0.5),
    }
    used = {name: value for name, value in constants.items() if name in body}
    text = plan_text(f"g (float[N,6] x) => (float y) {{ {body} }}", **used)
    why = (
        "it makes a root, a logarithm or a denominator, of which the smallest values"
        " matter most"
    )
    assert f"sum (ReduceSum)  float: {why}\n" in text
    assert text.count(why) == 2
    assert why not in plan_text(
        f"g (float[N,6] x) => (float y) {{ {body} }}", POW2, **used
    )


#: From the tensor s, (4, 16), to the root r, (4, 1), with other readers of the mean m.
ROOTS_OF_SUMS = {
    "deviation": (
        "m = ReduceMean <axes = [-1]> (s) d = Sub (s, m) q = Mul (d, d) v = ReduceMean"
        " <axes = [-1]> (q) e = Add (v, small) r = Sqrt (e)"
    ),
    "difference of moments": (
        "m = ReduceMean <axes = [-1]> (s) q = Mul (s, s) h = ReduceMean <axes = [-1]>"
        " (q) o = Mul (m, m) v = Sub (h, o) e = Max (v, small) r = Sqrt (e)"
    ),
    "difference of sums": (
        "t = ReduceSum (s, last) m = Mul (t, part) q = Mul (s, s) u = ReduceSum (q, last)"
        " h = Mul (u, part) o = Mul (m, m) v = Sub (h, o) k = Relu (v) e = Add (k, small)"
        " r = Sqrt (e)"
    ),
    "magnitude": (
        "m = ReduceMax <axes = [-1]> (s) b = ReduceMin <axes = [-1]> (s) c = Sub (m, b) q"
        " = Mul (c, c) d = ReduceMean <axes = [-1]> (s) f = Sub (m, d) o = Mul (f, f) v ="
        " Add (q, o) r = Sqrt (v)"
    ),
}


def _root_of_sums(name: str, source: np.ndarray) -> np.ndarray:
    """The root of a form, from (4, 16) to (4,), in float64."""
    s = source.astype(np.float64)
    if name == "magnitude":
        top = s.max(axis=1)
        return np.hypot(top - s.min(axis=1), top - s.mean(axis=1))
    return s.std(axis=1)


@pytest.mark.parametrize("preset", ["A8W8", "S8S8"])
@pytest.mark.parametrize("name", ROOTS_OF_SUMS)
def test_small_roots_of_sums_of_squares_survive(name: str, preset: str) -> None:
    """A row of a tenth of the others' spread, and far from 0, keeps its root."""
    known = {
        "small": np.float32(1e-7),
        "part": np.float32(1 / 16),
        "last": np.int64([-1]),
    }
    body = ROOTS_OF_SUMS[name]
    model = parse(
        f"g (float[4,16] x) => (float[4,1] r, float[4,2] y) {{ s = Neg (x) {body}"
        " c2 = Concat <axis = 1> (m, r) y = MatMul (c2, w) }",
        w=np.float32([[1, 0], [0, 1]]),
        **{
            key: value
            for key, value in known.items()
            if f" {key})" in body or f"{key}," in body
        },
    )
    spreads = np.float32([[0.3], [0.6], [1], [3]])
    samples = [
        {"x": 4 + spreads * normal(4, 16, seed=seed, scale=1)} for seed in range(8)
    ]
    config = QConfig.of(preset).with_(search=0)
    done = quantize(model, samples, config).model
    for sample in samples:
        root = run(done, sample)[0][:, 0]
        np.testing.assert_allclose(root, _root_of_sums(name, -sample["x"]), rtol=0.2)


def test_a_square_that_another_layer_reads_is_quantized() -> None:
    text = plan_text(
        f"{TWO} {{ [op] q = Mul (x, x) s = ReduceSum <keepdims = 1> (q) h = Sqrt (s) y ="
        " Mul (q, h) }"
    )
    assert text.startswith("op (Mul)\n  < x: Q\n  < x: Q\n  > q: Q\n")


def test_a_square_is_no_denominator() -> None:
    text = plan_text(
        f"{TWO} {{ [op] h = Add (x, z) y = Pow (h, two) }}", two=np.float32(2)
    )
    assert text.startswith("op (Add)\n  < x: Q\n  < z: Q\n  > h: Q\n")


# Reductions

SUMS = ["ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare"]


@pytest.mark.parametrize("op", SUMS)
def test_sums_have_a_scale_of_their_own(op: str) -> None:
    assert one(f"{op} (x)", y="[1,1,1]") == "  < x: Q\n  > y: Q\n"


def test_running_sums_have_a_scale_of_their_own() -> None:
    assert one("CumSum (x, k)", k=np.int64(0)) == "  < x: Q\n  > y: Q\n"


def test_the_number_of_what_a_mask_lets_through_stays_float() -> None:
    text = plan_text(
        "g (int64[N] i) => (float y) { f = Cast <to = 1> (i) [op] y = ReduceSum"
        " <keepdims = 0> (f) }"
    )
    assert text.endswith(
        "float: 'f' is computed from integers alone: a mask or a position, not a"
        " signal\n"
    )


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("ReduceProd", "errors multiply with each factor"),
        ("ReduceLogSum", "it is steepest where its input is smallest"),
        ("ReduceLogSumExp", "it is the logarithm of probabilities"),
    ],
)
def test_delicate_reductions_stay_float(op: str, why: str) -> None:
    assert reason(f"{op} (x)", y="[1,1,1]").startswith(why)


def test_running_products_stay_float() -> None:
    assert reason("CumProd (x, k)", opset=26, k=np.int64(0)).startswith(
        "errors multiply"
    )


@pytest.mark.parametrize("op", ["LpPool <kernel_shape = [2]>", "GlobalLpPool"])
def test_norms_of_windows_have_a_scale_of_their_own(op: str) -> None:
    assert one(f"{op} (x)", y="[N,4,M]") == "  < x: Q\n  > y: Q\n"


# Normalizations


@pytest.mark.parametrize(
    "call",
    [
        "GroupNormalization <num_groups = 2> (x, k, k)",
        "MeanVarianceNormalization <axes = [1]> (x)",
        "LRN <size = 3> (x)",
    ],
)
def test_normalizations_have_input_and_result(call: str) -> None:
    assert one(call, k=normal(4)) == "  < x: Q\n  > y: Q\n"


@pytest.mark.parametrize("op", ["GroupNorm", "SkipGroupNorm"])
def test_group_normalization_as_onnxruntime_has_it(op: str) -> None:
    extra, skip = (", x, b", "  < x: Q\n") if op == "SkipGroupNorm" else ("", "")
    call = f"com.microsoft.{op} <groups = 2, activation = 0> (x, k, k{extra})"
    assert one(call, k=normal(8), b=normal(8)) == f"  < x: Q\n{skip}  > y: Q\n"


def test_unit_length_is_bounded() -> None:
    assert (
        one("LpNormalization (x)")
        == "  < x: Q\n  > y: quantize uint8 asymmetric [-1, 1]\n"
    )


RESIDUAL = "the residual stream around a layer normalization is too wide for 8 bits"


@pytest.mark.parametrize(
    ("op", "opset"), [("RMSNormalization", 23), ("SimplifiedLayerNormalization", 21)]
)
def test_a_residual_stream_needs_16_bits(op: str, opset: int) -> None:
    assert reason(f"{op} (x, k)", opset=opset, k=normal(8)) == RESIDUAL
    assert (
        one(f"{op} (x, k)", WIDE, opset=opset, k=normal(8)).count("quantize uint16")
        == 2
    )


@pytest.mark.parametrize(
    "op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"]
)
def test_a_residual_stream_with_its_sum(op: str) -> None:
    body = (
        f"{TWO.replace('y)', 'y, float[N,6] s)')} {{ [op] y, m, v, s ="
        f" com.microsoft.{op} (x, z, k) }}"
    )
    text = HEADER.format(opset=17) + body
    assert (
        plan_text(text, k=normal(6)) == f"op (com.microsoft::{op})  float: {RESIDUAL}\n"
    )
    wide = plan_text(text, WIDE, k=normal(6)).replace(
        "quantize uint16 asymmetric minmax", "Q"
    )
    assert wide == f"op (com.microsoft::{op})\n  < x: Q\n  < z: Q\n  > y: Q\n  > s: Q\n"


# All of them


def test_every_rule_says_what_it_does() -> None:
    """The first line is what `quark-onnx list operators` shows."""
    for name in RULES:
        line = (RULES[name].__doc__ or "").splitlines()[0]
        assert line.endswith(".") and len(line) < 118, name


def test_whatever_onnxruntime_quantizes_has_a_rule() -> None:
    from onnxruntime.quantization import registry

    theirs = {
        *registry.QLinearOpsRegistry,
        *registry.QDQRegistry,
        *registry.IntegerOpsRegistry,
    }
    assert not theirs - {name.rpartition("::")[2] for name in RULES}


def test_whatever_quark_quantizes_has_a_rule() -> None:
    """The defaults of AMD Quark 0.13 for CPUs and NPUs, static and dynamic."""
    theirs = """Add ArgMax AveragePool Clip Concat Conv ConvTranspose EmbedLayerNormalization Gather Gelu Gemm
        GlobalAveragePool InstanceNormalization LayerNormalization LeakyRelu MatMul MaxPool Mul Pad Relu Reshape Resize
        Sigmoid Softmax Split Squeeze Tanh Transpose Unsqueeze Where DepthToSpace Div Erf HardSigmoid LpNormalization
        Max Min PRelu ReduceMean Slice SpaceToDepth Sub Attention LSTM"""  # noqa: E501
    assert not set(theirs.split()) - {name.rpartition("::")[2] for name in RULES}


def test_weights_alone_give_no_reasons() -> None:
    weights = PRESETS["INT4"]
    assert (
        plan_text("g (float[N,6] x) => (float[N,6] y) { [op] y = Exp (x) }", weights)
        == "op (Exp)\n"
    )


def test_erf_between_quantized_operators() -> None:
    check(
        """
        a (Mul)
          < x: Q
          < z: Q
          > h: Q
        erf (Erf)  float: it is the inner part of a decomposed Gelu, whose errors the rest of it multiplies
          < h: Q
          > e: Q
        b (Mul)
          < e: Q
          < z: Q
          > y: Q
        """,  # noqa: E501
        f"{TWO} {{ [a] h = Mul (x, z) [erf] e = Erf (h) [b] y = Mul (e, z) }}",
    )
