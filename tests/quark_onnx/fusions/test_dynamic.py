"""MatMulInteger and ConvInteger compute what DynamicQuantizeLinear, DQ and a float operator do."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from quark_onnx import QConfig
from quark_onnx.api import quantize
from quark_onnx.config import QuantizationSpec
from tests.models import (
    Array,
    Factory,
    Feeds,
    conv_1d,
    conv_relu,
    depthwise,
    gemm,
    gemm_scaled,
    kinds,
    matmul_3d,
    normal,
    parse,
    run,
    samples,
    weight,
)
from tests.settings import portable

DYNAMIC = portable(QConfig.of("DYNAMIC"))


def grouped() -> ModelProto:
    return parse(
        """g (float[N,4,8,8] x) => (float[N,6,4,4] y) {
            y = Conv <group = 2, strides = [2,2], auto_pad = "SAME_UPPER", dilations = [1,1]> (x, w, b)
        }""",  # noqa: E501
        w=weight(6, 2, 3, 3),
        b=normal(6),
    )


def matmul() -> ModelProto:
    return parse(
        "g (float[N,5,6] x) => (float[N,5,3] y) { y = MatMul (x, w) }", w=weight(6, 3)
    )


FUSED = {
    "matmul": (matmul, "MatMulInteger"),
    "gemm": (gemm, "MatMulInteger"),
    "gemm transposed": (lambda: gemm(trans_b=1), "MatMulInteger"),
    "conv": (conv_relu, "ConvInteger"),
    "conv 1d": (conv_1d, "ConvInteger"),
    "depthwise": (depthwise, "ConvInteger"),
    "conv of groups": (grouped, "ConvInteger"),
}
WEIGHTS = {
    "tensor": DYNAMIC.with_(per_channel=False),
    "channel": DYNAMIC,
    "asymmetric": DYNAMIC.with_(
        weight=DYNAMIC.weight.with_(symmetric=False, narrow=False)
    ),  # type: ignore[union-attr]
    "uint8 tensor": DYNAMIC.with_(weight=QuantizationSpec("uint8", symmetric=False)),
    "uint8 channel": DYNAMIC.with_(
        weight=QuantizationSpec("uint8", symmetric=False, per_channel=True)
    ),
    "uint8 symmetric": DYNAMIC.with_(
        weight=QuantizationSpec("uint8", per_channel=True)
    ),
}
CONVOLUTIONS = [
    name for name, (_, expected) in FUSED.items() if expected == "ConvInteger"
]


@pytest.mark.parametrize("config", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("name", FUSED)
def test_products(name: str, config: QConfig) -> None:
    make, expected = FUSED[name]
    float_model = make()
    pairs = quantize(float_model, None, config.with_(form="qdq")).model
    fused = quantize(float_model, None, config.with_(form="operators")).model
    assert expected in kinds(fused)
    assert not {"Conv", "Gemm", "MatMul"} & set(kinds(fused))
    for feeds in samples(float_model, 3):
        [plain] = run(pairs, feeds)
        for optimize in (False, True):
            [found] = run(fused, feeds, optimize=optimize)
            np.testing.assert_allclose(found, plain, atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize("make", [gemm_scaled, matmul_3d])
def test_what_stays_between_its_pairs(make: Factory) -> None:
    float_model = make()
    fused = quantize(float_model, None, DYNAMIC).model
    assert {"Gemm", "MatMul"} & set(kinds(fused))
    run(fused, samples(float_model, 1)[0])


@pytest.mark.parametrize("config", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_sums_of_codes(name: str, config: QConfig) -> None:
    """ConvInteger reads uint8 kernels, has the sums that the codes have, and those stand for the
    numbers of the pairs.

    Sums of so few codes are integers that float32 holds exactly: Conv on them is the oracle,
    borders included.
    """
    float_model = FUSED[name][0]()
    pairs = quantize(float_model, None, config.with_(form="qdq")).model
    fused = quantize(float_model, None, config.with_(form="operators")).model
    [product] = [node for node in fused.graph.node if node.op_type == "ConvInteger"]
    kernel, zero_point = (stored(fused)[product.input[place]] for place in (1, 3))
    assert (kernel.dtype, zero_point.dtype, zero_point.shape) == (
        np.uint8,
        np.uint8,
        (),
    )
    signed = kernel.astype(np.float32) - zero_point
    np.testing.assert_array_equal(signed, codes_of_pairs(pairs))
    for feeds in samples(float_model, 3):
        codes, x_zero_point, sums = intermediate(fused, feeds, product)
        [expected] = run(
            convolution(product, signed), {"x": codes.astype(np.float32) - x_zero_point}
        )
        assert np.abs(expected).max() < 2**24
        np.testing.assert_array_equal(sums, expected)
        for optimize in (False, True):
            [found] = run(fused, feeds, optimize=optimize)
            [plain] = run(pairs, feeds)
            np.testing.assert_allclose(found, plain, atol=1e-5 * np.abs(plain).max())


def stored(model: ModelProto) -> dict[str, Array]:
    return {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }


def codes_of_pairs(model: ModelProto) -> Array:
    """Kernel codes minus zero points of the one DequantizeLinear whose codes are stored."""
    arrays = stored(model)
    [node] = [
        n
        for n in model.graph.node
        if n.op_type == "DequantizeLinear" and n.input[0] in arrays
    ]
    codes = arrays[node.input[0]].astype(np.float32)
    zeros = (
        arrays[node.input[2]].astype(np.float32)
        if len(node.input) > 2
        else np.zeros((), np.float32)
    )
    return codes - zeros.reshape(-1, *[1] * (codes.ndim - 1) if zeros.ndim else [])


def intermediate(model: ModelProto, feeds: Feeds, product: NodeProto) -> list[Array]:
    """What a product of codes reads and computes: codes, their zero point, sums."""
    copy = ModelProto()
    copy.CopyFrom(model)
    kinds_of = (TensorProto.UINT8, TensorProto.UINT8, TensorProto.INT32)
    names = (product.input[0], product.input[2], product.output[0])
    del copy.graph.output[:]
    copy.graph.output.extend(
        map(helper.make_tensor_value_info, names, kinds_of, [None] * 3)
    )
    return run(copy, feeds)


def convolution(product: NodeProto, kernel: Array) -> ModelProto:
    """The float Conv of the same attributes by a kernel."""
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    node.attribute.extend(product.attribute)
    dims = [None] * kernel.ndim
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)],
        [numpy_helper.from_array(kernel, "w")],
    )
    return helper.make_model(
        graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]
    )


def attention(attributes: str, further: str = "") -> ModelProto:
    """Attention of com.microsoft with a mask of keys."""
    return parse(
        f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[1, 5, 16] x, int32[1, 5] m) => (float[1, 5, 16] y) {{
            y = com.microsoft.Attention <num_heads = 4{attributes}> (x, w, b, m{further})
        }}""",
        w=weight(16, 48),
        b=normal(48, scale=0.1),
        scores=normal(1, 4, 5, 5),
    )


