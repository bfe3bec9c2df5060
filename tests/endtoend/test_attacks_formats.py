"""Faults that an attack on formats, strategies and fusions found, all fixed.

Onnxruntime's own faults are kept away.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, QuantizationSpec, compare, quantize, quantize_dynamic
from quark_onnx.common.errors import ConfigError, ModelError
from tests.settings import portable

Spec = QuantizationSpec
Array = NDArray[Any]


def normal(*shape: int, seed: int = 0, by: float = 1.0) -> Array:
    return (by * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def parse(text: str, opset: int = 17, **constants: Any) -> ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> {text}'
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name)
        for name, value in constants.items()
    )
    return model


def sqnr(
    float_model: ModelProto, model: ModelProto, feeds: dict[str, Array]
) -> list[float]:
    """Of the first output, in dB, with and without onnxruntime's optimizations."""
    expected = open_session(float_model).run(None, feeds)[0].astype(np.float64)
    found = [
        open_session(model, optimize=flag).run(None, feeds)[0].astype(np.float64)
        for flag in (True, False)
    ]
    noise = [max(float(np.square(value - expected).sum()), 1e-30) for value in found]
    return [float(10 * np.log10(np.square(expected).sum() / each)) for each in noise]


ATTENTION = """g (float[N,S,8] x) => (float[N,S,8] y) { q = MatMul (x, a) k = MatMul (x, b) v = MatMul (x, c)
    kt = Transpose <perm = [0,2,1]> (k) s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v) }"""  # noqa: E501


@pytest.mark.parametrize("form", ["qdq", "operators"])
@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "XINT8"])
def test_attention_over_a_single_token(preset: str, form: str) -> None:
    """onnxruntime's 8-bit softmax of a single value is 0."""
    model = parse(
        ATTENTION,
        **{name: normal(8, 8, seed=i, by=0.3) for i, name in enumerate("abc")},
    )
    data = [{"x": normal(2, 6, 8, seed=i)} for i in range(12)]
    result = quantize(model, data, QConfig.of(preset).with_(form=form))
    assert min(sqnr(model, result.model, {"x": normal(2, 1, 8, seed=99)})) > 15


TAILS = {
    "Clip": "y = Clip (s, lo, hi)",
    "Relu": "y = Relu (s)",
    "Transpose": "t = Transpose <perm = [1,0,2]> (s) y = MatMul (t, w)",
    "Reshape": "t = Reshape (s, shape) y = MatMul (t, w)",
    "Unsqueeze": "t = Unsqueeze (s, ax) y = Mul (t, k)",
    "MaxPool": "t = MaxPool <kernel_shape = [1]> (s) y = MatMul (t, w)",
    "Slice": "t = Slice (s, from, to) y = MatMul (t, w)",
}


@pytest.mark.parametrize("tail", TAILS)
def test_a_softmax_of_a_single_value_behind_others(tail: str) -> None:
    model = parse(
        "g (float[2,3,1] x) => (y) { h = Tanh (x) s = Softmax <axis = -1> (h)"
        f" {TAILS[tail]} }}",
        lo=np.float32(-1),
        hi=np.float32(6),
        w=normal(1, 4),
        shape=np.int64([3, 2, 1]),
        ax=np.int64([0]),
        k=np.float32(3),
        **{"from": np.int64([0]), "to": np.int64([2])},
    )
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    data = [{"x": normal(2, 3, 1, seed=i)} for i in range(3)]
    assert min(sqnr(model, quantize(model, data, "A8W8").model, data[0])) > 30


