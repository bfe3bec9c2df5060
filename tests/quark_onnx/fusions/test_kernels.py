"""What the modules say of onnxruntime's kernels: each combination of codes is run."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from quark_onnx.fusions.moving import MOVING
from tests.models import Array, run

RUNTIME = tuple(map(int, onnxruntime.__version__.split(".")[:2]))

Inputs = dict[str, Any]
U, S = np.uint8, np.int8


def compute(
    op_type: str,
    inputs: Inputs,
    result: Any,
    domain: str = "com.microsoft",
    **attributes: Any,
) -> Array:
    """What a node computes; what begins with an underscore is no constant."""
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    feeds = {name: array for name, array in arrays.items() if name.startswith("_")}
    opset = 17
    declared = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape
        )
        for name, a in feeds.items()
    ]
    output = helper.make_tensor_value_info(
        "y", helper.np_dtype_to_tensor_dtype(np.dtype(result)), None
    )
    node = helper.make_node(op_type, list(arrays), ["y"], domain=domain)
    node.attribute.extend(
        helper.make_attribute(name, value) for name, value in attributes.items()
    )
    constants = [
        numpy_helper.from_array(a, name)
        for name, a in arrays.items()
        if name not in feeds
    ]
    graph = helper.make_graph([node], "g", declared, [output], constants)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return run(helper.make_model(graph, opset_imports=imports, ir_version=8), feeds)[0]


def runs(*call: Any, **attributes: Any) -> bool:
    try:
        compute(*call, **attributes)
    except Exception:  # onnxruntime raises several unrelated types
        return False
    return True


def codes(dtype: Any, *shape: int) -> Array:
    return np.random.default_rng(0).integers(0, 100, shape).astype(dtype)


SCALE = np.float32(0.1)


@pytest.mark.parametrize("op_type", ["QLinearConv", "QLinearMatMul", "QGemm"])
def test_products(op_type: str) -> None:
    for x, w, y in product((U, S), repeat=3):
        shapes = (
            ((1, 3, 5, 5), (4, 3, 3, 3))
            if op_type == "QLinearConv"
            else ((2, 3), (3, 4))
        )
        inputs = {
            "_x": codes(x, *shapes[0]),
            "xs": SCALE,
            "xz": x(3),
            "w": codes(w, *shapes[1]),
            "ws": SCALE,
        }
        bias = {"c": np.int32([1, 2, 3, 4])} if op_type == "QGemm" else {}
        inputs |= {"wz": w(0), **bias, "ys": SCALE, "yz": y(4)}
        taken = runs(op_type, inputs, y, "com.microsoft" if op_type == "QGemm" else "")
        assert taken == ((x is U and y is U) or (x, w, y) == (S, S, S)), (x, w, y)


@pytest.mark.parametrize("op_type", ["MatMulIntegerToFloat", "QGemm"])
def test_products_that_stay_float(op_type: str) -> None:
    for x, w in product((U, S), repeat=2):
        left, right = codes(x, 2, 3), codes(w, 3, 4)
        inputs = {
            "_x": left,
            "xs": SCALE,
            "xz": x(3),
            "w": right,
            "ws": SCALE,
            "wz": w(0),
        }
        if op_type == "MatMulIntegerToFloat":
            inputs = {
                "_x": left,
                "w": right,
                "xs": SCALE,
                "ws": SCALE,
                "xz": x(3),
                "wz": w(0),
            }
        assert runs(op_type, inputs, np.float32) == (x is U or w is S)


def test_scales_of_rows_and_of_stacks_are_refused() -> None:
    x, y = {"_x": codes(U, 2, 3), "xs": SCALE, "xz": U(3)}, {"ys": SCALE, "yz": U(4)}
    rows = {"xs": np.full(2, SCALE), "xz": U([3, 3])}
    columns = {"ws": np.full(4, SCALE), "wz": S([0] * 4)}
    matrix, one = {"w": codes(S, 3, 4)}, {"ws": SCALE, "wz": S(0)}
    assert runs("QLinearMatMul", {**x, **matrix, **columns, **y}, U, "")
    assert not runs("QLinearMatMul", {**x, **rows, **matrix, **one, **y}, U, "")
    stack = {**x, "_x": codes(U, 2, 2, 3), "w": codes(S, 2, 3, 4)}
    assert runs("QLinearMatMul", {**stack, **one, **y}, U, "")
    assert not runs("QLinearMatMul", {**stack, **columns, **y}, U, "")


UNARY: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "QLinearSigmoid": ((2, 3), {}),
    "QLinearLeakyRelu": ((2, 3), {"alpha": 0.1}),
    "QLinearSoftmax": ((2, 3), {"axis": 1, "opset": 13}),
    "QLinearAveragePool": ((1, 2, 4, 4), {"kernel_shape": [2, 2]}),
    "QLinearGlobalAveragePool": ((1, 2, 4, 4), {}),
}


@pytest.mark.parametrize("op_type", UNARY)
def test_one_operand(op_type: str) -> None:
    shape, attributes = UNARY[op_type]
    for x, y in product((U, S), repeat=2):
        inputs = {
            "_x": codes(x, *shape),
            "xs": SCALE,
            "xz": x(3),
            "ys": np.float32(1 / 127),
            "yz": y(0),
        }
        assert runs(op_type, inputs, y, **attributes) == (x is y)


@pytest.mark.parametrize(
    "op_type", ["QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearWhere"]
)
def test_two_operands(op_type: str) -> None:
    attributes = {"axis": 0} if op_type == "QLinearConcat" else {}
    for a, b, y in product((U, S), repeat=3):
        operands = {
            "_a": codes(a, 2, 3),
            "as": SCALE,
            "az": a(3),
            "_b": codes(b, 2, 3),
            "bs": SCALE,
            "bz": b(0),
        }
        result = {"ys": SCALE, "yz": y(4)}
        inputs = (
            {**result, **operands}
            if op_type == "QLinearConcat"
            else {**operands, **result}
        )
        if op_type == "QLinearWhere":
            inputs = {"_c": np.array([[True], [False]]), **inputs}
        assert runs(op_type, inputs, y, **attributes) == (a is b is y)


def test_there_is_no_kernel_for_a_mean() -> None:
    inputs = {
        "_x": codes(U, 1, 2, 4, 4),
        "xs": SCALE,
        "xz": U(3),
        "ys": SCALE,
        "yz": U(0),
    }
    assert not runs("QLinearReduceMean", inputs, U, axes=[2, 3], keepdims=1)


def test_softmax_may_wrap_around_where_one_is_far_beyond_the_last_code() -> None:
    """Up to onnxruntime 1.31, where 1 is 500 steps; since 1.32 it saturates."""

    def certain(scale: float, dtype: Any) -> int:
        inputs = {
            "_x": dtype([[0, 120]]),
            "xs": np.float32(1),
            "xz": dtype(0),
            "ys": np.float32(scale),
            "yz": dtype(0),
        }
        return int(compute("QLinearSoftmax", inputs, dtype, axis=1, opset=13)[0, 1])

    assert certain(2**-8, U) == 255 and certain(2**-8, S) == 127
    assert (certain(0.002, U), certain(0.002, S)) == (
        (255, 127) if RUNTIME >= (1, 32) else (0, -128)
    )


def test_global_max_pool_takes_floats_only() -> None:
    assert runs(
        "GlobalMaxPool", {"_x": np.ones((1, 2, 3, 3), np.float32)}, np.float32, ""
    )
    assert not runs("GlobalMaxPool", {"_x": codes(U, 1, 2, 3, 3)}, U, "")
    assert "GlobalMaxPool" not in MOVING
