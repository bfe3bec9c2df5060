"""Rounding to small floats: against lists of all their values, which are made from the bit
patterns.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quark_onnx.common.errors import ConfigError
from quark_onnx.kernels.minifloat import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FP16,
    MiniFloat,
    round_to,
    to_integer,
)

FORMATS = [E4M3, E5M2, E3M2, E2M3, E2M1, FP16, BF16]
by_name = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)

#: How many codes at the top of each format are infinities and NaN: E4M3 has one NaN, the formats of
#: MX have none.
SPECIAL = {"E4M3": 1, "E5M2": 4, "FP16": 1024, "BF16": 128}


@cache
def values(format: MiniFloat) -> list[Fraction]:
    """All values that are not negative, in the order of their codes, which is their own order."""
    mantissas = 2**format.mantissa_bits
    codes = 2**format.exponent_bits * mantissas - SPECIAL.get(format.name, 0)
    listed = []
    for code in range(codes):
        exponent, mantissa = divmod(code, mantissas)
        significand = Fraction(mantissa + (mantissas if exponent else 0), mantissas)
        listed.append(significand * Fraction(2) ** (max(exponent, 1) - format.bias))
    return listed


def nearest(x: float, format: MiniFloat) -> float:
    """The value next to a finite x; of two, the one with the even code."""
    listed, magnitude = values(format), abs(Fraction(x))
    below = bisect_right(listed, magnitude) - 1
    code = below
    if below + 1 < len(listed):
        short, long = magnitude - listed[below], listed[below + 1] - magnitude
        code += short > long or (short == long and below % 2 == 1)
    return math.copysign(float(listed[code]), x)


@by_name
def test_rows_of_the_table_agree_with_the_bit_patterns(format: MiniFloat) -> None:
    largest, least = float(values(format)[-1]), float(values(format)[1])
    assert format.largest == largest
    assert format.emax == math.frexp(largest)[1] - 1
    assert 2.0 ** (format.emin - format.mantissa_bits) == least


def test_the_four_bit_format_has_eight_magnitudes() -> None:
    assert [float(value) for value in values(E2M1)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@by_name
def test_what_a_format_has_stays(format: MiniFloat) -> None:
    exact = np.array([float(value) for value in values(format)], np.float32)
    np.testing.assert_array_equal(round_to(exact, format), exact)
    np.testing.assert_array_equal(round_to(-exact, format), -exact)


@by_name
def test_ties_go_to_the_even_code_and_neighbours_of_ties_do_not(
    format: MiniFloat,
) -> None:
    exact = np.array([float(value) for value in values(format)])
    middle = (exact[:-1] + exact[1:]) / 2
    even = np.where(np.arange(len(middle)) % 2, exact[1:], exact[:-1])
    ties = middle.astype(np.float32)
    held = ties == middle  # half of the least bfloat16 has no float32
    assert held.sum() > len(ties) - 5
    np.testing.assert_array_equal(round_to(ties[held], format), even[held])
    np.testing.assert_array_equal(
        round_to(np.nextafter(ties, np.float32(0))[held], format), exact[:-1][held]
    )
    np.testing.assert_array_equal(
        round_to(np.nextafter(ties, np.float32(np.inf))[held], format), exact[1:][held]
    )


@by_name
@settings(deadline=None)  # the first example lists the values
@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_float_goes_to_its_nearest_value(format: MiniFloat, x: float) -> None:
    found = float(round_to(np.float32([x]), format)[0])
    assert (found, math.copysign(1, found)) == (nearest(x, format), math.copysign(1, x))


@given(x=st.floats(-65519, 65519, width=32))
def test_half_precision_is_that_of_numpy(x: float) -> None:
    assert round_to(np.float32([x]), FP16)[0] == np.float32(x).astype(np.float16)


@by_name
def test_saturates_and_keeps_nan(format: MiniFloat) -> None:
    x = np.float32([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38])
    top = np.float32(format.largest)
    np.testing.assert_array_equal(round_to(x, format), [top, -top, np.nan, top, -top])


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (0, [0.5, 1.5, -0.5, -1.5, 3, -3]),
        (1, [0.5, 1.5, -0.0, -1, 3, -2]),
        (2, [0, 1, -0.0, -1, 2, -2]),
    ],
)
def test_ties_go_where_they_are_told(rounding: int, expected: list[float]) -> None:
    ties = np.float32([0.25, 1.25, -0.25, -1.25, 2.5, -2.5])
    np.testing.assert_array_equal(round_to(ties, E2M1, rounding), expected)


@given(
    x=st.floats(width=32, allow_nan=False, allow_infinity=False),
    rounding=st.sampled_from([0, 1, 2]),
)
def test_integers(x: float, rounding: int) -> None:
    exact, low = Fraction(x), math.floor(x)
    rest = exact - low
    up = (
        {0: x > 0, 1: True, 2: low % 2 == 1}[rounding]
        if rest == Fraction(1, 2)
        else rest > Fraction(1, 2)
    )
    assert to_integer(np.array([x]), rounding)[0] == low + up


@pytest.mark.parametrize("x", [0.49999997, 1.4999999, 2.4999998])
def test_adding_a_half_does_not_carry_what_is_just_below_it(x: float) -> None:
    v = np.float32([x, -x]).astype(np.float64)
    for rounding in (0, 1, 2):
        np.testing.assert_array_equal(
            to_integer(v, rounding), [np.floor(x), -np.floor(x)]
        )


def test_shape_is_kept() -> None:
    assert round_to(np.zeros((2, 0, 3), np.float32), E4M3).shape == (2, 0, 3)
    assert round_to(np.float32(1.3), E4M3).shape == ()


def test_unknown_rounding() -> None:
    with pytest.raises(ConfigError, match="rounding mode 3 is unknown"):
        round_to(np.zeros(1, np.float32), E4M3, 3)