@pytest.mark.parametrize(
    ("attributes", "further", "has_integers"),
    [
        ("", "", True),
        (", unidirectional = 1, scale = 0.2", "", True),
        # The value 0 is not the default of this one: masked keys count as well.
        (", mask_filter_value = 0.0", "", True),
        (", do_rotary = 0, past_present_share_buffer = 0", "", True),
        (", qkv_hidden_sizes = [16, 16, 16]", "", False),
        ("", ", , scores", False),
    ],
)
def test_attention_is_that_of_its_codes(
    attributes: str, further: str, has_integers: bool
) -> None:
    """QAttention, where it has the attributes and inputs, computes Attention of float values."""
    model = attention(attributes, further)
    feeds: Feeds = {"x": normal(1, 5, 16), "m": np.array([[1, 1, 1, 0, 0]], np.int32)}
    quantized = quantize(model, [feeds], DYNAMIC).model
    assert ("QAttention" in kinds(quantized)) is has_integers
    if not has_integers:
        assert "Attention" in kinds(quantized)
        return
    (node,) = (node for node in quantized.graph.node if node.op_type == "QAttention")
    stored = {t.name: numpy_helper.to_array(t) for t in quantized.graph.initializer}
    codes, scale, zero = (stored[node.input[i]] for i in (1, 4, 7))
    values = (codes.astype(np.float32) - zero.astype(np.float32)) * scale
    for tensor in model.graph.initializer:
        if tensor.name == "w":
            tensor.CopyFrom(numpy_helper.from_array(values, "w"))
    x = feeds["x"]
    step = np.float32((x.max() - x.min()) / 255)
    middle = np.rint(-x.min() / step)
    rounded = (np.clip(np.rint(x / step) + middle, 0, 255) - middle) * step
    expected = run(model, {**feeds, "x": rounded.astype(np.float32)})[0]
    np.testing.assert_allclose(run(quantized, feeds)[0], expected, atol=1e-5)