@pytest.mark.parametrize("form", ["qdq", "operators"])
@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "XINT8"])
def test_an_empty_batch_runs(preset: str, form: str) -> None:
    """onnxruntime's 8-bit softmax forgets a result that is empty."""
    text = (
        "g (float[N,8] x) => (float[N,4] y) { h = MatMul (x, w) r = Relu (h) s = MatMul"
        " (r, v) y = Softmax (s) }"
    )
    model = parse(text, w=normal(8, 8), v=normal(8, 4))
    result = quantize(
        model,
        [{"x": normal(5, 8, seed=i)} for i in range(8)],
        QConfig.of(preset).with_(form=form),
    )
    for optimize in (True, False):
        session = open_session(result.model, optimize=optimize)
        assert session.run(None, {"x": np.zeros((0, 8), np.float32)})[0].shape == (0, 4)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 7, 8, 10, 11])
@pytest.mark.parametrize(
    "layout",
    [{"per_channel": True}, {"block_size": 16}, {}],
    ids=["channel", "block", "tensor"],
)
@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_rows_of_two_bits_that_do_not_fill_their_bytes(
    dtype: str, layout: dict[str, Any], columns: int
) -> None:
    model = parse(
        f"g (float[N,64] x) => (float[N,{columns}] y) {{ y = MatMul (x, w) }}",
        w=normal(64, columns),
    )
    for form in ("qdq", "operators"):
        result = quantize(
            model, None, QConfig(None, Spec(dtype, **layout), form=form)
        ).model
        optimized, plain = sqnr(model, result, {"x": normal(9, 64, seed=3)})
        assert abs(optimized - plain) < 0.5


@pytest.mark.parametrize(
    ("dtype", "settings", "least"),
    [
        ("int8", {"reduce_range": True}, 32),
        ("uint4", {"reduce_range": True}, 7),
        ("int4", {"narrow": True}, 17),
        ("int4", {}, 18),
        ("int8", {"pow2": True}, 38),
        ("uint8", {"pow2": True, "symmetric": False}, 38),
    ],
)
def test_blocks_mind_the_codes_they_may_use(
    dtype: str, settings: dict[str, Any], least: float
) -> None:
    model = parse(
        "g (float[N,37] x) => (float[N,11] y) { y = MatMul (x, w) }", w=normal(37, 11)
    )
    result = quantize(
        model, None, QConfig(None, Spec(dtype, block_size=16, **settings))
    ).model
    assert min(sqnr(model, result, {"x": normal(9, 37, seed=3)})) > least
    stored = {
        t.name: numpy_helper.to_array(t).astype(np.float64)
        for t in result.graph.initializer
    }
    codes = stored["w_quantized"]
    if "reduce_range" in settings:
        # Symmetric codes of seven bits have both ends, as onnxruntime's.
        least_code, greatest_code = {"int8": (-64, 64), "uint4": (0, 7)}[dtype]
        assert codes.min() >= least_code and codes.max() <= greatest_code
    if "narrow" in settings:
        assert codes.min() > -8
    if "pow2" in settings:
        assert (np.log2(np.abs(stored["w_scale"])) % 1 == 0).all()


MINUS = float(np.finfo(np.float32).min)
LATER = np.triu(np.ones((6, 6), bool), 1)
MASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "where": (
        "ms = Where (later, never, s)",
        {"later": LATER, "never": np.float32(-np.inf)},
    ),
    "add": (
        "ms = Add (s, mask)",
        {"mask": np.where(LATER, MINUS, 0).astype(np.float32)},
    ),
    "add -1e9": (
        "ms = Add (s, mask)",
        {"mask": np.where(LATER, -1e9, 0).astype(np.float32)},
    ),
    "scaled": (
        "m = Add (s, mask) ms = Mul (m, half)",
        {"mask": np.float32(-1e4 * LATER), "half": np.float32(0.5)},
    ),
    "log": ("l = Log (keep) ms = Add (s, l)", {"keep": (~LATER).astype(np.float32)}),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("preset", ["MX9", "BFP16", "MXFP8E4M3", "MXINT8", "BF16"])
