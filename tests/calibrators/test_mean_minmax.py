"""MeanMinMax: the average of the extremes of each sample, exactly and in any order."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from calibrators import Grid, MeanMinMax, rows

GRID = Grid(0, 255, symmetric=False)
BATCHES = [
    np.random.default_rng(seed).normal(0, 1 + seed, (4, 3, 5)).astype(np.float32)
    for seed in range(5)
]


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_the_range_is_that_of_the_average_sample(axis: int | None) -> None:
    statistic = MeanMinMax().statistic()
    for batch in BATCHES:
        statistic.observe(rows(batch, axis))
    range_ = MeanMinMax().range(statistic, GRID)
    for end, found in ((np.min, range_.lo), (np.max, range_.hi)):
        ends = [end(rows(batch, axis), axis=1) for batch in BATCHES]
        exact = [
            sum(map(Fraction, map(float, each))) / len(BATCHES)
            for each in zip(*ends, strict=True)
        ]
        np.testing.assert_array_equal(found, [float(each) for each in exact])


def test_what_was_seen_is_known_as_well() -> None:
    statistic = MeanMinMax().statistic()
    for batch in BATCHES:
        statistic.observe(rows(batch))
    assert (statistic.lo[0], statistic.hi[0]) == (np.min(BATCHES), np.max(BATCHES))


def test_a_sample_without_numbers_does_not_count() -> None:
    statistic = MeanMinMax().statistic()
    for batch in ([[1.0, 2.0]], [[np.nan, np.inf]], [[3.0, 6.0]], np.zeros((1, 0))):
        statistic.observe(np.float32(batch))
    assert (
        statistic.nonfinite == 2
        and float(MeanMinMax().range(statistic, GRID).hi[0]) == 4.0
    )


def test_one_outlier_among_many_samples_hardly_moves_it() -> None:
    statistic = MeanMinMax().statistic()
    for place in range(100):
        statistic.observe(np.float32([[0.0, 100.0 if place == 7 else 1.0]]))
    assert float(MeanMinMax().range(statistic, GRID).hi[0]) == 1.99
