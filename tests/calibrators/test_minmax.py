"""MinMax: what numpy says of all values, or the plain recurrence over the batches."""

from __future__ import annotations

import numpy as np
import pytest

from calibrators import Extremes, Grid, MinMax, MovingExtremes, rows

GRID = Grid(0, 255, symmetric=False)
BATCHES = [
    np.random.default_rng(seed).normal(seed, 1 + seed, (4, 3, 5)).astype(np.float32)
    for seed in range(5)
]


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_the_range_is_what_was_seen(axis: int | None) -> None:
    statistic, whole = (
        MinMax().statistic(),
        np.concatenate([rows(batch, axis) for batch in BATCHES], axis=1),
    )
    for batch in BATCHES:
        statistic.observe(rows(batch, axis))
    range_ = MinMax().range(statistic, GRID)
    np.testing.assert_array_equal(range_.lo, np.minimum(whole.min(axis=1), 0))
    np.testing.assert_array_equal(range_.hi, np.maximum(whole.max(axis=1), 0))


@pytest.mark.parametrize("constant", [0.0, 0.01, 0.5, 1.0])
def test_the_moving_average(constant: float) -> None:
    method = MinMax(moving_average=True, constant=constant)
    statistic = method.statistic()
    lo, hi = (float(end) for end in (BATCHES[0].min(), BATCHES[0].max()))
    statistic.observe(rows(BATCHES[0]))
    for batch in BATCHES[1:]:
        statistic.observe(rows(batch))
        lo += constant * (float(batch.min()) - lo)
        hi += constant * (float(batch.max()) - hi)
    range_ = method.range(statistic, GRID)
    np.testing.assert_allclose(
        [range_.lo, range_.hi], [[min(lo, 0)], [max(hi, 0)]], rtol=1e-12
    )


def test_the_setting_chooses_the_statistic() -> None:
    assert isinstance(MinMax().statistic(), Extremes)
    assert MinMax(moving_average=True, constant=0.25).statistic().constant == 0.25  # type: ignore[union-attr]
    assert isinstance(MinMax(moving_average=True).statistic(), MovingExtremes)
