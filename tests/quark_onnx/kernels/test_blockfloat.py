"""Block formats: values worked out by hand from the specifications, and one block at a time in
exact fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quark_onnx.common.errors import ConfigError
from quark_onnx.kernels.blockfloat import bfp, bfp_prime, mx

Floats = NDArray[np.float32]
INF, NAN = math.inf, math.nan

#: Exponent of the least normal value, bits of the mantissa, exponent of the largest value, the
#: largest value.
ELEMENTS = {
    "fp8_e4m3": (-6, 3, 8, 448.0),
    "fp8_e5m2": (-14, 2, 15, 57344.0),
    "fp6_e3m2": (-2, 2, 4, 28.0),
    "fp6_e2m3": (0, 3, 2, 7.5),
    "fp4_e2m1": (0, 1, 2, 6.0),
}


def same(found: Floats, expected: Any) -> None:
    """Equal bit for bit, but that a NaN is a NaN."""
    wanted = np.asarray(expected, np.float32)
    assert found.dtype == np.float32 and found.shape == wanted.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    kept = ~np.isnan(wanted)
    np.testing.assert_array_equal(
        found[kept].view(np.int32), wanted[kept].view(np.int32)
    )


# by hand

TINY = 2.0**-126
BFP16 = [
    ("an exponent of 6: steps of 1", [64, 0.5, 1.5, -0.5], [64, 0, 2, 0]),
    ("a negative zero", [64, -0.0, -0.1, 0.1], [64, 0, 0, 0]),
    ("127 steps at most", [127.5, -127.5, 127.4, -127.6], [127, -127, 127, -127]),
    (
        "just below the next exponent",
        [1.9999, -1.9999, 1, 1],
        [1.984375, -1.984375, 1, 1],
    ),
    ("nothing but zeros", [0, -0.0, 0, 0], [0, 0, 0, 0]),
    ("NaN does not count", [NAN, 1, 2, 0.01], [NAN, 1, 2, 0]),
    ("infinities do not count", [INF, -INF, 2, -3], [INF, -INF, 2, -3]),
    ("nothing finite", [NAN, INF, -INF, NAN], [NAN, INF, -INF, NAN]),
    (
        "next to subnormals",
        [TINY, 2**-132 * 1.1, -TINY / 2, 2**-133],
        [TINY, 2**-132, -TINY / 2, 0],
    ),
    (
        "nothing but subnormals: as if the exponent were -127",
        [2**-130, 2**-149, 2**-133, 0],
        [2**-130, 0, 2**-133, 0],
    ),
    (
        "the greatest floats",
        [3.4028235e38, -3e38, 2.0**120, 2.0**119],
        [127 * 2.0**121, -113 * 2.0**121, 0, 0],
    ),
]
MX9 = [
    ("a shift for the second pair", [64, 0.5, 1.5, -0.5], [64, 0, 1.5, -0.5]),
    ("a shift of one at most", [64, 1, 0.25, 0.75], [64, 1, 0, 1]),
    ("127 steps at most, in a small sub-block too", [64, 0, 63.9, 1], [64, 0, 63.5, 1]),
    ("NaN is everywhere", [NAN, 1, 2, 0], [NAN] * 4),
    ("infinity is NaN", [1, 2, 3, -INF], [NAN] * 4),
    ("no subnormals", [TINY, TINY / 2, -TINY / 2, 2**-149], [TINY, 0, 0, 0]),
    ("nothing but subnormals", [TINY / 2, 2**-149, -TINY / 4, 0], [0, 0, 0, 0]),
    ("nothing but zeros", [0, -0.0, 0, 0], [0, 0, 0, 0]),
]
MX = [
    ("fp8_e4m3", [256, 17, 18, 19], [256, 16, 18, 20]),
    (
        "fp8_e4m3",
        [2.0**127, -3.0e38, 1e37, 5e30],
        [2.0**127, -448 * 2.0**119, 1.875 * 2.0**122, 0],
    ),
    ("fp8_e4m3", [480, -500, 2**-10, 3 * 2**-10], [448, -448, 0, 2**-8]),
    ("fp8_e5m2", [2.0**15, 2**-17, 3 * 2**-17, 65535], [2.0**15, 0, 2**-15, 57344]),
    ("fp6_e3m2", [16, 0.03125, 0.09375, -31], [16, 0, 0.125, -28]),
    ("fp6_e2m3", [4, 0.0625, 0.1875, 7.9], [4, 0, 0.25, 7.5]),
    ("fp4_e2m1", [5, 2.5, -0.75, 0.25], [4, 2, -1, 0]),
    ("fp4_e2m1", [7.9, 0.250001, 3.5, -0.1], [6, 0.5, 4, 0]),
    ("fp4_e2m1", [0.079, 0, -0.0, 0], [0.09375, 0, 0, 0]),
    ("int8", [-127.9, 127.9, 64, 0.5], [-128, 127, 64, 0]),
    ("int8", [1, 2**-7, 3 * 2**-7, -1.99], [1, 0, 2**-5, -1.984375]),
    ("int8", [-3.4028235e38, 3.4028235e38, 0, 0], [-INF, 127 * 2.0**121, 0, 0]),
    ("fp8_e4m3", [NAN, 1, INF, -0.0], [NAN, 1, INF, 0]),
    ("fp8_e5m2", [2**-127, -(2**-149), 2**-140, 0], [2**-127, -(2**-149), 2**-140, 0]),
    ("fp4_e2m1", [0, 0, -0.0, 0], [0, 0, 0, 0]),
]


@pytest.mark.parametrize(
    ("x", "expected"), [row[1:] for row in BFP16], ids=[row[0] for row in BFP16]
)
def test_bfp16(x: list[float], expected: list[float]) -> None:
    same(bfp(np.float32(x), 0), expected)


@pytest.mark.parametrize(
    ("x", "expected"), [row[1:] for row in MX9], ids=[row[0] for row in MX9]
)
def test_mx9(x: list[float], expected: list[float]) -> None:
    same(bfp_prime(np.float32(x), 0, bit_width=16), expected)


@pytest.mark.parametrize(("element", "x", "expected"), MX)
def test_mx(element: str, x: list[float], expected: list[float]) -> None:
    same(mx(np.float32(x), 0, element), expected)


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [(0, [1, 2, -1, -2, 0]), (1, [1, 2, 0, -1, 0]), (2, [0, 2, 0, -2, 0])],
)
def test_ties(rounding: int, expected: list[float]) -> None:
    x = np.float32([0.5, 1.5, -0.5, -1.5, 0.49999997, 64])
    same(bfp(x, 0, rounding_mode=rounding), [*expected, 64])
    same(
        bfp_prime(x, 0, bit_width=16, sub_block_shift_bits=0, rounding_mode=rounding),
        [*expected, 64],
    )
    same(mx(x, 0, "int8", rounding_mode=rounding), [*expected, 64])


def test_float_elements_go_to_even_whatever_the_mode() -> None:
    x = np.float32([4, 0.25, 0.75, -0.25])
    for rounding in (0, 1, 2):
        same(mx(x, 0, "fp4_e2m1", rounding_mode=rounding), [4, 0, 1, 0])


def test_mx4_and_mx6_have_fewer_bits() -> None:
    x = np.float32([1.9, 1.2, 0.9, 0.3])
    same(bfp_prime(x, 0, bit_width=11), [1.5, 1, 0.75, 0.25])
    same(bfp_prime(x, 0, bit_width=13), [1.875, 1.25, 0.875, 0.3125])


# in fractions


def nearest(q: Fraction, rounding: int) -> int:
    low = math.floor(q)
    if q - low != Fraction(1, 2):
        return low + (q - low > Fraction(1, 2))
    return low + {0: q > 0, 1: True, 2: low % 2 == 1}[rounding]


def exponent(values: list[float]) -> int:
    greatest = max(
        (abs(value) for value in values if math.isfinite(value)), default=0.0
    )
    return max(math.frexp(greatest)[1] - 1, -127) if greatest else -127


def two(power: int) -> Fraction:
    return Fraction(2) ** power


def stepped(value: float, step: Fraction, low: int, high: int, rounding: int) -> float:
    return float(min(max(nearest(Fraction(value) / step, rounding), low), high) * step)


def scalar_bfp(block: list[float], bits: int, rounding: int) -> list[float]:
    step, top = two(exponent(block) - bits + 1), 2**bits - 1
    return [
        stepped(v, step, -top, top, rounding) if math.isfinite(v) else v for v in block
    ]


def scalar_prime(
    block: list[float], bits: int, rounding: int, size: int, shift_bits: int
) -> list[float]:
    if not all(map(math.isfinite, block)):
        return [NAN] * len(block)
    block = [0.0 if abs(v) < TINY else v for v in block]
    made: list[float] = []
    for start in range(0, len(block), size):
        part = block[start : start + size]
        shift = min(exponent(block) - exponent(part), 2**shift_bits - 1)
        step, top = two(exponent(block) - shift - bits + 1), 2**bits - 1
        made += [stepped(v, step, -top, top, rounding) for v in part]
    return made


def scalar_mx(block: list[float], element: str, rounding: int) -> list[float]:
    made = []
    for v in block:
        if not math.isfinite(v):
            made.append(v)
        elif element == "int8":
            made.append(stepped(v, two(exponent(block) - 6), -128, 127, rounding))
        else:
            emin, bits, emax, largest = ELEMENTS[element]
            scale = two(exponent(block) - emax)
            own = math.frexp(v)[1] - 1  # for subnormal float32 too
            step = two(max(own, emin + exponent(block) - emax) - bits)
            rounded = nearest(Fraction(v) / step, 2) * step
            made.append(
                float(
                    min(
                        max(rounded, -Fraction(largest) * scale),
                        Fraction(largest) * scale,
                    )
                )
            )
    return made


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
grid = st.builds(
    lambda code, power: float(code * 2.0**power),
    st.integers(-1024, 1024),
    st.integers(-10, 2),
)
small = st.builds(lambda code: float(code * 2.0**-149), st.integers(-(2**24), 2**24))
anything = st.one_of(
    grid,
    grid,
    small,
    finite,
    st.sampled_from([0.0, -0.0, NAN, INF, -INF, 3.4028234663852886e38]),
)
blocks = st.one_of(
    *(
        st.lists(kind, min_size=8, max_size=8)
        for kind in (grid, small, st.one_of(grid, small), finite, anything)
    )
)


def agrees(found: Floats, expected: list[float]) -> None:
    with np.errstate(over="ignore"):
        same(found, np.float32(expected) + np.float32(0))


@settings(max_examples=300, deadline=None)
@given(
    block=blocks,
    bit_width=st.sampled_from([10, 13, 16, 24, 32]),
    rounding=st.sampled_from([0, 1, 2]),
)
def test_a_block_is_that_of_exact_arithmetic(
    block: list[float], bit_width: int, rounding: int
) -> None:
    found = bfp(np.float32(block), 0, bit_width=bit_width, rounding_mode=rounding)
    agrees(found, scalar_bfp(block, bit_width - 9, rounding))


@settings(max_examples=300, deadline=None)
@given(
    block=blocks,
    bit_width=st.sampled_from([11, 13, 16]),
    rounding=st.sampled_from([0, 1, 2]),
    size=st.sampled_from([1, 2, 4, 8]),
    shift_bits=st.integers(0, 3),
)
def test_sub_blocks_are_those_of_exact_arithmetic(
    block: list[float], bit_width: int, rounding: int, size: int, shift_bits: int
) -> None:
    found = bfp_prime(
        np.float32(block),
        0,
        bit_width=bit_width,
        block_size=8,
        sub_block_size=size,
        sub_block_shift_bits=shift_bits,
        rounding_mode=rounding,
    )
    agrees(found, scalar_prime(block, bit_width - 9, rounding, size, shift_bits))


@settings(max_examples=400, deadline=None)
@given(
    block=blocks,
    element=st.sampled_from([*ELEMENTS, "int8"]),
    rounding=st.sampled_from([0, 1, 2]),
)
def test_elements_are_those_of_exact_arithmetic(
    block: list[float], element: str, rounding: int
) -> None:
    agrees(
        mx(np.float32(block), 0, element, 8, rounding),
        scalar_mx(block, element, rounding),
    )


# shapes

METHODS: dict[str, Callable[[Floats, int], Floats]] = {
    "bfp": lambda x, axis: bfp(x, axis, block_size=4),
    "bfp_prime": lambda x, axis: bfp_prime(x, axis, bit_width=13, block_size=4),
    "mx": lambda x, axis: mx(x, axis, "fp6_e2m3", 4),
}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@each
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((10,), 0), ((3, 9), 0), ((3, 9), -1), ((2, 6, 3), 1), ((2, 1, 3, 5), -2)],
)
def test_blocks_lie_along_the_axis(
    method: Callable[[Floats, int], Floats], shape: tuple[int, ...], axis: int
) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    expected = np.empty_like(x)
    for place in np.ndindex(*np.delete(shape, axis)):
        line: list[Any] = list(place)
        line.insert(axis % len(shape), slice(None))
        whole = x[tuple(line)]
        for start in range(0, len(whole), 4):
            expected[tuple(line)][start : start + 4] = method(
                whole[start : start + 4], 0
            )
    same(method(x, axis), expected)


@each
@pytest.mark.parametrize(
    ("shape", "axis"), [((0,), 0), ((0, 3), 0), ((0, 3), 1), ((2, 0, 3), 2)]
)
def test_nothing_comes_of_nothing(
    method: Callable[[Floats, int], Floats], shape: tuple[int, ...], axis: int
) -> None:
    assert method(np.zeros(shape, np.float32), axis).shape == shape


@each
def test_the_argument_stays_as_it_is(method: Callable[[Floats, int], Floats]) -> None:
    x = np.float32([1.1, 2.2, -0.0])
    method(x, 0)
    same(x, [1.1, 2.2, -0.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: bfp(x, 2), "axis 2 is not an axis of a tensor of rank 2"),
        (lambda x: bfp(x[0, 0], 0), "axis 0 is not an axis of a tensor of rank 0"),
        (lambda x: bfp(x, 0, bit_width=9), "bit width 9 is not from 10 to 32"),
        (lambda x: bfp(x, 0, block_size=0), "block size 0 is not positive"),
        (lambda x: bfp(x, 0, rounding_mode=3), "rounding mode 3 is unknown"),
        (
            lambda x: bfp_prime(x, 0, bit_width=16, sub_block_size=3),
            "sub-blocks of 3 do not divide blocks of 16",
        ),
        (
            lambda x: mx(x, 0, "fp4"),
            "MX element type 'fp4' is unknown; use one of fp8_e5m2, fp8_e4m3",
        ),
    ],
)
def test_what_makes_no_sense(call: Callable[[Floats], Floats], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(np.ones((2, 3), np.float32))
