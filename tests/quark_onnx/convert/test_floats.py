"""float16, bfloat16, float32: against numpy in the type, and what must stay float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from quark_onnx import convert
from quark_onnx.common.errors import ConfigError, ModelError
from tests.models import MODELS, kinds, normal, parse, run, weight


def dense(**constants: Any) -> ModelProto:
    return parse(
        "g (float[N,6] x) => (float[N,4] y) { h = MatMul (x, w) s = Add (h, b) y = Relu (s) }",
        w=weight(6, 4),
        b=constants.get("b", normal(4)),
    )


def constant(model: ModelProto, name: str) -> Any:
    return numpy_helper.to_array(
        next(tensor for tensor in model.graph.initializer if tensor.name == name)
    )


def interface(model: ModelProto) -> list[int]:
    return [
        value.type.tensor_type.elem_type
        for value in (*model.graph.input, *model.graph.output)
    ]


def test_float16_computes_what_numpy_does() -> None:
    model, x = dense(), normal(5, 6)
    done = convert(model, "float16")
    assert interface(done.model) == [TensorProto.FLOAT] * 2 and kinds(done.model) == [
        "Cast",
        "MatMul",
        "Add",
        "Relu",
        "Cast",
    ]
    w, b = (constant(done.model, name) for name in "wb")
    np.testing.assert_array_equal(w, constant(model, "w").astype(np.float16))
    product = (x.astype(np.float16).astype(np.float64) @ w.astype(np.float64)).astype(
        np.float16
    )
    expected = np.maximum(product + b, 0).astype(np.float32)
    np.testing.assert_allclose(
        run(done.model, {"x": x})[0], expected, rtol=2e-3, atol=2e-3
    )
    assert 50 < done.steps[0].outputs[0].sqnr < 90  # type: ignore[operator]


def test_inputs_and_outputs_too() -> None:
    done = convert(dense(), "float16", io=True).model
    assert interface(done) == [TensorProto.FLOAT16] * 2 and kinds(done) == [
        "MatMul",
        "Add",
        "Relu",
    ]
    x = normal(5, 6).astype(np.float16)
    plain = convert(dense(), "float16").model
    expected = run(plain, {"x": x.astype(np.float32)})[0]
    np.testing.assert_allclose(
        run(done, {"x": x})[0].astype(np.float32), expected, rtol=2e-3, atol=2e-3
    )


def test_bfloat16_is_measured_with_each_result_rounded() -> None:
    model = dense()
    done = convert(model, "bfloat16")
    w = constant(model, "w").astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(constant(done.model, "w"), w)
    onnx.checker.check_model(done.model, full_check=True)
    assert 35 < done.steps[0].outputs[0].sqnr < 60  # type: ignore[operator]  (8 bits of mantissa)


def test_what_an_operator_has_not_in_16_bits_stays() -> None:
    model = parse(
        """g (float[1,3,4,4] x) => (float[1,4,8,8] y) {
            h = Conv <pads = [1,1,1,1]> (x, w)
            y = Resize <mode = "nearest"> (h, , scales)
        }""",
        w=weight(4, 3, 3, 3),
        scales=np.float32([1, 1, 2, 2]),
    )
    done = convert(model, "float16").model
    assert (
        constant(
            done, next(n.input[2] for n in done.graph.node if n.op_type == "Resize")
        ).dtype
        == np.float32
    )
    bf = convert(model, "bfloat16")
    assert "1 Conv" in bf.steps[0].notes[1]  # which ONNX has since opset 22
    [raised] = convert(model, ["opset", "bfloat16"], opset=22).steps[1].notes
    assert raised == "3 tensors became bfloat16"


def test_quantized_models_keep_their_scales(quantized: ModelProto) -> None:
    done = convert(quantized, "float16")
    scales = {
        node.input[1]
        for node in done.model.graph.node
        if node.op_type.endswith("Linear")
    }
    before = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in quantized.graph.initializer
    }
    assert scales and {constant(done.model, n).dtype for n in scales} == {
        np.dtype(np.float32)
    }
    assert {constant(done.model, n).tobytes() for n in scales} <= {
        array.tobytes() for array in before.values()
    }


def test_numbers_beyond_float16() -> None:
    """A mask of the lowest float stays finite, and an epsilon does not become zero."""
    model = parse(
        """g (float[N,4] x) => (float[N,4] y) {
            a = Mul (x, mask)
            b = Abs (x)
            c = Add (b, tiny)
            d = Div (x, c)
            y = Max (a, d)
        }""",
        mask=np.float32([0, 0, -3.4e38, 1]),
        tiny=np.float32(1e-12),
    )
    done = convert(model, "float16")
    np.testing.assert_array_equal(
        constant(done.model, "mask"), np.float16([0, 0, -65504, 1])
    )
    assert constant(done.model, "tiny") == np.float16(2**-24)
    assert np.isfinite(run(done.model, {"x": np.zeros((1, 4), np.float32)})[0]).all()
    assert len(done.steps[0].notes) == 3


def test_there_and_back() -> None:
    model = dense()
    done = convert(model, ["float16", "float32"])
    assert (
        kinds(done.model) == kinds(model)
        and interface(done.model) == [TensorProto.FLOAT] * 2
    )
    np.testing.assert_array_equal(
        constant(done.model, "w"),
        constant(model, "w").astype(np.float16).astype(np.float32),
    )


@pytest.mark.parametrize("name", MODELS)
def test_float16_of_all_kinds_of_models(name: str) -> None:
    done = convert(MODELS[name](), "float16")
    onnx.checker.check_model(done.model, full_check=True)
    for output in done.steps[0].outputs:
        assert output.sqnr is None or output.sqnr > 35 or output.random, (name, output)


def test_bfloat16_needs_an_opset() -> None:
    with pytest.raises(ModelError, match="bfloat16 needs opset 13, the model has 11"):
        convert(
            parse("g (float[N] x) => (float[N] y) { y = Relu (x) }", opset=11),
            "bfloat16",
        )


def test_a_setting_that_nothing_reads() -> None:
    with pytest.raises(
        ConfigError, match="io is given, which only float16 and bfloat16 reads"
    ):
        convert(dense(), "float32", io=True)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_the_default_of_an_input_that_is_read_as_float32(kind: str) -> None:
    """Conv has no bfloat16 at opset 17, and whoever runs the model may give another weight."""
    model = parse(
        "g (float[1,3,5,5] x, float[2,3,3,3] w) => (float[1,2,3,3] y) { y = Conv (x, w) }",
        w=weight(2, 3, 3, 3),
    )
    done = convert(model, kind)
    assert [value.name for value in done.model.graph.input] == [
        "x",
        "w",
    ] and not done.steps[0].outputs[0].broken