def test_masks_in_formats_whose_values_share_an_exponent(
    preset: str, mask: str
) -> None:
    found = []
    for text, constants in (MASKS[mask], ("ms = Identity (s)", {})):
        model = parse(
            f"""g (float[2,6,32] x) => (float[2,6,32] y) {{ q = MatMul (x, a) k = MatMul (x, b) v = MatMul (x, c)
                kt = Transpose <perm = [0,2,1]> (k) s = MatMul (q, kt) {text}
                p = Softmax <axis = -1> (ms) y = MatMul (p, v) }}""",  # noqa: E501
            **{name: normal(32, 32, seed=i, by=0.18) for i, name in enumerate("abc")},
            **constants,
        )
        found.append(
            min(
                sqnr(
                    model,
                    quantize(model, None, preset).model,
                    {"x": normal(2, 6, 32, seed=9)},
                )
            )
        )
    masked, plain = found
    assert masked > plain - 3


@pytest.mark.parametrize(
    "layout", [{}, {"per_channel": True}], ids=["tensor", "channel"]
)
def test_int32_with_a_free_zero_point(layout: dict[str, Any]) -> None:
    """onnxruntime does not subtract a zero point of int32."""
    model = parse(
        "g (float[N,37] x) => (float[N,11] y) { y = MatMul (x, w) }", w=normal(37, 11)
    )
    result = quantize(
        model, None, QConfig(None, Spec("int32", symmetric=False, **layout))
    ).model
    assert min(sqnr(model, result, {"x": normal(9, 37, seed=3)})) > 100
    model = parse("g (float[N,8] x) => (float[N,8] y) { y = Add (x, c) }", c=normal(8))
    data = [{"x": normal(4, 8, seed=i)} for i in range(3)]
    result = quantize(model, data, QConfig(Spec("int32", symmetric=False), None)).model
    assert min(sqnr(model, result, data[0])) > 100


KERNELS = ["int2", "int4", "int8", "int16", "int32", "fp8e4m3", "fp8e5m2", "fp4e2m1"]


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose", "MatMul", "Gemm"])
@pytest.mark.parametrize("weight", KERNELS)
@pytest.mark.parametrize("activation", ["uint8", "int8", "int16", "uint16"])
def test_any_weights_beside_any_integers(
    activation: str, weight: str, operator: str
) -> None:
    """Loaded and computed alike with and without onnxruntime's optimizations, a float bias
    included.
    """
    shape = "N,4,8,8" if "Conv" in operator else "N,4"
    inputs = "x, w" if operator == "MatMul" else "x, w, b"
    model = parse(
        f"g (float[{shape}] x) => (float[{shape}] y) {{ y = {operator} ({inputs}) }}",
        w=normal(4, 4, 1, 1, by=0.02) if "Conv" in operator else normal(4, 4, by=0.02),
        b=normal(4, seed=5),
    )
    data = [
        {
            "x": (
                normal(2, 4, 8, 8, seed=i)
                if "Conv" in operator
                else normal(2, 4, seed=i)
            )
        }
        for i in range(6)
    ]
    result = quantize(
        model,
        data,
        QConfig(Spec(activation, symmetric=activation[0] != "u"), Spec(weight)),
    ).model
    optimized, plain = sqnr(model, result, data[0])
    assert optimized > plain - 3


def test_values_that_are_finite_on_one_side_alone_are_no_good_ones() -> None:
    first = parse("g (float[2] x) => (float[2] y) { y = Relu (x) }")
    broken = parse(
        "g (float[2] x) => (float[2] y) { z = Mul (x, n) y = Relu (z) }",
        n=np.float32(np.nan),
    )
    [output] = compare(first, broken, [{"x": np.float32([1, 2])}]).outputs
    assert (output.sqnr, output.max_error, output.broken) == (-np.inf, np.inf, 2)
    assert output.cosine is not None and np.isnan(output.cosine)


