"""Each operator between Q/DQ pairs becomes the one that computes on codes, and says the same within
one step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from quark_onnx import QConfig
from quark_onnx.api import quantize
from tests.models import (
    MODELS,
    Array,
    conv_1d,
    conv_relu,
    convtranspose,
    depthwise,
    gemm,
    kinds,
    matmul_3d,
    matmul_left,
    normal,
    parse,
    residual,
    run,
    samples,
    weight,
)
from tests.settings import CHANNEL, SIGNED, TENSOR, portable

CONFIGS = {
    "u8": TENSOR,
    "u8-channel": CHANNEL,
    "s8": SIGNED,
    "s8-channel": SIGNED.with_(per_channel=True),
}


def both(model: ModelProto, config: QConfig) -> tuple[ModelProto, ModelProto]:
    """The model between Q/DQ pairs, and with operators on codes; nothing was left out of it."""
    data, config = samples(model), portable(config)
    done = quantize(model, data, config.with_(form="operators", safe=False))
    assert not [note for note in done.report.notes if "left out" in note]
    onnx.checker.check_model(done.model, full_check=True)
    return quantize(model, data, config.with_(safe=False)).model, done.model


def steps(model: ModelProto) -> dict[str, float]:
    """The scale of each output that is dequantized."""
    constants = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    pairs = [
        n
        for n in model.graph.node
        if n.op_type == "DequantizeLinear" and constants[n.input[1]].ndim == 0
    ]
    return {n.output[0]: float(constants[n.input[1]]) for n in pairs}


def bias_step(pairs: ModelProto, fused: ModelProto) -> float:
    """Half the greatest step of an int32 bias, where the operators add the float bias; or 0."""
    types = {tensor.name: tensor for tensor in pairs.graph.initializer}
    scales = [
        float(numpy_helper.to_array(types[n.input[1]]).max())
        for n in pairs.graph.node
        if n.op_type == "DequantizeLinear"
        and n.input[0] in types
        and types[n.input[0]].data_type == TensorProto.INT32
    ]
    if any(t.data_type == TensorProto.INT32 for t in fused.graph.initializer):
        return 0.0
    return max(scales, default=0.0) / 2


def assert_alike(pairs: ModelProto, fused: ModelProto, count: int = 1) -> None:
    """Outputs are the same within ``count`` steps of their scale, or float rounding.

    Optimized and not.
    """
    scale = steps(pairs)
    rounding = bias_step(pairs, fused)
    for feeds in samples(pairs, 3, seed=5):
        expected = run(pairs, feeds)
        for optimize in (False, True):
            found = run(fused, feeds, optimize=optimize)
            for output, a, b in zip(pairs.graph.output, expected, found, strict=True):
                exact = 1e-5 * float(np.abs(a).max()) + rounding
                step = scale.get(output.name, exact)
                np.testing.assert_allclose(b, a, rtol=0, atol=1.001 * count * step)


def model(
    text: str,
    shape: str = "1,4,8,8",
    out: str = "1,4,8,8",
    opset: int = 17,
    **constants: Array,
) -> ModelProto:
    return parse(
        f"g (float[{shape}] x) => (float[{out}] y) {{ {text} }}",
        opset=opset,
        **constants,
    )


FOUR = np.int64([1, 4, 64, 1])
LAYERS: dict[str, tuple[ModelProto, str, str]] = {
    "conv": (conv_relu(), "QLinearConv", "Conv"),
    "conv without bias": (depthwise(), "QLinearConv", "Conv"),
    "conv 1d": (conv_1d(), "QLinearConv", "Conv"),
    "conv 3d": (
        model(
            "y = Conv (x, w, b)",
            "1,2,5,5,5",
            "1,4,3,3,3",
            w=weight(4, 2, 3, 3, 3),
            b=normal(4),
        ),
        "QLinearConv",
        "Conv",
    ),
    "conv with all attributes": (
        model(
            'y = Conv <auto_pad = "SAME_UPPER", group = 2, strides = [2,2],'
            " kernel_shape = [3,3]> (x, w, b)",
            out="1,6,4,4",
            w=weight(6, 2, 3, 3),
            b=normal(6),
        ),
        "QLinearConv",
        "Conv",
    ),
    "conv dilated": (
        model(
            "y = Conv <dilations = [2,2], pads = [2,2,2,2]> (x, w, b)",
            w=weight(4, 4, 3, 3),
            b=normal(4),
        ),
        "QLinearConv",
        "Conv",
    ),
    "gemm": (gemm(), "QGemm", "Gemm"),
    "gemm transposed": (gemm(trans_b=1), "QGemm", "Gemm"),
    "gemm of a transposed": (
        model(
            "y = Gemm <transA = 1, alpha = 0.5> (x, w)", "6,5", "5,3", w=weight(6, 3)
        ),
        "QGemm",
        "Gemm",
    ),
    "gemm quantized": (
        model(
            "h = Gemm (x, w, b) y = Relu (h)", "5,6", "5,3", w=weight(6, 3), b=normal(3)
        ),
        "QGemm",
        "",
    ),
    "matmul": (
        model("y = MatMul (x, w)", "2,5,6", "2,5,3", w=weight(6, 3)),
        "MatMulIntegerToFloat",
        "MatMul",
    ),
    "matmul and bias": (
        model(
            "h = MatMul (x, w) y = Add (b, h)",
            "2,5,6",
            "2,5,3",
            w=weight(6, 3),
            b=normal(3),
        ),
        "MatMulIntegerToFloat",
        "Add",
    ),
    "matmul of a stack": (matmul_3d(), "MatMulIntegerToFloat", "MatMul"),
    "matmul quantized": (
        model("h = MatMul (x, w) y = Sigmoid (h)", "2,5,6", "2,5,3", w=weight(6, 3)),
        "QLinearMatMul",
        "MatMul",
    ),
    "matmul of computed": (
        model(
            "t = Transpose <perm = [0,2,1]> (x) h = MatMul (x, t) y = Sigmoid (h)",
            "2,5,6",
            "2,5,5",
        ),
        "QLinearMatMul",
        "MatMul",
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("float_model", "expected", "gone"), LAYERS.values(), ids=LAYERS
)
def test_layers(
    float_model: ModelProto, expected: str, gone: str, config: QConfig
) -> None:
    pairs, fused = both(float_model, config)
    assert expected in kinds(fused) and gone not in kinds(fused)
    assert_alike(pairs, fused)


POINTWISE: dict[str, tuple[ModelProto, str]] = {
    "Add": (model("t = Transpose <perm = [0,1,3,2]> (x) y = Add (x, t)"), "QLinearAdd"),
    "Add a constant": (model("y = Add (c, x)", c=normal(4, 1, 1)), "QLinearAdd"),
    "Mul": (model("t = Sigmoid (x) y = Mul (x, t)"), "QLinearMul"),
    "Sigmoid": (model("y = Sigmoid (x)"), "QLinearSigmoid"),
    "LeakyRelu": (model("y = LeakyRelu <alpha = 0.2> (x)"), "QLinearLeakyRelu"),
    "AveragePool": (
        model(
            "y = AveragePool <kernel_shape = [3,3], strides = [2,2], pads ="
            " [1,1,1,1]> (x)",
            out="1,4,4,4",
        ),
        "QLinearAveragePool",
    ),
    "AveragePool counting": (
        model(
            "y = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad"
            " = 1> (x)",
        ),
        "QLinearAveragePool",
    ),
    "AveragePool rounding up": (
        model(
            "y = AveragePool <kernel_shape = [3,3], strides = [2,2], ceil_mode ="
            " 1> (x)",
            out="1,4,4,4",
        ),
        "QLinearAveragePool",
    ),
    "AveragePool 1d": (
        model("y = AveragePool <kernel_shape = [2]> (x)", "1,4,8", "1,4,7"),
        "QLinearAveragePool",
    ),
    "GlobalAveragePool": (
        model("y = GlobalAveragePool (x)", out="1,4,1,1"),
        "QLinearGlobalAveragePool",
    ),
    "ReduceMean": (
        model("y = ReduceMean <axes = [-1,2]> (x)", out="1,4,1,1"),
        "QLinearGlobalAveragePool",
    ),
    "ReduceMean flat": (
        model("y = ReduceMean <axes = [2,3], keepdims = 0> (x)", out="1,4"),
        "QLinearGlobalAveragePool",
    ),
    "ReduceMean by input": (
        model(
            "y = ReduceMean (x, axes)", out="1,4,1,1", opset=18, axes=np.int64([2, 3])
        ),
        "QLinearGlobalAveragePool",
    ),
    "Concat": (
        model(
            "t = Sigmoid (x) y = Concat <axis = -3> (x, t, c)",
            out="1,9,8,8",
            c=normal(1, 1, 8, 8),
        ),
        "QLinearConcat",
    ),
    "Where": (
        parse(
            "g (float[1,4] x, bool[1,4] c) => (float[1,4] y) { t = Sigmoid (x) y ="
            " Where (c, t, x) }"
        ),
        "QLinearWhere",
    ),
    "Softmax": (model("y = Softmax <axis = -1> (x)"), "QLinearSoftmax"),
    "Softmax over channels": (model("y = Softmax <axis = 1> (x)"), "QLinearSoftmax"),
    "Softmax of old": (
        model("y = Softmax <axis = 2> (x)", "1,4,2,2", "1,4,2,2", opset=11),
        "QLinearSoftmax",
    ),
}


@pytest.mark.parametrize("config", [TENSOR, SIGNED], ids=["u8", "s8"])
@pytest.mark.parametrize(("float_model", "expected"), POINTWISE.values(), ids=POINTWISE)
def test_pointwise(float_model: ModelProto, expected: str, config: QConfig) -> None:
    pairs, fused = both(float_model, config)
    gone = expected.removeprefix("QLinear")
    assert (
        expected in kinds(fused)
        and gone not in kinds(fused)
        and "ReduceMean" not in kinds(fused)
    )
    assert_alike(pairs, fused)


def test_softmax_counts_in_steps_of_its_scale() -> None:
    """onnxruntime takes 1/255 in float32 for 1/254."""
    pairs, fused = both(model("y = Softmax (x)", "1,3", "1,3"), TENSOR)
    feeds = {"x": np.float32([[90.0, -90.0, -90.0]])}
    assert run(fused, feeds)[0][0, 0] == run(pairs, feeds)[0][0, 0]


MOVING: dict[str, ModelProto] = {
    "Concat": model("t = LeakyRelu (x) y = Concat <axis = 1> (t, t)", out="1,8,8,8"),
    "DepthToSpace": model(
        "t = LeakyRelu (x) y = DepthToSpace <blocksize = 2> (t)", out="1,1,16,16"
    ),
    "Expand": model(
        "t = LeakyRelu (x) y = Expand (t, s)", out="2,4,8,8", s=np.int64([2, 4, 8, 8])
    ),
    "Flatten": model("t = LeakyRelu (x) y = Flatten (t)", out="1,256"),
    "Gather": model(
        "t = LeakyRelu (x) y = Gather <axis = 2> (t, i)",
        out="1,4,2,8",
        i=np.int64([3, -1]),
    ),
    "MaxPool": model(
        "t = LeakyRelu (x) y = MaxPool <kernel_shape = [3,3], pads = [1,1,1,1]> (t)"
    ),
    "Pad": model(
        "t = LeakyRelu (x) y = Pad (t, p)",
        out="1,4,10,8",
        p=np.int64([0, 0, 1, 0, 0, 0, 1, 0]),
    ),
    "Pad reflected": model(
        't = LeakyRelu (x) y = Pad <mode = "reflect"> (t, p)',
        out="1,4,10,8",
        p=np.int64([0, 0, 1, 0, 0, 0, 1, 0]),
    ),
    "Reshape": model("t = LeakyRelu (x) y = Reshape (t, s)", out="1,4,64,1", s=FOUR),
    "Resize": model(
        't = LeakyRelu (x) y = Resize <mode = "nearest"> (t, , s)',
        out="1,4,16,16",
        s=np.float32([1, 1, 2, 2]),
    ),
    "Slice": model(
        "t = LeakyRelu (x) y = Slice (t, a, b, c)",
        out="1,4,3,8",
        a=np.int64([1]),
        b=np.int64([4]),
        c=np.int64([2]),
    ),
    "SpaceToDepth": model(
        "t = LeakyRelu (x) y = SpaceToDepth <blocksize = 2> (t)", out="1,16,4,4"
    ),
    "Squeeze": model(
        "t = LeakyRelu (x) y = Squeeze (t, a)", out="4,8,8", a=np.int64([0])
    ),
    "Tile": model(
        "t = LeakyRelu (x) y = Tile (t, r)", out="1,8,8,8", r=np.int64([1, 2, 1, 1])
    ),
    "Transpose": model(
        "t = LeakyRelu (x) y = Transpose <perm = [0,2,3,1]> (t)", out="1,8,8,4"
    ),
    "Unsqueeze": model(
        "t = LeakyRelu (x) y = Unsqueeze (t, a)", out="1,1,4,8,8", a=np.int64([0])
    ),
    "Split": parse(
        "g (float[1,4,8] x) => (float[1,2,8] y, float[1,2,8] z) { t = LeakyRelu (x) y,"
        " z = Split <axis = 1> (t) }"
    ),
    "Split idle": parse(
        "g (float[1,4,8] x) => (float[1,2,8] y) { t = LeakyRelu (x) y, z = Split <axis"
        " = 1> (t) }"
    ),
}


def between_codes(fused: ModelProto) -> list[str]:
    """Nodes that are not a Q or DQ at an end of the model."""
    return [
        kind
        for kind in kinds(fused)
        if kind not in ("QuantizeLinear", "DequantizeLinear")
    ]


@pytest.mark.parametrize("config", [TENSOR, SIGNED], ids=["u8", "s8"])
@pytest.mark.parametrize("float_model", MOVING.values(), ids=MOVING)
def test_moving(float_model: ModelProto, config: QConfig) -> None:
    """The model begins with Q, goes on with codes alone, and ends with a DQ for each output."""
    pairs, fused = both(float_model, config)
    moved = kinds(float_model)[-1]
    results = len(float_model.graph.output)
    assert kinds(fused) == [
        "QuantizeLinear",
        "QLinearLeakyRelu",
        moved,
        *["DequantizeLinear"] * results,
    ]
    assert_alike(pairs, fused)


def test_a_softmax_of_small_values_stays_float() -> None:
    """Its scale would be one at which onnxruntime's integer softmax wraps around."""
    pairs, fused = both(model("y = Softmax <axis = 2> (x)", opset=11), TENSOR)
    assert "Softmax" in between_codes(fused)
    assert_alike(pairs, fused)


