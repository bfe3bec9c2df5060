"""MinMSE against brute force on the raw values in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from calibrators import Grid, MinMax, MinMSE, Range, fake_quantize, params_for, rows
from tests.cases import loop_over

EXAMPLES = settings(deadline=None, derandomize=True)

Values = NDArray[np.float32]
N = 20_000
NOISE = np.random.default_rng(0)
GAUSSIAN = NOISE.standard_normal(N)
DATA: dict[str, Values] = {
    "gaussian": GAUSSIAN.astype(np.float32),
    "uniform": NOISE.uniform(-1, 1, N).astype(np.float32),
    "relu": np.maximum(GAUSSIAN, 0).astype(np.float32),
    "silu": (3 * GAUSSIAN / (1 + np.exp(-3 * GAUSSIAN))).astype(np.float32),
    "laplace": NOISE.laplace(size=N).astype(np.float32),
    "heavy tails": NOISE.standard_t(3, N).astype(np.float32),
    "skewed": (NOISE.gamma(1.5, size=N) - 0.3).astype(np.float32),
    "negative": -NOISE.exponential(2, N).astype(np.float32),
    "two values": np.where(GAUSSIAN > 0, 5, -0.1).astype(np.float32),
    "outlier": np.append(GAUSSIAN, 30).astype(np.float32),
}
FLOAT = {
    "int8": Grid(-128, 127),
    "uint8": Grid(0, 255, symmetric=False),
    "int4": Grid(-8, 7),
    "uint4": Grid(0, 15, symmetric=False),
}
POW2 = {
    "int8": Grid(-128, 127, pow2=True),
    "uint8": Grid(0, 255, symmetric=False, pow2=True),
}
WIDE = {"int16": Grid(-32768, 32767), "uint16": Grid(0, 65535, symmetric=False)}


def found(method: MinMSE | MinMax, values: Values, grid: Grid) -> Range:
    statistic = method.statistic()
    statistic.observe(rows(values))
    return method.range(statistic, grid)


def error(values: Values, range_: Range, grid: Grid) -> float:
    """What onnxruntime would make of the values, in mean squares."""
    kept = fake_quantize(values, params_for(range_, grid), grid)
    return float(np.mean(np.square(values.astype(np.float64) - kept)))


def brute_force(values: Values, grid: Grid) -> float:
    """The least error of many intervals: one bound for both ends, or each end on its own."""
    lo, hi = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    if grid.symmetric:
        bound, shares = max(-lo, hi), np.linspace(0.01, 1, 400)
        intervals = [(-bound * share, bound * share) for share in shares]
    else:
        shares = np.linspace(0.02, 1, 50)
        intervals = [
            (lo * a, hi * b)
            for a in (shares if lo else [0])
            for b in (shares if hi else [0])
        ]
    return min(error(values, Range(*interval), grid) for interval in intervals)  # type: ignore[arg-type]


def brute_force_pow2(values: Values, grid: Grid) -> float:
    """The least error of all exponents and all zero points."""
    exact = values.astype(np.float64)
    zeros = [grid.zero] if grid.symmetric else range(grid.qmin, grid.qmax + 1, 5)
    widest = int(np.ceil(np.log2(np.abs(exact).max())))
    return min(
        float(
            np.mean(
                np.square(
                    exact
                    - np.rint(exact / scale).clip(grid.qmin - zero, grid.qmax - zero)
                    * scale
                )
            )
        )
        for scale in 2.0 ** np.arange(widest - 16, widest + 1)
        for zero in zeros
    )


@pytest.mark.parametrize("kind", FLOAT)
@pytest.mark.parametrize("name", DATA)
def test_as_good_as_brute_force(name: str, kind: str) -> None:
    values, grid = DATA[name], FLOAT[kind]
    few = values if grid.symmetric else np.append(values[::4], values[-1])
    assert error(few, found(MinMSE(), few, grid), grid) <= 1.02 * brute_force(few, grid)


@pytest.mark.parametrize("kind", POW2)
@pytest.mark.parametrize("name", DATA)
def test_as_good_as_all_exponents(name: str, kind: str) -> None:
    values, grid = DATA[name], POW2[kind]
    few = np.append(values[::4], values[-1])
    assert error(few, found(MinMSE(), few, grid), grid) <= 1.01 * brute_force_pow2(
        few, grid
    )


@loop_over("grid", [*FLOAT.values(), *POW2.values(), *WIDE.values()])
@loop_over("name", tuple(DATA))
def test_never_worse_than_minmax(name: str, grid: Grid) -> None:
    values = DATA[name]
    assert error(values, found(MinMSE(), values, grid), grid) <= error(
        values, found(MinMax(), values, grid), grid
    )


@given(
    st.sampled_from([*FLOAT.values(), *POW2.values(), *WIDE.values()]),
    arrays(
        np.float32,
        st.integers(1, 30),
        elements=st.floats(-1e6, 1e6, width=32) | st.integers(-9, 9).map(float),
    ),
)
@EXAMPLES
def test_never_worse_than_minmax_by_more_than_the_bins(
    grid: Grid, values: Values
) -> None:
    """A value is known to within its bin.

    The distance to the nearest level changes by no more than that.
    """
    statistic = MinMSE().statistic()
    statistic.observe(rows(values))
    ours, theirs = (
        error(values, found(method, values, grid), grid)
        for method in (MinMSE(), MinMax())
    )
    assert np.sqrt(ours) <= np.sqrt(theirs) + 2 * statistic.width[0]


@pytest.mark.parametrize(
    "grid", [FLOAT["uint8"], WIDE["uint16"]], ids=["uint8", "uint16"]
)
def test_a_narrow_side_next_to_a_wide_one_is_kept(grid: Grid) -> None:
    """SiLU reaches down to -0.28, finer than a bin of what reaches up to 900."""
    values = np.append(DATA["silu"], np.linspace(100, 900, 50, dtype=np.float32))
    assert error(values, found(MinMSE(), values, grid), grid) <= error(
        values, found(MinMax(), values, grid), grid
    )


@pytest.mark.parametrize("grid", FLOAT.values(), ids=str)
def test_a_rare_outlier_is_cut_where_it_pays(grid: Grid) -> None:
    values = np.append(np.tile(DATA["gaussian"], 50), np.float32(100))
    assert found(MinMSE(), values, grid).hi[0] < 60


@loop_over("grid", [*FLOAT.values(), *POW2.values()])
@loop_over("value", [3.0, -0.7, 1e-6, 1e30])
def test_a_constant_is_reached(value: float, grid: Grid) -> None:
    values = np.full(100, value, np.float32)
    step = float(params_for(found(MinMSE(), values, grid), grid).scale)
    np.testing.assert_allclose(
        fake_quantize(values, params_for(found(MinMSE(), values, grid), grid), grid),
        values,
        atol=step / 2,
    )


@pytest.mark.parametrize("grid", POW2.values(), ids=str)
@pytest.mark.parametrize("name", DATA)
def test_the_range_gives_back_the_scale_that_was_chosen(name: str, grid: Grid) -> None:
    """The range of a power-of-two scale is what that scale covers."""
    range_ = found(MinMSE(), DATA[name], grid)
    scale = float(params_for(range_, grid).scale)
    assert (range_.hi[0] - range_.lo[0]) / scale == grid.levels
