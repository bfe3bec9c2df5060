"""What a user says of single tensors is what is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper, parser

from quark_onnx import QConfig, QuantizationSpec, TensorOverride, quantize
from quark_onnx.common.errors import ConfigError, DataError


def model() -> ModelProto:
    """Two products, a Relu and a sum; ``x`` has two readers."""
    return parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2] b = {1, 2}> {
            [product] h = Gemm (x, w, b)
            [relu] r = Relu (h)
            [turn] t = Transpose (r)
            [back] u = Transpose (t)
            [sum] y = Add (u, x)
        }""")


def data() -> list[dict[str, NDArray[Any]]]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((4, 2)).astype(np.float32)} for _ in range(8)]


def written(*tensors: TensorOverride, **settings: Any) -> ModelProto:
    return quantize(model(), data(), QConfig(tensors=tensors, **settings)).model


def value(result: ModelProto, name: str) -> NDArray[Any]:
    [tensor] = [tensor for tensor in result.graph.initializer if tensor.name == name]
    return numpy_helper.to_array(tensor)


def node(result: ModelProto, name: str) -> NodeProto:
    [found] = [node for node in result.graph.node if node.name == name]
    return found


def test_scale_and_zero_point() -> None:
    result = written(TensorOverride("x", scale=0.1, zero_point=7))
    assert (
        value(result, "x_scale") == np.float32(0.1)
        and value(result, "x_zero_point") == 7
    )


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "BF16"])
@pytest.mark.parametrize("readers", [(), ("product",)])
def test_a_bias_that_is_kept_stays_float(readers: tuple[str, ...], preset: str) -> None:
    config = QConfig.of(preset).with_(
        tensors=(TensorOverride("b", readers=readers, keep=True),)
    )
    result = quantize(model(), data(), config).model
    assert node(result, "product").input[2] == "b"
    np.testing.assert_array_equal(value(result, "b"), np.float32([1, 2]))
    # without the override it has codes, or is rounded
    assert node(quantize(model(), data(), preset).model, "product").input[2] != "b"


@pytest.mark.parametrize("preset", ["A8W8", "XINT8"])
def test_a_single_reader_keeps_a_tensor_float(preset: str) -> None:
    config = QConfig.of(preset).with_(
        tensors=(TensorOverride("x", readers="product", keep=True),)
    )
    result = quantize(model(), data(), config).model
    assert node(result, "product").input[0] == "x"
    assert node(result, "sum").input[1] != "x"


def test_range_and_format() -> None:
    result = written(TensorOverride("x", low=-1, high=1, dtype="int16", symmetric=True))
    assert (
        value(result, "x_zero_point").dtype == np.int16
        and value(result, "x_zero_point") == 0
    )
    np.testing.assert_allclose(value(result, "x_scale"), 1 / 32767, rtol=1e-6)


def test_one_end_alone() -> None:
    measured, given = (
        value(written(), "x_scale"),
        value(written(TensorOverride("x", high=100.0)), "x_scale"),
    )
    assert 100 / 255 < given < (100 + 255 * measured) / 255


