"""The function that stands for MXQuantizeDequantize: in onnxruntime, against the numpy reference,
bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from quark_onnx.common.errors import ModelError
from quark_onnx.functions import DOMAIN, DOMAINS, definitions, mx
from quark_onnx.functions.body import MAX_OPSET, MIN_OPSET
from quark_onnx.kernels import blockfloat
from tests.models import run

Floats = NDArray[np.float32]

FLOATS = ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1"]
FORMATS = [(element, 2) for element in FLOATS] + [("int8", 0), ("int8", 1), ("int8", 2)]
every = pytest.mark.parametrize(("element", "rounding"), FORMATS)


def node(
    element: str, x: str = "x", y: str = "y", domain: str = DOMAIN, **attributes: Any
) -> NodeProto:
    return helper.make_node(
        mx.NAME, [x], [y], domain=domain, element_dtype=element, **attributes
    )


def model(
    nodes: Sequence[NodeProto], shape: Sequence[int | None], opset: int = 17
) -> ModelProto:
    made = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        ),
        opset_imports=[
            helper.make_opsetid("", opset),
            *(helper.make_opsetid(domain, 1) for domain in DOMAINS),
        ],
        functions=definitions(nodes, opset, {}),
        ir_version=8,
    )
    onnx.checker.check_model(made)
    return made


def same(found: Floats, expected: Floats) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    kept = ~np.isnan(expected)
    np.testing.assert_array_equal(
        found[kept].view(np.int32), expected[kept].view(np.int32)
    )


def any_bits(*shape: int, finite: bool) -> Floats:
    """Float32 of all exponents, those in a row not far from each other."""
    random = np.random.default_rng(list(shape))
    exponent = random.integers(0, 240, (*shape[:-1], 1)) + random.integers(
        0, 15 if finite else 16, shape
    )
    bits = (
        random.integers(0, 2**23, shape)
        | exponent << 23
        | random.integers(0, 2, shape) << 31
    )
    ties = random.integers(0, 2**23, shape) & -(
        2**18
    )  # few bits of the mantissa: often between two values
    bits = np.where(random.random(shape) < 0.5, bits, bits & ~(2**23 - 1) | ties)
    return bits.astype(np.uint32).view(np.float32)


@every
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((70,), 0), ((40, 64), 1), ((37, 5), 0), ((2, 37, 3), -2), ((3, 2, 2, 33), -1)],
    ids=str,
)
def test_is_the_reference_bit_for_bit(
    element: str, rounding: int, shape: tuple[int, ...], axis: int
) -> None:
    x = np.stack(
        [
            any_bits(*shape, finite=True),
            any_bits(*shape, finite=False),
            np.zeros(shape, np.float32),
        ]
    )
    along = axis if axis < 0 else axis + 1
    nodes = [node(element, axis=along, block_size=32, rounding_mode=rounding)]
    # without NaN and infinities the function takes another way
    for part, known, optimize in (
        (x, [None] * x.ndim, False),
        (x, x.shape, True),
        (x[:1], [None] * x.ndim, True),
    ):
        expected = blockfloat.mx(part, along, element, 32, rounding)
        same(run(model(nodes, known), {"x": part}, optimize=optimize)[0], expected)


@every
def test_every_value_of_the_format_and_what_lies_between(
    element: str, rounding: int
) -> None:
    """All mantissas of nine bits in all the exponents that a block can use."""
    exponents = np.arange(-40, 1)[:, None]
    x = np.ldexp(1 + np.arange(512) / 512, exponents).astype(np.float32).reshape(-1, 1)
    x = np.concatenate([x, -x, np.ones_like(x)], axis=1)
    made = model([node(element, axis=1, block_size=3, rounding_mode=rounding)], x.shape)
    for power in (-100, 0, 126):
        y = np.ldexp(x, power)
        same(run(made, {"x": y})[0], blockfloat.mx(y, 1, element, 3, rounding))


@settings(max_examples=150, deadline=None)
@given(
    x=st.lists(st.floats(width=32), min_size=4, max_size=4),
    case=st.sampled_from(FORMATS),
    power=st.integers(-130, 100),
    codes=st.lists(st.integers(-300, 300), min_size=4, max_size=4),
)
def test_what_hypothesis_thinks_of(
    x: list[float], case: tuple[str, int], power: int, codes: list[int]
) -> None:
    values = np.stack([np.float32(x), np.ldexp(np.float32(codes), power)])
    found = SESSIONS[case].run(None, {"x": values})[0]
    same(found, blockfloat.mx(values, 1, case[0], 4, case[1]))


class _Sessions(dict[tuple[str, int], Any]):
    """Sessions are made once: hypothesis calls its test many times."""

    def __missing__(self, case: tuple[str, int]) -> Any:
        import onnxruntime as ort

        made = model(
            [node(case[0], axis=1, block_size=4, rounding_mode=case[1])], (None, 4)
        )
        self[case] = ort.InferenceSession(
            made.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        return self[case]


SESSIONS = _Sessions()


@pytest.mark.parametrize("rule", blockfloat.EXPONENTS)
@pytest.mark.parametrize(
    ("element", "rounding"),
    [*((element, 2) for element in FLOATS), ("int8", 0), ("int8", 2)],
)
def test_an_operator_with_a_rule_is_the_reference_bit_for_bit(
    element: str, rounding: int, rule: str
) -> None:
    """All exponents with mantissas about the thresholds, subnormal numbers among them.

    Where float32 can hold them.
    """
    mantissas = np.concatenate(
        [[0, 1, (1 << 23) - 1], *((np.arange(64) << 17) + by for by in (-1, 0, 1))]
    ).clip(0)
    tops = (
        (np.arange(12, 254)[:, None] << 23 | mantissas)
        .astype(np.uint32)
        .view(np.float32)
        .reshape(-1, 1)
    )
    others = np.random.default_rng(0).uniform(-1, 1, (len(tops), 3)).astype(np.float32)
    whole = np.concatenate([tops, tops * others], axis=1)
    odd = any_bits(64, 4, finite=False)
    attributes = {
        "axis": -1,
        "block_size": 4,
        "rounding_mode": rounding,
        "exponent": rule,
    }
    made = model([node(element, domain=mx.OWN, **attributes)], (None, 4))
    for x in (whole, np.concatenate([odd, np.zeros((2, 4), np.float32)])):
        same(run(made, {"x": x})[0], blockfloat.mx(x, -1, element, 4, rounding, rule))
    subnormal = np.float32(
        [
            [2**-130, 2**-127, 0, 0],
            [1.9 * 2**-127, -(2**-149), 0, 0],
            [2**-126, 2**-140, 0, 0],
        ]
    )
    same(
        run(made, {"x": subnormal})[0],
        blockfloat.mx(subnormal, -1, element, 4, rounding, rule),
    )


def test_operators_of_both_domains_in_one_model() -> None:
    x = any_bits(6, 40, finite=True)
    nodes = [
        node("fp8_e4m3", "x", "a"),
        node("fp8_e4m3", "a", "b", domain=mx.OWN, exponent="rceil"),
    ]
    nodes.append(node("fp6_e2m3", "b", "y", domain=mx.OWN, exponent="ceil"))
    expected = blockfloat.mx(
        blockfloat.mx(x, 1, "fp8_e4m3"), 1, "fp8_e4m3", exponent="rceil"
    )
    same(
        run(model(nodes, (6, 40)), {"x": x})[0],
        blockfloat.mx(expected, 1, "fp6_e2m3", exponent="ceil"),
    )


@pytest.mark.parametrize("opset", range(MIN_OPSET, MAX_OPSET + 1))
def test_opsets(opset: int) -> None:
    x = any_bits(6, 40, finite=False)
    made = model([node("fp8_e4m3", axis=1)], (6, 40), opset)
    same(run(made, {"x": x}, optimize=True)[0], blockfloat.mx(x, 1, "fp8_e4m3"))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_nothing_comes_of_nothing(shape: tuple[int, ...]) -> None:
    for axis in range(len(shape)):
        for known in (shape, [None] * len(shape)):
            made = model([node("fp4_e2m1", axis=axis)], known)
            assert (
                run(made, {"x": np.zeros(shape, np.float32)}, optimize=True)[0].shape
                == shape
            )


def test_one_function_serves_nodes_that_differ() -> None:
    chain = [
        ("fp8_e4m3", 0, 32, 2),
        ("fp6_e2m3", 1, 16, 2),
        ("int8", -1, 32, 0),
        ("int8", 0, 32, 2),
        ("fp4_e2m1", 1, 8, 2),
    ]
    names = ["x", *"abcd", "y"]
    nodes = [
        node(
            element,
            names[i],
            names[i + 1],
            axis=axis,
            block_size=size,
            rounding_mode=rounding,
        )
        for i, (element, axis, size, rounding) in enumerate(chain)
    ]
    made = model(nodes, (None, None))
    assert len(made.functions) == 1
    x = expected = any_bits(37, 40, finite=False)
    for element, axis, size, rounding in chain:
        expected = blockfloat.mx(expected, axis, element, size, rounding)
    for optimize in (False, True):
        same(run(made, {"x": x}, optimize=optimize)[0], expected)


def test_attributes_that_are_left_out() -> None:
    bare = helper.make_node(mx.NAME, ["x"], ["y"], domain=DOMAIN)
    x = any_bits(4, 50, finite=True)
    same(run(model([bare], (4, 50)), {"x": x})[0], blockfloat.mx(x, 1, "int8", 32, 0))


def test_values_by_hand() -> None:
    x = np.float32([[5, 2.5, -0.75, 0.25, math.nan, -math.inf, -7.9, -0.0]])
    found = run(model([node("fp4_e2m1")], (1, 8)), {"x": x})[0]
    same(found, np.float32([[4, 2, -1, 0, math.nan, -math.inf, -6, 0]]))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"element": "fp4"},
            "element_dtype = 'fp4' cannot be computed; allowed: .*'fp8_e5m2'",
        ),
        ({"element": "int8", "block_size": -1}, "block_size = -1"),
        ({"element": "int8", "rounding_mode": 3}, "rounding_mode = 3"),
        ({"element": "int8", "exponent": "floor"}, "attribute 'exponent' is unknown"),
        (
            {"element": "int8", "domain": mx.OWN, "exponent": "up"},
            "exponent = 'up' cannot be computed; allowed: .*'rceil'",
        ),
    ],
)
def test_what_cannot_be_computed(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        mx.definitions([node(**attributes)], 17)


def test_other_domains_are_passed_over() -> None:
    assert (
        definitions([helper.make_node(mx.NAME, ["x"], ["y"], domain="other")], 17, {})
        == []
    )