def test_padding_has_a_code_of_its_own() -> None:
    """The Q/DQ pair of the result rounds what is padded with; so does its code."""
    p = np.int64([0, 1, 0, 1])
    pairs, fused = both(
        model("t = Relu (x) y = Pad (t, p, v)", "2,3", "2,5", p=p, v=np.float32(0.0)),
        TENSOR,
    )
    assert "Pad" in between_codes(fused)
    assert_alike(pairs, fused)


@pytest.mark.parametrize(
    "text",
    [
        "y = Relu (h)",
        "y = Clip (h, low, high)",
        "y = Clip (h, low)",
        "y = Clip (h, , high)",
    ],
)
def test_clips_follow_rounding(text: str) -> None:
    """int8 codes do not end where the clip does.

    The layer before it computes codes all the same.
    """
    float_model = model(
        f"h = Conv (x, w) {text}",
        "1,3,8,8",
        w=weight(4, 3, 1, 1),
        low=np.float32(-0.1),
        high=np.float32(0.4),
    )
    pairs, fused = both(float_model, SIGNED)
    assert kinds(fused) == ["QuantizeLinear", "QLinearConv", "Clip", "DequantizeLinear"]
    assert_alike(pairs, fused)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_residual_network_computes_on_codes_throughout(config: QConfig) -> None:
    pairs, fused = both(residual(), config)
    left = {
        "QLinearConv",
        "QLinearAdd",
        "MaxPool",
        "QLinearGlobalAveragePool",
        "Flatten",
        "QGemm",
    }
    assert set(kinds(fused)) == left | {"QuantizeLinear"} | (
        {"Clip"} if config.activation == SIGNED.activation else set()
    )
    assert kinds(fused).count("QuantizeLinear") == 1
    [expected], [found] = (
        run(pairs, samples(residual())[0]),
        run(fused, samples(residual())[0]),
    )
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())