def test_a_range_takes_the_place_of_known_bounds() -> None:
    """The result of a Sigmoid lies between 0 and 1; the user knows more about it."""
    gate = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 2] x) => (float[N, 2] y) { s = Sigmoid (x) y = Mul (s, x) }""")
    found = []
    for settings in ({}, {"low": 0.0, "high": 0.5}, {"high": 0.25}, {"min_range": 2.0}):
        tensors = (TensorOverride("s", **settings),) if settings else ()
        config = QConfig(
            QuantizationSpec("uint8", symmetric=False),
            QuantizationSpec("int8"),
            tensors=tensors,
        )
        found.append(255 * value(quantize(gate, data(), config).model, "s_scale"))
    np.testing.assert_allclose(found, [1.0, 0.5, 0.25, 2.0], rtol=1e-5)


def test_scales_of_channels() -> None:
    result = written(TensorOverride("w", axis=0, scale=[0.5, 0.25], zero_point=[0, 0]))
    np.testing.assert_array_equal(
        value(result, "w_scale"), np.array([0.5, 0.25], np.float32)
    )
    np.testing.assert_array_equal(value(result, "w_quantized"), [[2, 4], [12, 16]])


def test_ranges_of_channels() -> None:
    result = written(TensorOverride("w", axis=1, low=[-4, -8], high=[4, 8]))
    np.testing.assert_allclose(
        value(result, "w_scale"), np.array([4, 8]) / 127, rtol=1e-6
    )


def test_a_least_range() -> None:
    result = written(TensorOverride("*", min_range=100))
    for name in ("x", "y"):
        assert value(result, f"{name}_scale") >= np.float32(100 / 255)


def test_a_tensor_that_is_always_zero_gets_the_least_range() -> None:
    still = [{"x": np.zeros((4, 2), np.float32)}] * 3
    result = quantize(
        model(), still, QConfig(tensors=(TensorOverride("*", min_range=0.51),))
    ).model
    np.testing.assert_allclose(value(result, "x_scale"), 0.51 / 255, rtol=1e-6)


@pytest.mark.parametrize(("shift", "zero"), [(0.0, 128), (10.0, 0)])
def test_zero_points_that_snap(shift: float, zero: int) -> None:
    moved = [{"x": sample["x"] + np.float32(shift)} for sample in data()]
    result = quantize(
        model(), moved, QConfig(tensors=(TensorOverride("*", snapped=True),))
    ).model
    assert value(result, "x_zero_point") == zero
    reached = (np.array([0, 255]) - zero) * float(value(result, "x_scale"))
    assert reached[0] <= 0 and reached[1] > 1


def test_a_reader_with_another_format_starts_from_the_first() -> None:
    result = written(TensorOverride("x", readers=["sum"], dtype="uint16"))
    assert (
        value(result, "x_zero_point").dtype == np.uint8
        and value(result, "x_sum_zero_point").dtype == np.uint16
    )
    assert "x_sum_DequantizeLinear_Output" in node(result, "sum").input
    assert "x_DequantizeLinear_Output" in node(result, "product").input


def test_a_moved_tensor_with_a_format_of_its_own() -> None:
    # ``cancel_transposes`` would remove the tensor.
    result = written(TensorOverride("u", dtype="int16"), prepare=False)
    assert value(result, "u_zero_point").dtype == np.int16


def test_pairs_of_their_own() -> None:
    readers = [
        node(written(TensorOverride("*", dedicated=True)), name)
        for name in ("product", "sum")
    ]
    assert (
        len(
            {
                name
                for reader in readers
                for name in reader.input
                if name.startswith("x_")
            }
        )
        == 2
    )


def test_a_constant_that_stays_float() -> None:
    result = written(TensorOverride("w", stored=False))
    np.testing.assert_array_equal(value(result, "w"), [[1, 2], [3, 4]])
    assert node(result, "w_QuantizeLinear").input[0] == "w"


def test_a_tensor_that_stays_float() -> None:
    assert "x" in node(written(TensorOverride("x", keep=True)), "product").input


def test_a_weight_whose_scale_is_not_to_be_raised() -> None:
    large = model()
    large.graph.initializer[1].CopyFrom(
        numpy_helper.from_array(np.array([1e9, 1], np.float32), "b")
    )
    config = QConfig(
        tensors=(TensorOverride("w", scale=1e-4, zero_point=0, dtype="int8"),)
    )
    result = quantize(large, data(), config)
    assert value(result.model, "w_scale") == np.float32(1e-4)
    assert "b" in node(result.model, "product").input


def test_no_data_is_needed_where_all_ranges_are_known() -> None:
    known = TensorOverride("*", low=-4, high=4)
    result = quantize(model(), None, QConfig(tensors=(known,))).model
    np.testing.assert_allclose(value(result, "x_scale"), 8 / 255, rtol=1e-6)
    with pytest.raises(DataError):
        quantize(model(), None, QConfig(tensors=(TensorOverride("x", low=-4, high=4),)))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (TensorOverride("z"), "no tensor of the model matches 'z'"),
        (
            TensorOverride("h", readers="product", keep=True),
            "no node 'product' reads h; .*relu",
        ),
        (TensorOverride("x", scale=1.0, zero_point=300), "has codes from 0 to 255"),
        (
            TensorOverride("w", axis=0, scale=[1.0, 2.0, 3.0], zero_point=0),
            "or one for each channel of an axis",
        ),
        (
            TensorOverride("w", axis=2),
            "of 'w' is 2; it must be an axis of a tensor of rank 2",
        ),
        (TensorOverride("x", axis=-3), "'x' is -3; it must be an axis of"),
        (
            TensorOverride("x", axis=0, low=-1.0, high=1.0),
            "x has a range and axis 0, whose size is N",
        ),
    ],
)
def test_what_does_not_fit_the_model(override: TensorOverride, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        written(override)


JOINED = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z)
    <float[2, 2] w = {1, 2, 3, 4}, float[2, 2] v = {1, -2, -3, 4}, float[4, 2] u = {1, 2, 3, 4, 5, 6, 7, 8}> {
        a = MatMul (x, w)
        b = MatMul (x, v)
        [join] c = Concat <axis = 1> (a, b)
        [one] y = MatMul (c, u)
        [two] z = MatMul (c, u)
    }"""  # noqa: E501