@pytest.mark.parametrize(
    ("preset", "line", "growth"),
    [
        ("INT4", "h{1} = MatMul (h{0}, w)", 0.2),
        ("UINT4", "h{1} = MatMul (h{0}, w)", 0.2),
        ("DYNAMIC", "h{1} = Gemm <transB = 1> (h{0}, w)", 0.65),
    ],
)
def test_a_weight_that_many_layers_share_is_stored_once(
    preset: str, line: str, growth: float
) -> None:
    body = " ".join(line.format(i, i + 1) for i in range(12))
    model = parse(
        f"g (float[N,128] h0) => (float[N,128] h12) {{ {body} }}",
        w=normal(128, 128, by=0.09),
    )
    result = quantize(model, None, preset)
    assert result.report.bytes_after < growth * result.report.bytes_before


@pytest.mark.parametrize("shape", [(1, 64), (64,), (4, 64), (1,), (), (4, 1)])
def test_a_bias_of_any_shape_beside_packed_weights(shape: tuple[int, ...]) -> None:
    model = parse(
        "g (float[4,64] x) => (float[4,64] y) { a = Gemm (x, w1, b1) y = Gemm (a, w2,"
        " b2) }",
        w1=normal(64, 64, by=0.1),
        b1=normal(64),
        w2=normal(64, 64, by=0.1),
        b2=normal(*shape) if shape else np.float32(0.3),
    )
    result = quantize(model, None, "UINT4").model
    assert [node.op_type for node in result.graph.node].count("MatMulNBits") == 2
    assert min(sqnr(model, result, {"x": normal(4, 64)})) > 15


@pytest.mark.parametrize("mode", ["reflect", "edge", "constant"])
def test_a_value_to_pad_with_that_no_mode_asks_for(mode: str) -> None:
    model = parse(
        f"""g (float[1,4,8,8] x) => (float[1,4,8,8] y) {{ c = Conv (x, k) m = MaxPool <kernel_shape = [1,1]> (c)
            p = Pad <mode = "{mode}"> (m, pads, value) y = Conv (p, l) }}""",  # noqa: E501
        pads=np.int64([0, 0, 1, 1, 0, 0, 1, 1]),
        value=np.float32(0),
        k=normal(4, 4, 1, 1),
        l=normal(4, 4, 3, 3, by=0.2),
    )
    data = [{"x": normal(1, 4, 8, 8, seed=i)} for i in range(6)]
    result = quantize(model, data, portable(QConfig.of("A8W8")).with_(form="operators"))
    assert not [note for note in result.report.notes if "left out" in note]
    assert min(sqnr(model, result.model, data[0])) > 30


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "U8U8", "XINT8", "W8", "DYNAMIC"])
def test_dynamic_products_are_integer_ones_whatever_the_preset(preset: str) -> None:
    model = parse(
        "g (float[N,32] x) => (float[N,32] y) { y = MatMul (x, w) }", w=normal(32, 32)
    )
    result = quantize_dynamic(model, portable(QConfig.of(preset)))
    assert "MatMulInteger" in [node.op_type for node in result.graph.node]
    pairs = quantize_dynamic(model, QConfig.of("DYNAMIC").with_(form="qdq"))
    assert "MatMulInteger" not in [node.op_type for node in pairs.graph.node]


@pytest.mark.parametrize("preset", ["INT4", "BF16", "INT16", "MX9", "FP8E4M3"])
def test_dynamic_products_need_weights_of_8_bits(preset: str) -> None:
    with pytest.raises(ConfigError, match="int8 or uint8 weights"):
        quantize_dynamic(
            parse(
                "g (float[N,4] x) => (float[N,4] y) { y = MatMul (x, w) }",
                w=normal(4, 4),
            ),
            preset,
        )


