"""Rules for the shared exponents of microscaling formats, against their definitions in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quark_onnx.common.errors import ConfigError
from quark_onnx.kernels.blockfloat import (
    ELEMENTS,
    EXPONENTS,
    LEAST_ERROR,
    better_mx,
    mx,
)

Floats = NDArray[np.float64]
FLOATS = sorted(ELEMENTS)
RANDOM = np.random.default_rng(0)


def codes_of(element: str) -> Floats:
    """All values of an element type that are not negative, in the order of their codes."""
    if element == "int8":
        return np.arange(128) / 64
    format = ELEMENTS[element]
    codes = np.arange(1 << (format.exponent_bits + format.mantissa_bits))
    exponent, mantissa = (
        codes >> format.mantissa_bits,
        codes & ((1 << format.mantissa_bits) - 1),
    )
    normal = np.ldexp(1 + mantissa / 2**format.mantissa_bits, exponent - format.bias)
    subnormal = np.ldexp(mantissa / 2**format.mantissa_bits, 1 - format.bias)
    values = np.where(exponent > 0, normal, subnormal)
    return values[values <= format.largest]


def nearest(x: Floats, element: str) -> Floats:
    """The value of the element type next to each, of two the one with the even code; saturated."""
    codes = codes_of(element)
    above = np.searchsorted(codes, np.abs(x)).clip(1, len(codes) - 1)
    below = above - 1
    middle = (codes[below] + codes[above]) / 2
    upper = (np.abs(x) > middle) | ((np.abs(x) == middle) & (above % 2 == 0))
    return np.copysign(np.where(upper, codes[above], codes[below]), x)


def exponent_of(top: float, element: str, rule: str) -> int:
    """The exponent of a block's scale by the words of each rule."""
    codes = codes_of(element)
    emax = int(np.floor(np.log2(codes[-1])))
    exponent = max(int(np.frexp(top)[1]) - 1, -127) if top else -127
    if top >= 2.0**-126:
        steps = 1 << (6 if element == "int8" else ELEMENTS[element].mantissa_bits)
        mantissa = top * 2.0**-exponent
        raised = {
            "floor": False,
            "even": np.floor(mantissa * steps + 0.5) / steps
            == 2,  # rounded to so many bits it is the next power of two
            "ceil": mantissa > 1,
            "rceil": top > codes[-1] * 2.0 ** (exponent - emax),
        }
        exponent += bool(raised[rule])
    return exponent - emax if rule == "floor" else min(max(exponent - emax, -127), 127)


def maxima() -> Floats:
    """Zero, subnormal numbers, and for each exponent of float32 mantissas of seven bits and their
    neighbours.
    """
    sevens = np.arange(128) << 16
    mantissas = np.unique(
        np.concatenate([sevens, sevens + 1, (sevens - 1)[1:], [(1 << 23) - 1]])
    )
    exponents = np.r_[0:255:3, 0:4, 120:136, 250:255]
    return (
        (exponents[:, None] << 23 | mantissas)
        .astype(np.uint32)
        .view(np.float32)
        .reshape(-1)
        .astype(np.float64)
    )


@pytest.mark.parametrize("rule", EXPONENTS)
@pytest.mark.parametrize("element", [*FLOATS, "int8"])
def test_all_maxima(element: str, rule: str) -> None:
    tops = maxima()
    blocks = np.float32(
        tops[:, None] * np.c_[np.ones(len(tops)), RANDOM.uniform(-1, 1, (len(tops), 7))]
    )
    scales = np.ldexp(1.0, [exponent_of(top, element, rule) for top in tops])[:, None]
    units = blocks.astype(np.float64) / scales
    if element == "int8":
        codes = np.clip(np.rint(units * 64), -128, 127) / 64
    else:
        codes = nearest(np.float32(units).astype(np.float64), element)
    with np.errstate(
        over="ignore"
    ):  # the next power of two of the greatest blocks is beyond float32
        expected = (codes * scales).astype(np.float32)
    np.testing.assert_array_equal(mx(blocks, -1, element, 8, exponent=rule), expected)