@pytest.mark.parametrize("target", ["", "cpu", "openvino"])
@pytest.mark.parametrize("tensor", ["c", "a"])
def test_a_range_for_one_reader_is_not_that_of_the_others(
    tensor: str, target: str
) -> None:
    reader = "two" if tensor == "c" else "join"
    given = TensorOverride(tensor, readers=reader, low=0.0, high=51.0)
    config = QConfig.of("A8W8").with_(target=target, min_sqnr=None)
    joined = parser.parse_model(JOINED)
    result = quantize(joined, data(), config.with_(tensors=(given,))).model
    plain = quantize(joined, data(), config).model
    scales = [_scale_of(each, reader, 0) for each in (result, plain)]
    assert scales[0] == np.float32(0.2) and scales[1] != scales[0]
    if tensor == "c":
        assert _scale_of(result, "one", 0) == _scale_of(plain, "one", 0)


def _scale_of(result: ModelProto, reader: str, index: int) -> NDArray[Any]:
    """Return the scale of what a node reads, beyond operators that move codes."""
    producers = {name: each for each in result.graph.node for name in each.output}
    producer = producers[node(result, reader).input[index]]
    while producer.op_type != "DequantizeLinear":
        producer = producers[producer.input[0]]
    return value(result, producer.input[1])


@pytest.mark.parametrize("target", ["", "cpu", "openvino"])
def test_one_reader_of_a_result_reads_floats(target: str) -> None:
    """The values are those that the Concat computes, not rounded ones."""
    kept = TensorOverride("c", readers="two", keep=True)
    config = QConfig.of("A8W8").with_(target=target, tensors=(kept,), min_sqnr=None)
    result = quantize(parser.parse_model(JOINED), data(), config).model
    assert node(result, "two").input[0] == node(result, "join").output[0]


def test_a_relu_with_a_pair_in_front() -> None:
    assert "h_DequantizeLinear_Output" in node(written(clipping=False), "relu").input


def test_results_that_are_not_asked_for() -> None:
    result = written(float_results=("Add",))
    assert list(node(result, "sum").output) == ["y"]


def test_operators_that_move_floats() -> None:
    alone = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[4, 2] x) => (float[2, 4] y) { [turn] y = Transpose (x) }""")
    kinds = [
        [
            n.op_type
            for n in quantize(alone, data(), QConfig(movers=on)).model.graph.node
        ]
        for on in (False, True)
    ]
    assert kinds[0] == ["Transpose"]
    assert kinds[1].count("QuantizeLinear") >= 1


def test_pairs_of_the_contributed_domain() -> None:
    domains = {
        n.domain
        for n in written(contrib=True).graph.node
        if "quantize" in n.op_type.lower()
    }
    assert domains == {"com.microsoft"}


def test_blocks_of_eight_bits_beside_integer_activations() -> None:
    random = np.random.default_rng(1)
    product = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[4, 64] x) => (float[4, 8] y) { y = MatMul (x, w) }""")
    w = random.standard_normal((64, 8)).astype(np.float32)
    product.graph.initializer.append(numpy_helper.from_array(w, "w"))
    samples = [
        {"x": random.standard_normal((4, 64)).astype(np.float32)} for _ in range(4)
    ]
    result = quantize(
        product, samples, QConfig(weight=QuantizationSpec("int8", block_size=32))
    )
    assert value(result.model, "w_scale").shape == (2, 8)
    assert (
        result.report.outputs[0].sqnr is not None and result.report.outputs[0].sqnr > 30
    )


def test_the_zero_of_equal_ends_is_the_middle_code() -> None:
    for dtype, zero in (("int8", 0), ("uint8", 128), ("int16", 0), ("uint16", 32768)):
        result = written(
            TensorOverride("x", low=-3, high=3, dtype=dtype, symmetric=False)
        )
        assert value(result, "x_zero_point") == zero


def test_parameters_stand_in_the_field_of_their_type() -> None:
    result = written()
    fields = {tensor.name: tensor for tensor in result.graph.initializer}
    assert (
        len(fields["x_scale"].float_data) == 1
        and len(fields["x_zero_point"].int32_data) == 1
    )
    assert fields["x_scale"].data_type == TensorProto.FLOAT


@pytest.mark.parametrize("axis", [0, -3])
def test_an_axis_is_counted_in_the_shape_that_the_user_wrote(axis: int) -> None:
    """Preparation writes leading axes in constants that a PRelu reads."""
    slopes = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y)
        <float[2, 1, 1] k = {0.1, 0.002}> { y = PRelu (x, k) }""")
    random = np.random.default_rng(0)
    images = random.standard_normal((4, 1, 2, 4, 4)).astype(np.float32)
    given = TensorOverride("k", axis=axis, low=(0, 0), high=(0.1, 0.002))
    result = quantize(
        slopes, [{"x": image} for image in images], QConfig(tensors=[given])
    )
    codes = value(result.model, "k_quantized")
    assert codes.shape == (2, 1, 1) and (codes == 255).all()
