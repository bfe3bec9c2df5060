"""without-qdq, signs, domains and operators on codes, on quantized models.

Onnxruntime is the oracle.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from quark_onnx import QConfig, convert, quantize, quantize_static
from quark_onnx.common.errors import ModelError
from tests.endtoend.random_graphs import draw
from tests.models import (
    MODELS,
    Feeds,
    kinds,
    normal,
    parse,
    residual,
    run,
    samples,
    weight,
)
from tests.quark_onnx.convert.conftest import quantized_as
from tests.settings import portable

PAIRS = {"QuantizeLinear", "DequantizeLinear"}


def same(first: ModelProto, second: ModelProto, data: list[Feeds]) -> bool:
    """Whether two models compute the same, bit by bit, as they are written."""
    return all(
        np.array_equal(a, b)
        for sample in data
        for a, b in zip(run(first, sample), run(second, sample), strict=True)
    )


def types(model: ModelProto, op_type: str) -> Counter[int]:
    """The types of the zero points of Q or DQ nodes."""
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return Counter(
        kinds[n.input[2]] for n in model.graph.node if n.op_type.endswith(op_type)
    )


def domains(model: ModelProto) -> Counter[str]:
    return Counter(
        node.domain for node in model.graph.node if node.op_type.endswith("Linear")
    )


# without-qdq


def decoded(model: ModelProto) -> dict[str, Any]:
    """What the DequantizeLinear nodes of constants compute, in float64."""
    stored = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    result = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in stored:
            codes, scale, zero = (
                stored[name].astype(np.float64) for name in node.input
            )
            axis = next(
                (
                    attribute.i
                    for attribute in node.attribute
                    if attribute.name == "axis"
                ),
                None,
            )
            if scale.ndim:
                shape = [-1 if place == axis else 1 for place in range(codes.ndim)]
                scale, zero = scale.reshape(shape), zero.reshape(shape)
            result[node.output[0]] = (codes - zero) * scale
    return result


def test_without_pairs_it_is_the_float_model_with_dequantized_weights(
    quantized: ModelProto, data: list[Feeds]
) -> None:
    done = convert(quantized, "without-qdq").model
    assert not PAIRS & {node.op_type for node in done.graph.node}
    weights = decoded(quantized)
    expected = residual()
    found = [array for array in weights.values() if array.ndim > 1]
    for tensor in (
        expected.graph.initializer
    ):  # nearest by shape and value: names are the quantizer's
        array = numpy_helper.to_array(tensor)
        twins = [each for each in weights.values() if each.size == array.size]
        nearest = min(
            twins,
            key=lambda each: float(np.abs(each.reshape(array.shape) - array).max()),
        )
        tensor.CopyFrom(
            numpy_helper.from_array(
                nearest.reshape(array.shape).astype(np.float32), tensor.name
            )
        )
    assert len(found) == 3
    for sample in data:
        np.testing.assert_allclose(
            run(done, sample)[0], run(expected, sample)[0], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    ("clip", "kinds"), [("Relu (h)", {"Relu"}), ("Clip (h, zero, six)", {"Clip"})]
)
def test_what_saturation_did_is_done_by_an_operator_again(
    clip: str, kinds: set[str]
) -> None:
    model = parse(
        f"g (float[N,4] x) => (float[N,4] y) {{ h = MatMul (x, w) r = {clip} y = MatMul"
        " (r, w) }",
        w=np.eye(4, dtype=np.float32),
        zero=np.float32(0),
        six=np.float32(6),
    )
    data = [{"x": np.float32([[-8, -1, 3, 8]])}, {"x": np.float32([[1, 2, 6, 7]])}]
    quantized = quantize_static(
        model, data, QConfig.of("A8W8").with_(search=0, calibrator="minmax")
    )
    assert not {"Relu", "Clip"} & {node.op_type for node in quantized.graph.node}
    done = convert(quantized, "without-qdq").model
    assert {"Relu", "Clip"} & {node.op_type for node in done.graph.node} == kinds
    np.testing.assert_allclose(run(done, data[0])[0], run(model, data[0])[0], rtol=2e-2)


def test_float_weights_between_a_pair_are_rounded() -> None:
    model = parse(
        """g (float[N,2] x) => (float[N,2] y) {
            q = QuantizeLinear (w, s, z)
            d = DequantizeLinear (q, s, z)
            y = MatMul (x, d)
        }""",
        w=np.float32([[0.26, 1], [-9, 0.24]]),
        s=np.float32(0.5),
        z=np.int8(-120),
    )
    done = convert(model, "without-qdq").model
    [w] = (numpy_helper.to_array(tensor) for tensor in done.graph.initializer)
    np.testing.assert_array_equal(w, [[0.5, 1], [-4, 0]])


def test_pairs_of_unlike_scales_stay() -> None:
    """Such a pair multiplies by two."""
    model = parse(
        "g (float[N] x) => (float[N] y) { q = QuantizeLinear (x, s, z) y ="
        " DequantizeLinear (q, t, z) }",
        s=np.float32(0.5),
        t=np.float32(1.0),
        z=np.int8(0),
    )
    done = convert(model, "without-qdq")
    assert "2 Q/DQ nodes stay" in done.steps[0].notes[0] and same(
        model, done.model, [{"x": np.float32([1, 2])}]
    )


def test_an_output_that_a_pair_computes() -> None:
    model = parse(
        "g (float[N] x) => (float[N] y) { a = Neg (x) q = QuantizeLinear (a, s, z) y ="
        " DequantizeLinear (q, s, z) }",
        s=np.float32(0.5),
        z=np.int8(0),
    )
    done = convert(model, "without-qdq").model
    assert [(node.op_type, list(node.output)) for node in done.graph.node] == [
        ("Neg", ["y"])
    ]


@pytest.mark.parametrize(
    "preset", ["A8W8", "S8S8", "XINT8", "A16W8", "U8U8", "FP8E4M3", "A8W4"]
)
def test_presets_without_pairs(preset: str) -> None:
    done = convert(quantized_as(preset), "without-qdq")
    assert not any(
        node.op_type.endswith("tizeLinear") for node in done.model.graph.node
    )
    assert done.steps[0].outputs[0].sqnr > 15  # type: ignore[operator]


# signs


@pytest.mark.parametrize(
    ("preset", "to", "before", "after"),
    [
        ("A8W8", "s8s8", TensorProto.UINT8, TensorProto.INT8),
        ("S8S8", "u8s8", TensorProto.INT8, TensorProto.UINT8),
        ("U8U8", "s8s8", TensorProto.UINT8, TensorProto.INT8),
        ("A16W8", "s16s8", TensorProto.UINT16, TensorProto.INT16),
        ("INT16", "u16s8", TensorProto.INT16, TensorProto.UINT16),
    ],
)
def test_signs(
    preset: str, to: str, before: int, after: int, data: list[Feeds]
) -> None:
    model = quantized_as(preset)
    done = convert(model, to).model
    count = types(model, "QuantizeLinear")[before]
    assert (
        count
        and types(done, "QuantizeLinear")[after] >= count
        and not types(done, "QuantizeLinear")[before]
    )
    assert same(model, done, data)
    assert TensorProto.UINT8 not in {
        t.data_type for t in done.graph.initializer if len(t.dims) > 1
    }  # weights


def test_signs_there_and_back(quantized: ModelProto, data: list[Feeds]) -> None:
    done = convert(quantized, ["s8s8", "u8s8"]).model
    assert types(done, "Linear") == types(quantized, "Linear") and same(
        quantized, done, data
    )


def test_a_zero_point_that_is_left_out() -> None:
    model = parse(
        "g (float[N] x) => (float[N] y) { q = QuantizeLinear (x, s) y ="
        " DequantizeLinear (q, s) }",
        s=np.float32(0.5),
    )
    done = convert(model, "s8s8").model
    assert types(done, "Linear") == {TensorProto.INT8: 2}
    assert same(model, done, [{"x": np.float32([-1, 0.3, 1, 63, 64, 200])}])


def test_codes_that_others_read_stay() -> None:
    model = parse(
        "g (float[N] x) => (uint8[N] q, float[N] y) { q = QuantizeLinear (x, s, z) y ="
        " DequantizeLinear (q, s, z) }",
        s=np.float32(0.5),
        z=np.uint8(7),
    )
    done = convert(model, "s8s8")
    assert "1 tensor stays as it is" in done.steps[0].notes[0]
    assert same(model, done.model, [{"x": np.float32([-1, 0.3])}])


def test_new_zero_points_are_in_the_order_of_the_nodes() -> None:
    names = [f"z{place}" for place in range(8)]
    reads = " ".join(f"y{z} = DequantizeLinear (q, s, {z})" for z in names)
    results = ", ".join(f"float[N] y{z}" for z in names)
    model = parse(
        f"g (float[N] x) => ({results}) {{ q = QuantizeLinear (x, s, z) {reads} }}",
        s=np.float32(0.5),
        z=np.uint8(128),
        **dict.fromkeys(names, np.uint8(128)),
    )
    done = convert(model, "s8s8").model
    found = [tensor.name for tensor in done.graph.initializer]
    assert found == ["s", *(f"{name}_int8" for name in ["z", *names])]


# domains


@pytest.mark.parametrize("domain", ["com.amd.quark", "com.microsoft"])
@pytest.mark.parametrize("preset", ["A8W8", "A16W8"])
def test_domains_there_and_back(preset: str, domain: str, data: list[Feeds]) -> None:
    model = quantized_as(preset)
    to = "vendor-qdq" if domain == "com.amd.quark" else "microsoft-qdq"
    there = convert(model, to).model
    assert set(domains(there)) == {domain} and same(model, there, data)
    back = convert(there, "standard-qdq").model
    assert set(domains(back)) == {""} and same(model, back, data) and not back.functions
    assert [entry.domain for entry in back.opset_import] == [""]


def renamed(model: ModelProto, domain: str, prefix: str) -> ModelProto:
    """As tools of the vendor write it: without bodies, with zero points everywhere, scales as
    vectors of one.
    """
    result = ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        if node.op_type in PAIRS:
            node.op_type, node.domain = prefix + node.op_type, domain
    for tensor in result.graph.initializer:
        if not tensor.dims and tensor.name in {
            n.input[1] for n in result.graph.node if n.domain
        }:
            tensor.dims.append(1)
    result.opset_import.append(helper.make_opsetid(domain, 1))
    return result


@pytest.mark.parametrize(
    ("domain", "prefix"),
    [
        ("com.amd.quark", "Extended"),
        ("com.vai.quantize", "Vitis"),
        ("com.microsoft", ""),
    ],
)
def test_vendor_models_become_standard(
    domain: str,
    prefix: str,
    quantized: ModelProto,
    data: list[Feeds],
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = convert(renamed(quantized, domain, prefix), "standard-qdq")
    onnx.checker.check_model(done.model, full_check=True)
    assert set(domains(done.model)) == {""} and same(quantized, done.model, data)
    assert done.steps[0].outputs and not caplog.records  # it was verified
    scales = {
        n.input[1] for n in done.model.graph.node if n.op_type == "QuantizeLinear"
    }
    assert all(not t.dims for t in done.model.graph.initializer if t.name in scales)


def test_16_bits_raise_the_opset() -> None:
    model = parse(
        """<ir_version: 8, opset_import: ["" : 13, "com.microsoft" : 1]>
        g (float[N] x) => (float[N] y) {
            q = com.microsoft.QuantizeLinear (x, s, z)
            y = com.microsoft.DequantizeLinear (q, s, z)
        }""",
        s=np.float32(0.01),
        z=np.uint16(300),
    )
    done = convert(model, "standard-qdq")
    assert next(entry.version for entry in done.model.opset_import) == 21
    assert same(model, done.model, [{"x": np.float32([-4, 0.3, 700])}])


# operators on codes


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "U8U8"])
@pytest.mark.parametrize(
    "name",
    [
        "residual",
        "shared_weight",
        "matmul_right",
        "unlike_concat",
        "depthwise",
        "conv_1d",
    ],
)
def test_operators_there_and_back(name: str, preset: str) -> None:
    model = MODELS[name]()
    data = samples(model, 6)
    pairs = quantize_static(model, data, portable(QConfig.of(preset)).with_(search=0))
    there = convert(pairs, "qdq-to-qoperator").model
    back = convert(there, "qoperator-to-qdq").model
    assert any(
        n.op_type.startswith("QLinear")
        or n.op_type in ("QGemm", "MatMulIntegerToFloat")
        for n in there.graph.node
    )
    assert not any(n.op_type.startswith("QLinear") or n.domain for n in back.graph.node)
    onnx.checker.check_model(back, full_check=True)
    for sample in data:  # a code that lies halfway may become either
        a, b = run(pairs, sample)[0], run(back, sample)[0]
        assert np.mean(np.abs(a - b) > 1e-5 * np.abs(a).max()) < 0.02


def test_codes_that_move_get_pairs(quantized: ModelProto) -> None:
    there = convert(quantized, "qdq-to-qoperator").model
    back = convert(there, ["qoperator-to-qdq", "without-qdq"])
    assert not any(n.op_type.endswith("Linear") for n in back.model.graph.node)
    assert {"MaxPool", "Flatten", "GlobalAveragePool"} <= {
        n.op_type for n in back.model.graph.node
    }
    assert back.steps[1].outputs[0].sqnr > 25  # type: ignore[operator]


def test_bounds_of_codes_with_a_computed_scale_stay() -> None:
    """The float value of a bound is not known before the model runs."""
    model = parse(
        """g (uint8[1,4] a, float[1,4] f, float v) => (uint8[1,4] y, uint8[1,4] c) {
            y = QLinearMatMul (a, s, z, w, s, z, s, z)
            t = Abs (v) q = QuantizeLinear (f, t, z) c = Clip (q, low, high)
        }""",
        s=np.float32(0.1),
        z=np.uint8(0),
        w=np.arange(16, dtype=np.uint8).reshape(4, 4),
        low=np.uint8(3),
        high=np.uint8(200),
    )
    found = Counter(
        node.op_type for node in convert(model, "qoperator-to-qdq").model.graph.node
    )
    assert found["MatMul"] == 1 and "QLinearMatMul" not in found
    feeds = {
        "a": np.uint8([[1, 2, 3, 4]]),
        "f": np.float32([[0.1, 5, 90, 500]]),
        "v": np.array(-1, np.float32),
    }
    converted = convert(model, "qoperator-to-qdq").model
    for first, second in zip(run(model, feeds), run(converted, feeds), strict=True):
        np.testing.assert_array_equal(first, second)


def test_integer_operators_without_quantization_stay() -> None:
    model = parse("g (int8[N] x) => (int8[N] y) { y = Identity (x) }")
    assert convert(model, "qoperator-to-qdq").steps[0].notes == []


# random graphs


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs(seed: int) -> None:
    model, data = draw(seed)
    quantized = quantize_static(
        model, data, QConfig.of(("A8W8", "S8S8", "A16W8")[seed % 3]).with_(search=0)
    )
    for to in (
        ["s8s8", "s16s8"],
        ["vendor-qdq", "standard-qdq"],
        ["unique-initializers", "shared-initializers"],
    ):
        assert same(quantized, convert(quantized, to).model, data), to
    bare = convert(quantized, "without-qdq").model
    assert not any(node.op_type in PAIRS for node in bare.graph.node)
    for sample in data:
        for a, b in zip(run(model, sample), run(bare, sample), strict=True):
            assert np.linalg.norm(a - b) <= 0.25 * np.linalg.norm(a) + 1e-6


def test_a_model_that_onnx_cannot_convert(tmp_path: Any) -> None:
    layer_norm = MODELS["transformer_block"]()
    with pytest.raises(ModelError, match="cannot convert the model to opset 14"):
        convert(layer_norm, "opset", tmp_path / "out.onnx", opset=14)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", ["4,8", "2,3,8"])
def test_the_bias_behind_a_matmul_becomes_that_of_the_operator(shape: str) -> None:
    out = shape[:-1] + "6"
    model = parse(
        f"g (float[{shape}] x) => (float[{out}] y) {{ h = MatMul (x, w) y = Add (h, b) }}",
        w=weight(8, 6),
        b=normal(6),
    )
    pairs = quantize(model, samples(model), portable(QConfig.of("A8W8"))).model
    done = convert(pairs, "qdq-to-qoperator").model
    assert kinds(done) == ["QuantizeLinear", "MatMulIntegerToFloat"]
    for feeds in samples(model, 3, seed=5):
        np.testing.assert_allclose(
            run(done, feeds)[0], run(pairs, feeds)[0], rtol=0, atol=1e-5
        )
