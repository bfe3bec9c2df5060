"""Percentile against numpy's, on the raw values, to within a bin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from calibrators import CalibrationError, Grid, Histogram, Percentile, Range, rows
from tests.cases import loop_over

EXAMPLES = settings(deadline=None, derandomize=True)

SIGNED, FREE = Grid(-128, 127), Grid(0, 255, symmetric=False)
NOISE = np.random.default_rng(0)
DATA = {
    "gaussian": NOISE.standard_normal(200_003),
    "heavy tails": NOISE.standard_t(2, 200_003),
    "skewed": NOISE.gamma(1.5, size=200_003) - 0.5,
    "positive": NOISE.exponential(3, 200_003),
    "negative": -NOISE.exponential(3, 200_003),
    "relu": np.maximum(NOISE.standard_normal(200_003), 0),
    "large": NOISE.uniform(-3e38, 3e38, 200_003),
}


def measured(
    values: NDArray[np.float32], percentile: float, grid: Grid
) -> tuple[Range, Histogram]:
    method = Percentile(percentile)
    statistic = method.statistic()
    statistic.observe(rows(values))
    return method.range(statistic, grid), statistic


def numpys(values: NDArray[np.float32], percentile: float) -> float:
    """The least value that so many percent do not exceed."""
    return float(
        np.percentile(values.astype(np.float64), percentile, method="inverted_cdf")
    )


@loop_over("percentile", [50, 90, 99, 99.9, 99.99, 100])
@loop_over("name", tuple(DATA))
def test_magnitudes_on_a_symmetric_grid(name: str, percentile: float) -> None:
    values = DATA[name].astype(np.float32)
    range_, statistic = measured(values, percentile, SIGNED)
    bound = numpys(np.abs(values), percentile)
    assert abs(range_.lo[0] - min(0.0, max(-bound, values.min()))) <= statistic.width[0]
    assert abs(range_.hi[0] - max(0.0, min(bound, values.max()))) <= statistic.width[0]


@loop_over("percentile", [50, 90, 99, 99.9, 99.99, 100])
@loop_over("name", tuple(DATA))
def test_half_of_the_tail_at_each_end_on_a_free_grid(
    name: str, percentile: float
) -> None:
    values = DATA[name].astype(np.float32)
    range_, statistic = measured(values, percentile, FREE)
    lo, hi = (
        -numpys(-values, (100 + percentile) / 2),
        numpys(values, (100 + percentile) / 2),
    )
    assert abs(range_.lo[0] - min(lo, 0)) <= statistic.width[0]
    assert abs(range_.hi[0] - max(hi, 0)) <= statistic.width[0]


@given(
    arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32)),
    st.sampled_from([10, 50, 75, 90, 99, 99.999, 100]),
)
@EXAMPLES
def test_no_more_is_clipped_than_was_asked(
    values: NDArray[np.float32], percentile: float
) -> None:
    share = (1 - percentile / 100) * values.size + 1e-9
    range_, statistic = measured(values, percentile, SIGNED)
    bound = max(-range_.lo[0], range_.hi[0])
    assert (np.abs(values) > bound).sum() <= share
    assert bound == 0 or (np.abs(values) > bound - 2 * statistic.width[0]).sum() >= min(
        share, 1
    )
    range_, _ = measured(values, percentile, FREE)
    assert (values > range_.hi[0]).sum() <= share / 2
    assert (values < range_.lo[0]).sum() <= share / 2


@given(
    arrays(
        np.float32,
        st.integers(1, 40),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
@EXAMPLES
def test_all_of_it_is_minmax(values: NDArray[np.float32]) -> None:
    for grid in (SIGNED, FREE):
        range_, _ = measured(values, 100, grid)
        assert range_.lo[0] == min(values.min(), 0) and range_.hi[0] == max(
            values.max(), 0
        )


def test_a_side_narrower_than_a_bin_is_kept() -> None:
    """SiLU reaches down to -0.28, finer than a bin of what reaches up to 900.

    16 bits resolve both.
    """
    noise = DATA["gaussian"]
    values = np.append(noise / (1 + np.exp(-noise)), np.linspace(100, 900, 50)).astype(
        np.float32
    )
    range_, _ = measured(values, 99.999, Grid(0, 65535, symmetric=False))
    assert range_.lo[0] == values.min()


def test_a_rare_outlier_goes_and_a_frequent_one_stays() -> None:
    bulk = NOISE.uniform(-1, 1, 1_000_000).astype(np.float32)
    for grid in (SIGNED, FREE):
        assert (
            measured(np.append(bulk, np.float32([500] * 3)), 99.999, grid)[0].hi[0]
            < 1.5
        )
        assert (
            measured(np.append(bulk, np.float32([500] * 30)), 99.999, grid)[0].hi[0]
            == 500
        )


def test_every_row_has_its_own_share() -> None:
    values = np.stack([DATA["gaussian"], DATA["positive"] * 100]).astype(np.float32)
    method = Percentile(99)
    statistic = method.statistic()
    statistic.observe(values)
    whole = method.range(statistic, FREE)
    for row in range(2):
        one, _ = measured(values[row], 99, FREE)
        assert (one.lo[0], one.hi[0]) == (whole.lo[row], whole.hi[row])


@pytest.mark.parametrize("percentile", [0, -1, 100.001, float("nan")])
def test_a_percentile_that_is_none(percentile: float) -> None:
    with pytest.raises(
        CalibrationError, match=f"percentile is {percentile}; .* at most 100"
    ):
        measured(np.ones(3, np.float32), percentile, SIGNED)
