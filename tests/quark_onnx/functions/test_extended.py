"""The functions that stand for ExtendedQuantizeLinear and ExtendedDequantizeLinear, against
arithmetic in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from quark_onnx.common.errors import ModelError
from quark_onnx.functions import DOMAIN, extended
from tests.cases import loop_over
from tests.models import run

INTEGERS = [
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT16,
    TensorProto.UINT16,
    TensorProto.INT32,
    TensorProto.UINT32,
]
TYPES = [*INTEGERS, TensorProto.FLOAT16, TensorProto.BFLOAT16]
each = pytest.mark.parametrize("kind", TYPES, ids=TensorProto.DataType.Name)

#: Ties, what saturates, and what float32 cannot add one to.
HARD = [
    0.5,
    1.5,
    -0.5,
    2.5,
    -2.5,
    1e9,
    -1e9,
    np.inf,
    -np.inf,
    3e38,
    -0.0,
    100.3,
    65504,
    65520,
    1e-41,
]
HARD += [
    16777216,
    33554434,
    2147483520,
    2147483648,
    -2147483648,
    -2147483904,
    4294967040,
    4294967296,
]


def pair(kind: int, x: str = "x", y: str = "y", **attributes: Any) -> list[NodeProto]:
    """Quantize and dequantize; the tensors of a type are named by it."""
    scale, zero, codes = f"scale{kind}", f"zero{kind}", f"codes{kind}"
    return [
        helper.make_node(
            extended.QUANTIZE, [x, scale, zero], [codes], domain=DOMAIN, **attributes
        ),
        helper.make_node(
            extended.DEQUANTIZE, [codes, scale, zero], [y], domain=DOMAIN, **attributes
        ),
    ]


def model(
    nodes: list[NodeProto],
    shape: Sequence[int | None],
    scale: Any,
    zero: Any,
    kinds: Sequence[int],
    opset: int = 17,
) -> ModelProto:
    """The codes of the first type, as float64, and y."""
    constants = []
    for kind in kinds:
        zeros = np.asarray(zero)
        constants.append(
            numpy_helper.from_array(np.asarray(scale, np.float32), f"scale{kind}")
        )
        constants.append(
            helper.make_tensor(
                f"zero{kind}", kind, zeros.shape, zeros.reshape(-1).tolist()
            )
        )
    cast = helper.make_node(
        "Cast", [f"codes{kinds[0]}"], ["codes"], to=TensorProto.DOUBLE
    )
    made = helper.make_model(
        helper.make_graph(
            [*nodes, cast],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [
                helper.make_tensor_value_info("codes", TensorProto.DOUBLE, shape),
                helper.make_tensor_value_info("y", TensorProto.FLOAT, shape),
            ],
            constants,
        ),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        functions=extended.definitions(
            nodes, opset, {f"zero{kind}": kind for kind in kinds}
        ),
        ir_version=8,
    )
    onnx.checker.check_model(made)
    return made


def reference(
    x: NDArray[Any], scale: NDArray[Any], zero: NDArray[Any], kind: int
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Codes and what they stand for."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    with np.errstate(over="ignore"):
        ratio = np.asarray(x, np.float32) / np.asarray(scale, np.float32)
    if kind in INTEGERS:
        limits = np.iinfo(dtype)
        codes = np.clip(
            np.rint(ratio).astype(np.float64) + zero, limits.min, limits.max
        )
    else:
        shifted = ratio + np.asarray(zero, np.float32)
        if kind == TensorProto.FLOAT16:
            shifted = np.clip(shifted, -65504, 65504)
        with np.errstate(over="ignore"):
            codes = np.asarray(shifted, np.float32).astype(dtype).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return codes, (codes - zero).astype(np.float32) * np.asarray(scale, np.float32)


def agree(
    found: list[NDArray[Any]], expected: tuple[NDArray[Any], NDArray[Any]]
) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other)


@each
@loop_over("zero", [0, 3])
@loop_over("scale", [1.0, 0.3])
def test_one_scale(kind: int, zero: int, scale: float) -> None:
    x = np.float32(HARD)
    expected = reference(x, np.float32(scale), np.asarray(zero), kind)
    for shape, shaped in ((x.shape, np.asarray), ((None,), np.atleast_1d)):
        made = model(pair(kind), shape, shaped(scale), shaped(zero), [kind])
        for optimize in (False, True):
            agree(run(made, {"x": x}, optimize=optimize), expected)


@each
@loop_over("axis", [0, 1, 2, -1, -3])
def test_a_scale_for_each_channel(kind: int, axis: int) -> None:
    x = np.random.default_rng(0).normal(0, 40, (2, 3, 4)).astype(np.float32)
    length = x.shape[axis]
    scale, zero = np.float32([0.1, 0.25, 0.3, 2])[:length], np.arange(4)[:length]
    along = [1, 1, 1]
    along[axis] = length
    expected = reference(x, scale.reshape(along), zero.reshape(along), kind)
    for shape, optimize in ((x.shape, True), ([None] * 3, False)):
        made = model(pair(kind, axis=axis), shape, scale, zero, [kind])
        agree(run(made, {"x": x}, optimize=optimize), expected)


@each
@loop_over("opset", range(17, 28))
def test_opsets(kind: int, opset: int) -> None:
    x = np.float32([HARD, HARD])
    scale, zero = np.float32([0.3, 2]), np.array([1, 2])
    expected = reference(x, scale[:, None], zero[:, None], kind)
    agree(
        run(model(pair(kind, axis=0), x.shape, scale, zero, [kind], opset), {"x": x}),
        expected,
    )


@each
@loop_over("shape", [(), (0,), (0, 3), (3, 0)])
def test_scalars_and_nothing(kind: int, shape: tuple[int, ...]) -> None:
    x = np.full(shape, 1.3, np.float32)
    made = model(pair(kind), shape, [0.5], [1], [kind])
    agree(
        run(made, {"x": x}, optimize=True),
        reference(x, np.float32(0.5), np.asarray(1), kind),
    )


@each
@pytest.mark.parametrize("opset", [17, 21])
def test_one_function_serves_nodes_of_all_types(kind: int, opset: int) -> None:
    x = np.float32(HARD)
    others = [other for other in TYPES if other != kind]
    unused = [node for other in others for node in pair(other, y=f"unused{other}")]
    made = model([*unused, *pair(kind)], x.shape, 0.3, 2, [kind, *others], opset)
    assert len(made.functions) == 2
    for optimize in (False, True):
        agree(
            run(made, {"x": x}, optimize=optimize),
            reference(x, np.float32(0.3), np.asarray(2), kind),
        )


def test_saturates_where_a_cast_would_wrap() -> None:
    x = np.float32([2147483648, 2147483520, -3e9, np.inf])
    codes = run(
        model(pair(TensorProto.INT32), (4,), 1.0, 1, [TensorProto.INT32]), {"x": x}
    )[0]
    np.testing.assert_array_equal(
        codes, [2147483647, 2147483521, -2147483648, 2147483647]
    )


def test_bfloat16_rounds_half_to_even_and_overflows() -> None:
    x = np.float32([1.00390625, 1.01171875, 3.39e38, 3.4e38, 1e-40, np.nan])
    codes = run(
        model(pair(TensorProto.BFLOAT16), (6,), 1.0, 0, [TensorProto.BFLOAT16]),
        {"x": x},
    )[0]
    np.testing.assert_array_equal(
        codes, [1, 1.015625, 255 * 2.0**120, np.inf, 2.0**-133, np.nan]
    )


def test_float16_is_clipped() -> None:
    x = np.float32([65519, 65520, -1e6, np.inf, 2**-25, 3 * 2**-26, np.nan])
    codes = run(
        model(pair(TensorProto.FLOAT16), (7,), 1.0, 0, [TensorProto.FLOAT16]), {"x": x}
    )[0]
    np.testing.assert_array_equal(
        codes, [65504, 65504, -65504, 65504, 0, 2.0**-24, np.nan]
    )


def test_differences_of_long_codes_are_exact() -> None:
    kind = TensorProto.INT32
    node = helper.make_node(
        extended.DEQUANTIZE, ["x", "scale", "zero"], ["y"], domain=DOMAIN
    )
    made = helper.make_model(
        helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info("x", kind, [3])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
            [
                numpy_helper.from_array(np.float32(0.5), "scale"),
                helper.make_tensor("zero", kind, [], [16777217]),
            ],
        ),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)],
        functions=extended.definitions([node], 17, {"zero": kind}),
        ir_version=8,
    )
    found = run(made, {"x": np.int32([16777218, 16777216, -2147483648])})[0]
    np.testing.assert_array_equal(
        found, [0.5, -0.5, np.float32(-2147483648 - 16777217) / 2]
    )


@pytest.mark.parametrize(
    ("inputs", "types", "message"),
    [
        (
            ["x", "s"],
            {},
            "computes 'y.*': no zero point; the vendor's operator requires one",
        ),
        (["x", "s", "z"], {}, "the type of its zero point 'z' is not known"),
        (
            ["x", "s", "z"],
            {"z": TensorProto.INT64},
            "its zero point 'z' is INT64; it can be an integer of 8, 16 or 32",
        ),
    ],
)
def test_what_cannot_be_computed(
    inputs: list[str], types: dict[str, int], message: str
) -> None:
    for name in (extended.QUANTIZE, extended.DEQUANTIZE):
        with pytest.raises(ModelError, match=message):
            extended.definitions(
                [helper.make_node(name, inputs, ["y"], domain=DOMAIN)], 17, types
            )