@pytest.mark.parametrize("rule", EXPONENTS)
def test_what_is_not_finite_is_passed_on_and_does_not_count(rule: str) -> None:
    x = np.float32([np.inf, 500, np.nan, 3, -np.inf])
    expected = mx(np.float32([0, 500, 0, 3, 0]), 0, "fp8_e4m3", 5, exponent=rule)
    found = mx(x, 0, "fp8_e4m3", 5, exponent=rule)
    np.testing.assert_array_equal(found[[1, 3]], expected[[1, 3]])
    np.testing.assert_array_equal(found[[0, 2, 4]], x[[0, 2, 4]])


def test_a_rule_that_is_unknown() -> None:
    with pytest.raises(
        ConfigError,
        match="exponent rule 'up' is unknown; use one of floor, even, ceil, rceil",
    ):
        mx(np.ones(3, np.float32), 0, "int8", exponent="up")


def noise(x: NDArray[np.float32], left: NDArray[np.float32]) -> float:
    return float(np.square(left.astype(np.float64) - x).sum())


@pytest.mark.parametrize("element", [*FLOATS, "int8"])
def test_the_rule_of_least_error_has_it_for_normal_and_rectified_values(
    element: str,
) -> None:
    normal = RANDOM.normal(size=(4000, 32)).astype(np.float32)
    for x in (normal, np.maximum(normal, 0)):
        errors = {
            rule: noise(x, mx(x, -1, element, exponent=rule)) for rule in EXPONENTS
        }
        assert errors[LEAST_ERROR[element]] <= min(errors.values()) * 1.01


@pytest.mark.parametrize("element", FLOATS)
def test_the_better_of_two_scales_is_found_again_by_the_decoder(element: str) -> None:
    tops = maxima()
    blocks = np.float32(
        tops[:, None]
        * np.c_[np.ones(len(tops)), RANDOM.uniform(-1, 1, (len(tops), 15))]
    )
    chosen = better_mx(blocks, -1, element, 16)
    np.testing.assert_array_equal(mx(chosen, -1, element, 16), chosen)
    errors = np.square(chosen.astype(np.float64) - blocks).sum(1)
    assert (
        errors
        <= np.square(mx(blocks, -1, element, 16).astype(np.float64) - blocks).sum(1)
    ).all()


@given(
    x=st.lists(st.floats(width=32), min_size=1, max_size=40),
    element=st.sampled_from(FLOATS),
    axis=st.integers(0, 1),
)
def test_the_better_of_two_scales_along_any_axis(
    x: list[float], element: str, axis: int
) -> None:
    values = np.stack([np.float32(x), np.float32(x)[::-1]])
    chosen = better_mx(values, axis, element, 8)
    assert chosen.shape == values.shape
    np.testing.assert_array_equal(mx(chosen, axis, element, 8), chosen)
    odd = ~np.isfinite(values)
    np.testing.assert_array_equal(chosen[odd], values[odd])


def test_the_better_of_two_scales_is_the_best_that_the_decoder_can_make_of_it() -> None:
    """Of a block with one large value; tried are both scales and all codes of the large value."""
    for top in np.linspace(440, 520, 41):
        block = np.float32([top, 30.3, -17.7, 1.1])
        best = np.inf
        for scale in (1.0, 2.0):
            for code in codes_of("fp8_e4m3")[-20:] * scale:
                others = (
                    nearest(block[1:].astype(np.float64) / scale, "fp8_e4m3") * scale
                )
                candidate = np.float32([code, *others])
                if (mx(candidate, 0, "fp8_e4m3", 4) == candidate).all():
                    best = min(best, noise(block, candidate))
        assert noise(block, better_mx(block, 0, "fp8_e4m3", 4)) == best
