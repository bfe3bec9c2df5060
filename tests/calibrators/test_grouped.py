"""GroupedHistogram: the sum of its groups is the histogram of all.

A group holds the samples of one octave.
"""

from __future__ import annotations

import numpy as np
import pytest

from calibrators import GroupedHistogram, Histogram
from calibrators.extremes import MeanExtremes
from calibrators.grouped import GROUPS


def samples(*magnitudes: float) -> list[np.ndarray]:
    noise = np.random.default_rng(0)
    return [
        np.float32(magnitude * noise.uniform(-0.99, 0.99, (2, 300)))
        for magnitude in magnitudes
    ]


def grouped(batches: list[np.ndarray]) -> GroupedHistogram:
    statistic = GroupedHistogram()
    for batch in batches:
        statistic.observe(batch)
    return statistic


@pytest.mark.parametrize(
    "magnitudes", [(1, 1), (1, 8, 2), (8, 0, 1e-9, 8), (1e-3, 1, 1e3), (0, 0)]
)
def test_as_a_whole_it_is_the_histogram_of_all(magnitudes: tuple[float, ...]) -> None:
    batches, single = samples(*magnitudes), Histogram()
    for batch in batches:
        single.observe(batch)
    whole = grouped(batches).whole()
    for name in ("lo", "hi", "exponent", "positive", "negative"):
        np.testing.assert_array_equal(
            getattr(whole, name), getattr(single, name), err_msg=name
        )


def test_its_extremes_and_means_are_those_of_mean_extremes() -> None:
    batches, single = samples(1, 8, 2), MeanExtremes()
    batches[1][0] = np.nan  # a row without a finite value has no mean
    batches[2][1, 5] = np.inf
    for batch in batches:
        single.observe(batch)
    statistic = grouped(batches)
    for name in ("lo", "hi", "nonfinite", "sums", "batches"):
        np.testing.assert_array_equal(
            getattr(statistic, name), getattr(single, name), err_msg=name
        )


def test_samples_that_reach_about_equally_far_are_a_group() -> None:
    batches = samples(1, 8, 1, 2, 0.001, 0)
    statistic = grouped(batches)
    assert statistic.samples[:, 0].tolist() == [
        1,
        0,
        1,
        3,
    ]  # octaves 8, 4, 2, and all below; zeros count for nothing
    assert statistic.group(1, 0) is None
    for place, mine in ((0, [1]), (2, [3])):
        alone = Histogram()
        for each in mine:
            alone.observe(batches[each])
        group = statistic.group(place, 1)
        assert group is not None and group.exponent[0] == alone.exponent[1]
        np.testing.assert_array_equal(group.positive[0], alone.positive[1])
        np.testing.assert_array_equal(group.negative[0], alone.negative[1])


def test_the_groups_do_not_depend_on_the_order() -> None:
    batches = samples(1, 8, 1, 2, 0.001, 64)
    one, other = grouped(batches), grouped(batches[::-1])
    np.testing.assert_array_equal(one.samples, other.samples)
    for place in range(GROUPS):
        first, second = one.positive[place], other.positive[place]
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            np.testing.assert_array_equal(first, second)
