"""LayerwisePercentile against brute force on the raw values in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from calibrators import (
    CalibrationError,
    Grid,
    LayerwisePercentile,
    MinMax,
    Percentile,
    Range,
    create,
    params_for,
    rows,
)
from tests.cases import loop_over

Values = NDArray[np.float32]
NOISE = np.random.default_rng(0)
N = 50_000
DATA: dict[str, Values] = {
    name: values.astype(np.float32)
    for name, values in {
        "gaussian": NOISE.standard_normal(N),
        "uniform": NOISE.uniform(-1, 1, N),
        "relu": np.maximum(NOISE.standard_normal(N), 0),
        "laplace": NOISE.laplace(size=N),
        "heavy tails": NOISE.standard_t(3, N),
        "skewed": NOISE.gamma(1.5, size=N) - 0.3,
        "negative": -NOISE.exponential(2, N),
        "outliers": np.append(NOISE.standard_normal(N), [60.0, -45.0, 30.0]),
    }.items()
}
GRIDS = {
    "int8": Grid(-128, 127),
    "uint8": Grid(0, 255, symmetric=False),
    "int4": Grid(-8, 7),
    "uint4": Grid(0, 15, symmetric=False),
    "int8 pow2": Grid(-128, 127, pow2=True),
    "uint16": Grid(0, 65535, symmetric=False),
}


def found(method: Any, values: Values, grid: Grid) -> Range:
    statistic = method.statistic()
    statistic.observe(rows(values))
    result: Range = method.range(statistic, grid)
    return result


def error(values: Values, range_: Range, grid: Grid) -> float:
    """The mean squared error of the values behind a grid on the range, in float64."""
    params = params_for(range_, grid)
    scale, zero = float(params.scale), int(params.zero_point)
    exact = values.astype(np.float64)
    codes = (np.rint(exact / scale) + zero).clip(grid.qmin, grid.qmax)
    return float(np.mean(np.square(exact - (codes - zero) * scale)))


def percentile_of(values: Values, percentile: float, grid: Grid) -> Range:
    """The range of a percentile by sorting the values."""
    exact = values.astype(np.float64)
    if grid.symmetric:
        bound = np.percentile(np.abs(exact), percentile, method="inverted_cdf")
        return Range(np.maximum(exact.min(), -bound), np.minimum(exact.max(), bound))
    half = (100 + percentile) / 2
    return Range(
        -np.percentile(-exact, half, method="inverted_cdf"),
        np.percentile(exact, half, method="inverted_cdf"),
    )


@loop_over("kind", tuple(GRIDS))
@loop_over("name", tuple(DATA))
def test_as_good_as_the_best_percentile(name: str, kind: str) -> None:
    values, grid, method = DATA[name], GRIDS[kind], LayerwisePercentile()
    least = min(
        error(values, percentile_of(values, each, grid), grid)
        for each in method.percentiles
    )
    width = np.ldexp(
        1.0, int(np.frexp(np.abs(values).max())[1]) - 11
    )  # of a bin: all that is known of a value
    assert (
        error(values, found(method, values, grid), grid) <= 1.02 * least + width**2 / 12
    )


@loop_over("kind", tuple(GRIDS))
@loop_over("name", tuple(DATA))
def test_the_range_is_that_of_one_of_the_percentiles(name: str, kind: str) -> None:
    method = LayerwisePercentile(least=98, count=7)
    range_ = found(method, DATA[name], GRIDS[kind])
    tried = [
        found(Percentile(each), DATA[name], GRIDS[kind]) for each in method.percentiles
    ]
    assert (range_.lo, range_.hi) in [(each.lo, each.hi) for each in tried]


def test_tensors_differ() -> None:
    """Few bits: outliers are cut off, what has none is not; many bits have room for all."""
    assert found(LayerwisePercentile(), DATA["outliers"], GRIDS["int4"]).hi < 10
    assert found(LayerwisePercentile(), DATA["uniform"], GRIDS["int4"]).hi > 0.98
    for values in DATA["outliers"], DATA["uniform"]:
        assert found(LayerwisePercentile(), values, GRIDS["uint16"]) == found(
            MinMax(), values, GRIDS["uint16"]
        )


def test_rows_have_percentiles_of_their_own() -> None:
    few = np.stack([DATA["outliers"][-N:], DATA["uniform"]])
    statistic = LayerwisePercentile().statistic()
    statistic.observe(few)
    range_ = LayerwisePercentile().range(statistic, GRIDS["int4"])
    assert range_.hi[0] < 0.2 * few[0].max()
    assert range_.hi[1] > 0.98


def test_mostly_zero_keeps_an_extent() -> None:
    values = np.zeros(10_000, np.float32)
    values[:3] = 5, 7, -3
    range_ = found(LayerwisePercentile(least=90), values, GRIDS["uint8"])
    assert (range_.lo[0], range_.hi[0]) == (-3, 7)


def test_the_series_of_percentiles() -> None:
    assert LayerwisePercentile().percentiles[0] == 100
    assert LayerwisePercentile().percentiles[-1] == 99
    np.testing.assert_allclose(
        100 - np.array(LayerwisePercentile(90, 99.9, 3).percentiles), [0.1, 1, 10]
    )
    assert LayerwisePercentile(100, 100, 2).percentiles == (100, 100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"least": 0},
            "least is 0; it must be a number greater than 0 and at most 100",
        ),
        ({"greatest": 101}, "greatest is 101; it must be"),
        ({"least": float("nan")}, "least is nan"),
        (
            {"least": 99.9, "greatest": 99},
            "least is 99.9; it must be at most greatest, which is 99",
        ),
        ({"count": 1}, "count is 1; it must be 2 to 1000 percentiles"),
        ({"count": 2.5}, "count is 2.5"),
        ({"counts": 3}, "has no setting 'counts'; did you mean 'count'"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        create("layerwise_percentile", **settings)