def test_a_dynamic_product_with_rows_that_have_zero_points() -> None:
    model = parse(
        "g (float[6,4] x) => (float[5,4] y) { y = MatMul (w, x) }", w=normal(5, 6)
    )
    config = QConfig.of("DYNAMIC").with_(
        weight=Spec("uint8", symmetric=False, per_channel=True)
    )
    assert (
        min(sqnr(model, quantize(model, None, config).model, {"x": normal(6, 4)})) > 25
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dtype": "int16", "symmetric": False, "block_size": 16, "solver": "hqq"},
            "solver hqq is for",
        ),
        (
            {
                "dtype": "uint4",
                "symmetric": False,
                "block_size": 16,
                "solver": "hqq",
                "pow2": True,
            },
            "solver hqq is for",
        ),
        (
            {"dtype": "uint8", "symmetric": False, "dynamic": True, "pow2": True},
            "pow2 cannot be set",
        ),
        (
            {
                "dtype": "uint8",
                "symmetric": False,
                "dynamic": True,
                "reduce_range": True,
            },
            "reduce_range cannot be set",
        ),
        ({"dtype": "int2", "reduce_range": True}, "leaves one bit of int2"),
        ({"dtype": "uint2", "reduce_range": True}, "leaves one bit of uint2"),
        (
            {"dtype": "uint32", "block_size": 16},
            "uint32 has one scale for a tensor or a channel",
        ),
        ({"dtype": "bfp16", "scale": "float16"}, "bfp16 has none"),
        (
            {"dtype": "uint8", "symmetric": False, "dynamic": True, "scale": "float16"},
            "each run computes it",
        ),
        ({"dtype": "int8", "scale": "half"}, "it must be one of: float32, float16"),
    ],
)
def test_settings_that_do_not_go_together(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Spec(**settings)


def test_settings_of_a_config_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="saturate is false"):
        QConfig(Spec("float16"), None, form="vendor")
    with pytest.raises(ConfigError, match="min_sqnr is 1000"):
        QConfig(min_sqnr=10**400)


def test_small_floats_in_the_vendors_form_stay_those_of_onnx() -> None:
    model = parse(
        "g (float[N,8] x) => (float[N,8] y) { y = MatMul (x, w) }", w=normal(8, 8)
    )
    result = quantize(
        model, [{"x": normal(3, 8)}], QConfig.of("FP8E4M3").with_(form="vendor")
    )
    assert "QuantizeLinear" in [node.op_type for node in result.model.graph.node]


@pytest.mark.parametrize("block_size", [64, 100_000, 10**12])
def test_a_block_that_is_longer_than_its_axis(block_size: int) -> None:
    model = parse(
        "g (float[N,40] x) => (float[N,40] y) { y = MatMul (x, w) }", w=normal(40, 40)
    )
    result = quantize(model, None, QConfig(None, Spec("int4", block_size=block_size)))
    assert min(sqnr(model, result.model, {"x": normal(3, 40)})) > 14


@pytest.mark.parametrize("preset", ["A8W8", "FP16", "BF16", "W8", "BFP16"])
def test_a_sparse_constant_stays_as_it_is(preset: str) -> None:
    model = parse(
        "g (float[N,4] x) => (float[N,4] y) { a = MatMul (x, w) y = Add (a, s) }",
        w=normal(4, 4),
    )
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.float32([1.5]), "s"),
        numpy_helper.from_array(np.int64([2]), "i"),
        [4],
    )
    model.graph.sparse_initializer.append(sparse)
    data = [{"x": normal(3, 4)}]
    result = quantize(model, data if QConfig.of(preset).measures else None, preset)
    assert min(sqnr(model, result.model, data[0])) > 10
    assert len(result.model.graph.sparse_initializer) == 1


def test_a_type_that_onnx_does_not_know_is_named() -> None:
    model = parse(
        "g (float[N,4] x) => (float[N,4] y) { y = MatMul (x, w) }", w=normal(4, 4)
    )
    model.graph.initializer[0].data_type = 99
    with pytest.raises(ModelError):
        quantize(model, [{"x": normal(3, 4)}])
