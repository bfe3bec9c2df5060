"""Scales, zero points and pairs that onnxruntime's quantizer gives the same model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization as theirs
import pytest
from numpy.testing import assert_array_equal
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

import quark_onnx.compat_onnxruntime as ours
from tests.compat_onnxruntime.patterns import reader
from tests.models import parse

INT8, UINT8 = theirs.QuantType.QInt8, theirs.QuantType.QUInt8


def network() -> ModelProto:
    """Return Conv, Sigmoid, Conv with a bias."""
    random = np.random.default_rng(0)
    shapes = {"first": (3, 2, 3, 3), "second": (3, 3, 3, 3), "bias": (3,)}
    return parse(
        """
        agraph (float[1, 2, 6, 6] x) => (float[1, 3, 2, 2] y) {
            a = Conv (x, first)
            s = Sigmoid (a)
            y = Conv (s, second, bias)
        }
        """,
        **{
            name: random.normal(0, 0.3, shape).astype(np.float32)
            for name, shape in shapes.items()
        },
    )


def feeds(*shape: int) -> list[dict[str, NDArray[np.float32]]]:
    random = np.random.default_rng(1)
    return [{"x": random.normal(0, 1, shape).astype(np.float32)} for _ in range(4)]


def both(
    model: ModelProto, shape: tuple[int, ...], folder: Path, **settings: Any
) -> tuple[ModelProto, ModelProto]:
    """Return the results of this package and of onnxruntime."""
    results = []
    for name, q in (("ours", ours), ("theirs", theirs)):
        path = folder / f"{name}.onnx"
        data = reader(theirs, feeds(*shape))
        q.quantize_static(model, str(path), data, **settings)
        results.append(onnx.load(path))
    return results[0], results[1]


def parameters(model: ModelProto) -> dict[str, NDArray[Any]]:
    """Return scales and zero points by name."""
    return {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.name.endswith(("_scale", "_zero_point"))
    }


def types(model: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_type": UINT8},
        {"activation_type": UINT8, "per_channel": True},
        {"activation_type": INT8, "reduce_range": True},
        {"activation_type": UINT8, "per_channel": True, "reduce_range": True},
        {"activation_type": UINT8, "weight_type": UINT8, "per_channel": True},
        {
            "activation_type": UINT8,
            "weight_type": UINT8,
            "extra_options": {"WeightSymmetric": True, "ActivationSymmetric": True},
        },
    ],
    ids=lambda settings: " ".join(settings),
)
def test_scales_and_zero_points_are_equal(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """The range of a Sigmoid is measured; seven bits are -64 to 64; uint8 counts 127.5."""
    found, expected = map(
        parameters, both(network(), (1, 2, 6, 6), tmp_path, **settings)
    )
    biases = {"bias_scale": "bias_quantized_scale"}
    biases["bias_zero_point"] = "bias_quantized_zero_point"
    for name, array in found.items():
        wanted = expected[biases.get(name, name)]
        assert array.shape == wanted.shape, name
        np.testing.assert_allclose(
            array.astype(np.float64), wanted.astype(np.float64), rtol=2e-7, err_msg=name
        )


def test_codes_of_seven_bits_reach_both_ends(tmp_path: Path) -> None:
    found, expected = both(
        network(), (1, 2, 6, 6), tmp_path, activation_type=UINT8, reduce_range=True
    )
    codes, wanted = (
        {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in model.graph.initializer
        }
        for model in (found, expected)
    )
    for name in ("first_quantized", "second_quantized"):
        assert_array_equal(codes[name], wanted[name])
    assert max(np.abs(codes["first_quantized"]).max(), 0) == 64


def test_weights_of_zeros_have_the_zero_point_0(tmp_path: Path) -> None:
    model = network()
    zeros = numpy_helper.from_array(np.zeros((3, 2, 3, 3), np.float32), "first")
    model.graph.initializer[0].CopyFrom(zeros)
    found, expected = both(
        model,
        (1, 2, 6, 6),
        tmp_path,
        activation_type=UINT8,
        weight_type=UINT8,
    )
    assert parameters(found)["first_zero_point"] == 0
    assert parameters(expected)["first_zero_point"] == 0


@pytest.mark.parametrize("form", list(theirs.QuantFormat), ids=lambda form: form.name)
def test_the_operand_of_argmax_has_codes(
    form: theirs.QuantFormat, tmp_path: Path
) -> None:
    model = parse(
        """
        agraph (float[1, 2, 6, 6] x) => (int64[1, 1, 4, 4] y) {
            a = Conv (x, w)
            y = ArgMax <axis = 1> (a)
        }
        """,
        w=np.linspace(-1, 1, 54, dtype=np.float32).reshape(3, 2, 3, 3),
    )
    found, expected = both(
        model, (1, 2, 6, 6), tmp_path, activation_type=UINT8, quant_format=form
    )
    assert types(found) == types(expected)


def test_topk_has_pairs_where_they_are_forced(tmp_path: Path) -> None:
    model = parse(
        """
        agraph (float[1, 10] x) => (float[1, 3] values, int64[1, 3] indices)
        <int64[1] k = {3}> {
            values, indices = TopK <axis = 1> (x, k)
        }
        """,
    )
    options = {"ForceQuantizeNoInputCheck": True}
    found, expected = both(
        model, (1, 10), tmp_path, activation_type=UINT8, extra_options=options
    )
    assert types(found) == types(expected)
    assert types(found)["QuantizeLinear"] == 2


def test_readers_of_a_converted_tensor_share_its_pair(tmp_path: Path) -> None:
    model = parse(
        """
        agraph (float[1, 2, 3] x) => (float[1, 2, 3] y, float[1, 2, 3] z) {
            a = Sigmoid (x)
            y = Mul (a, a)
            z = Add (a, a)
        }
        """,
        opset=21,
    )
    model.graph.node[1].name, model.graph.node[2].name = "mul", "add"
    wide = {"quant_type": theirs.QuantType.QUInt16}
    overrides = {
        "a": [{"quant_type": UINT8, "convert": wide | {"recv_nodes": {"mul", "add"}}}],
        "y": [wide],
        "z": [wide],
    }
    found, expected = both(
        model,
        (1, 2, 3),
        tmp_path,
        activation_type=UINT8,
        extra_options={"TensorQuantOverrides": overrides},
    )
    assert types(found) == types(expected)


def test_a_clip_between_two_codes_is_done_by_saturation(tmp_path: Path) -> None:
    """Half a step beyond the bound is as near as the code within it."""
    model = parse(
        """
        agraph (float[1, 2, 6, 6] x) => (float[1, 3, 4, 4] y)
        <float low = {-1.0}, float high = {1.0}> {
            a = Conv (x, w)
            y = Clip (a, low, high)
        }
        """,
        w=np.linspace(-1, 1, 54, dtype=np.float32).reshape(3, 2, 3, 3),
    )
    found, expected = both(model, (1, 2, 6, 6), tmp_path, activation_type=INT8)
    assert types(found) == types(expected)
    assert types(found)["Clip"] == 0


def normalization(*parameters: str) -> ModelProto:
    """Return a LayerNormalization with these parameters, and a product."""
    random = np.random.default_rng(2)
    values = {
        "s": random.normal(1, 0.1, 8),
        "b": random.normal(0, 0.1, 8),
        "w": random.normal(0, 0.3, (8, 3)),
    }
    text = f"""
        agraph (float[2, 4, 8] x) => (float[2, 4, 3] y) {{
            h = LayerNormalization ({", ".join(("x", *parameters))})
            y = MatMul (h, w)
        }}
        """
    used = (*parameters, "w")
    return parse(text, **{name: values[name].astype(np.float32) for name in used})


def test_parameters_of_a_layer_normalization_have_codes(tmp_path: Path) -> None:
    found, expected = both(
        normalization("s", "b"),
        (2, 4, 8),
        tmp_path,
        activation_type=theirs.QuantType.QUInt16,
    )
    assert types(found) == types(expected)
    for name, their_name in (("s", "s"), ("b", "b_quantized")):
        np.testing.assert_allclose(
            parameters(found)[f"{name}_scale"],
            parameters(expected)[f"{their_name}_scale"],
            rtol=2e-7,
        )


def test_a_layer_normalization_needs_no_bias(tmp_path: Path) -> None:
    """onnxruntime's quantizer reads a third input in any case, and fails."""
    ours.quantize_static(
        normalization("s"),
        tmp_path / "ours.onnx",
        reader(theirs, feeds(2, 4, 8)),
        activation_type=theirs.QuantType.QUInt16,
    )
    # Three activations, the scale and the weight.
    assert types(onnx.load(tmp_path / "ours.onnx"))["DequantizeLinear"] == 5
