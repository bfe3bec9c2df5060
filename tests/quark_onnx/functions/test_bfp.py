"""The function that stands for BFPQuantizeDequantize: in onnxruntime, against the numpy reference,
bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from quark_onnx.common.errors import ModelError
from quark_onnx.functions import DOMAIN, bfp
from quark_onnx.functions.body import MAX_OPSET, MIN_OPSET
from quark_onnx.kernels import blockfloat
from tests.models import run

Floats = NDArray[np.float32]

BFP16 = {"bfp_method": "to_bfp", "bit_width": 16, "block_size": 8, "rounding_mode": 2}
MX9 = {
    "bfp_method": "to_bfp_prime",
    "bit_width": 16,
    "block_size": 16,
    "rounding_mode": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "BFP16": BFP16,
    "BFP16 half away": BFP16 | {"rounding_mode": 0},
    "BFP16 half up": BFP16 | {"rounding_mode": 1},
    "no block": BFP16 | {"block_size": 1},
    "one bit": BFP16 | {"bit_width": 10},
    "22 bits": BFP16 | {"bit_width": 31},
    "23 bits": BFP16 | {"bit_width": 32},
    "MX4": MX9 | {"bit_width": 11},
    "MX6": MX9 | {"bit_width": 13},
    "MX9": MX9,
    "MX9 half away": MX9 | {"rounding_mode": 0},
    "MX9 half up": MX9 | {"rounding_mode": 1},
    "MX9 by fours": MX9 | {"sub_block_size": 4, "sub_block_shift_bits": 3},
    "MX9 with any shift": MX9 | {"sub_block_size": 1, "sub_block_shift_bits": 9},
    "MX9 without shifts": MX9 | {"sub_block_size": 16, "sub_block_shift_bits": 0},
}
#: A rank and an axis; the lengths are neither multiples of a block nor shorter than it.
PLACES: list[tuple[tuple[int, ...], int]] = [
    ((40,), 0),
    ((3, 37), 1),
    ((37, 3), 0),
    ((2, 37, 3), -2),
    ((2, 3, 1, 33), -1),
]


def node(x: str = "x", y: str = "y", **attributes: Any) -> NodeProto:
    return helper.make_node(bfp.NAME, [x], [y], domain=DOMAIN, **attributes)


def model(
    nodes: Sequence[NodeProto], shape: Sequence[int | None], opset: int = 17
) -> ModelProto:
    """A chain of vendor nodes from x to y, with the function that they need."""
    made = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        ),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        functions=bfp.definitions(nodes, opset),
        ir_version=8,
    )
    onnx.checker.check_model(made)
    return made


def reference(x: Floats, axis: int, settings: dict[str, Any]) -> Floats:
    kind = {"to_bfp": blockfloat.bfp, "to_bfp_prime": blockfloat.bfp_prime}[
        settings["bfp_method"]
    ]
    return kind(
        x,
        axis,
        **{name: value for name, value in settings.items() if name != "bfp_method"},
    )


def same(found: Floats, expected: Floats) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    kept = ~np.isnan(expected)
    np.testing.assert_array_equal(
        found[kept].view(np.int32), expected[kept].view(np.int32)
    )


def draw(kind: str, shape: tuple[int, ...]) -> Floats:
    random = np.random.default_rng([len(kind), *shape])
    scales = np.exp2(random.integers(-6, 6, (*shape[:-1], 1)))
    if kind == "normal":
        return (random.normal(size=shape) * scales).astype(np.float32)
    if kind == "ties":
        return (random.integers(-512, 513, shape) * scales / 128).astype(np.float32)
    if kind == "subnormal":
        codes = random.integers(0, 2**25, shape, np.uint32) >> random.integers(
            0, 25, shape, np.uint32
        )
        return (codes | random.integers(0, 2, shape, np.uint32) << np.uint32(31)).view(
            np.float32
        )
    if kind == "huge":
        return (random.uniform(-1, 1, shape) * float(np.finfo(np.float32).max)).astype(
            np.float32
        )
    if kind == "zeros":
        return np.where(
            random.random(shape) < 0.9, np.copysign(0, random.normal(size=shape)), 1.3
        ).astype(np.float32)
    special = random.choice(np.float32([np.nan, np.inf, -np.inf, -0.0, 1e-42]), shape)
    return np.where(
        random.random(shape) < 0.05, special, random.normal(size=shape)
    ).astype(np.float32)


KINDS = ["normal", "ties", "subnormal", "huge", "zeros", "special"]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
def test_is_the_reference_bit_for_bit(
    settings: dict[str, Any], shape: tuple[int, ...], axis: int
) -> None:
    # one place of a leading axis for each kind of data, so that one session serves them all
    x = np.stack([draw(kind, shape) for kind in KINDS])
    along = axis if axis < 0 else axis + 1
    for known, optimize in (([None] * x.ndim, False), (x.shape, True)):
        made = model([node(axis=along, **settings)], known)
        same(run(made, {"x": x}, optimize=optimize)[0], reference(x, along, settings))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [BFP16, MX9], ids=["BFP16", "MX9"])
def test_each_kind_alone(settings: dict[str, Any], kind: str) -> None:
    x = draw(kind, (50, 16))
    for known, optimize in (((None, None), True), ((50, 16), False)):
        found = run(
            model([node(axis=1, **settings)], known), {"x": x}, optimize=optimize
        )[0]
        same(found, reference(x, 1, settings))


@pytest.mark.parametrize("settings", [BFP16, MX9], ids=["BFP16", "MX9"])
def test_finds_a_single_nan_wherever_it_is(settings: dict[str, Any]) -> None:
    made = model([node(axis=1, **settings)], (256, 16))
    x = np.tile(draw("normal", (1, 16)), (256, 1))
    x[np.arange(256), np.arange(256) % 16] = np.nan
    same(run(made, {"x": x}, optimize=True)[0], reference(x, 1, settings))
    for row in (0, 7, 13, 15):
        one = np.where(
            np.arange(256)[:, None] == 17 * row, x, draw("normal", (256, 16))
        )
        same(run(made, {"x": one}, optimize=True)[0], reference(one, 1, settings))


@pytest.mark.parametrize("bit_width", [16, 31])
def test_every_exponent(bit_width: int) -> None:
    """Next to powers of two, where a logarithm would be wrong."""
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    x = np.concatenate(
        [
            powers,
            np.nextafter(powers, np.float32(0)),
            np.nextafter(powers, np.float32(np.inf)),
        ]
    )
    settings = BFP16 | {"block_size": 1, "bit_width": bit_width}
    same(
        run(model([node(axis=0, **settings)], (None,)), {"x": x})[0],
        reference(x, 0, settings),
    )
    for shift_bits in (1, 8):
        settings = MX9 | {"block_size": 2, "bit_width": bit_width, "sub_block_size": 1}
        settings["sub_block_shift_bits"] = shift_bits
        same(
            run(model([node(axis=0, **settings)], (None,)), {"x": x})[0],
            reference(x, 0, settings),
        )


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
@pytest.mark.parametrize("settings", [BFP16, MX9], ids=["BFP16", "MX9"])
def test_nothing_comes_of_nothing(
    settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    for axis in range(len(shape)):
        for known in (shape, [None] * len(shape)):
            made = model([node(axis=axis, **settings)], known)
            for optimize in (False, True):
                assert (
                    run(made, {"x": np.zeros(shape, np.float32)}, optimize=optimize)[
                        0
                    ].shape
                    == shape
                )


@pytest.mark.parametrize("opset", range(MIN_OPSET, MAX_OPSET + 1))
def test_opsets(opset: int) -> None:
    x = draw("special", (5, 37))
    for settings in (BFP16, MX9):
        found = run(
            model([node(axis=1, **settings)], (5, 37), opset), {"x": x}, optimize=True
        )[0]
        same(found, reference(x, 1, settings))


def test_one_function_serves_nodes_that_differ() -> None:
    chain: list[tuple[int, dict[str, Any]]] = [
        (0, MX9),
        (1, BFP16),
        (-1, BFP16 | {"bit_width": 13}),
        (0, BFP16 | {"bit_width": 13, "rounding_mode": 0}),
        (1, MX9 | {"bit_width": 11, "sub_block_size": 4}),
        (0, BFP16),
    ]
    names = ["x", *"abcde", "y"]
    nodes = [
        node(names[i], names[i + 1], axis=axis, **settings)
        for i, (axis, settings) in enumerate(chain)
    ]
    made = model(nodes, (None, None))
    assert len(made.functions) == 1
    x = expected = draw("special", (19, 37))
    for axis, settings in chain:
        expected = reference(expected, axis, settings)
    for optimize in (False, True):
        same(run(made, {"x": x}, optimize=optimize)[0], expected)


def test_attributes_that_are_left_out() -> None:
    x = draw("ties", (3, 24))
    found = run(model([node()], (3, 24)), {"x": x})[0]
    same(found, blockfloat.bfp(x, 1, bit_width=16, block_size=8, rounding_mode=0))
    found = run(model([node(bfp_method="to_bfp_prime")], (3, 24)), {"x": x})[0]
    same(found, blockfloat.bfp_prime(x, 1, bit_width=16, block_size=8, rounding_mode=0))


def test_values_by_hand() -> None:
    x = np.float32([[64, 0.5, 1.5, -0.5, math.nan, 127.5, -127.5, 0.49999997]])
    found = run(model([node(**BFP16)], (1, 8)), {"x": x})[0]
    same(found, np.float32([[64, 0, 2, 0, math.nan, 127, -127, 0]]))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"bfp_method": "to_bfq"},
            "bfp_method = 'to_bfq' cannot be computed; allowed: ",
        ),
        ({"bit_width": 9}, "bit_width = 9 cannot be computed"),
        ({"block_size": 0}, "block_size = 0"),
        ({"rounding_mode": 3}, "rounding_mode = 3"),
        ({"convert_to_bfloat_before_bfp": 1}, "convert_to_bfloat_before_bfp = 1"),
        ({"use_compiler_version_cpu_kernel": 1}, "use_compiler_version_cpu_kernel = 1"),
        (
            {"bfp_method": "to_bfp_prime", "sub_block_size": 3},
            "sub-blocks of 3 do not divide blocks of 8",
        ),
        ({"bits": 16}, "attribute 'bits' is unknown; known are bfp_method, axis"),
        ({"axis": "last"}, "attribute 'axis' has the value 'last' of another type"),
    ],
)
def test_what_cannot_be_computed(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        bfp.definitions([node(**attributes)], 17)


def test_opset_too_old_or_too_new() -> None:
    for opset in (MIN_OPSET - 1, MAX_OPSET + 1):
        with pytest.raises(
            ModelError,
            match=f"for the opsets {MIN_OPSET} to {MAX_OPSET}, not for opset {opset}",
        ):
            bfp.definitions([node()], opset)


def test_other_nodes_are_passed_over() -> None:
    assert bfp.definitions([helper.make_node("Add", ["x", "x"], ["y"])], 17) == []