STAYING: dict[str, tuple[ModelProto, str]] = {
    "no kernel": (convtranspose(), "ConvTranspose"),
    "no kernel for rows": (matmul_left(), "MatMul"),
    "no kernel for differences": (model("t = Sigmoid (x) y = Sub (x, t)"), "Sub"),
    "interpolation": (
        model(
            'y = Resize <mode = "linear"> (x, , s)',
            out="1,4,16,16",
            s=np.float32([1, 1, 2, 2]),
        ),
        "Resize",
    ),
    "wrong in onnxruntime": (
        model(
            "y = AveragePool <kernel_shape = [3,3], strides = [2,2], pads = [1,1,1,1],"
            " ceil_mode = 1, count_include_pad = 1> (x)",
            out="1,4,5,5",
        ),
        "AveragePool",
    ),
    "the index is read": (
        parse(
            "g (float[1,1,4,4] x) => (float[1,1,2,2] y, int64[1,1,2,2] i) { y, i ="
            " MaxPool <kernel_shape = [3,3]> (x) }"
        ),
        "MaxPool",
    ),
    "a mean over channels": (
        model("y = ReduceMean <axes = [1,2]> (x)", out="1,1,1,8"),
        "ReduceMean",
    ),
}


@pytest.mark.parametrize(("float_model", "op_type"), STAYING.values(), ids=STAYING)
def test_what_stays_between_its_pairs(float_model: ModelProto, op_type: str) -> None:
    pairs, fused = both(float_model, CHANNEL)
    assert op_type in kinds(fused)
    assert_alike(pairs, fused)


def test_a_result_that_somebody_else_reads_stays_float() -> None:
    text = "g (float[1,4,4,4] x, bool c) => (float[1,4,4,4] y) {{ h = Conv (x, w) {} }}"
    branch = (
        "r = LeakyRelu (h) s = If (c) <then_branch = a () => (float[1,4,4,4] t) { t ="
        " Identity (h) }, else_branch = b () => (float[1,4,4,4] e) { e = Neg (h) }> y ="
        " Add (r, s)"
    )
    captured = parse(text.format(branch), w=weight(4, 4, 1, 1))
    pairs, fused = both(captured, TENSOR)
    assert_alike(pairs, fused, count=2)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_survives(name: str) -> None:
    float_model: ModelProto = MODELS[name]()
    data: list[dict[str, Any]] = samples(float_model)
    for config in (CHANNEL, SIGNED):
        result = quantize(float_model, data, portable(config).with_(form="operators"))
        assert not [note for note in result.report.notes if "left out" in note]
        run(result.model, data[0])
        run(result.model, data[0], optimize=True)
