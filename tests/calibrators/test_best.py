"""Best: where each of the calibrators is right, by what numpy says of the relative error of the
samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from calibrators import (
    Best,
    Grid,
    MeanMinMax,
    MinMax,
    Percentile,
    Range,
    fake_quantize,
    params_for,
)

GRID = Grid(0, 255, symmetric=False)
CANDIDATES = {
    "minmax": MinMax(),
    "percentile": Percentile(),
    "mean_minmax": MeanMinMax(),
}

Batches = list[NDArray[np.float32]]


def ranged(method: object, batches: Batches) -> Range:
    statistic = method.statistic()  # type: ignore[attr-defined]
    for batch in batches:
        statistic.observe(batch)
    return method.range(statistic, GRID)  # type: ignore[attr-defined,no-any-return]


def relative_error(range_: Range, batches: Batches) -> float:
    """Mean over the samples of the root mean square of the error over that of the sample, in
    float64.
    """
    params = params_for(range_, GRID)
    errors = [
        np.linalg.norm(fake_quantize(x, params, GRID).astype(np.float64) - x)
        / np.linalg.norm(x)
        for x in batches
    ]
    return float(np.mean(errors))


def normal(magnitudes: list[float], size: int = 20_000) -> Batches:
    noise = np.random.default_rng(1)
    return [np.float32(each * noise.standard_normal((1, size))) for each in magnitudes]


def sparse(share: float) -> Batches:
    """Mostly zeros; a few values, all alike, are the signal."""
    noise = np.random.default_rng(2)
    values = noise.uniform(0.5, 1, (40, 1, 200_000)) * (
        noise.random((40, 1, 200_000)) < share
    )
    values[:, 0, 0] = 0.75
    return list(values.astype(np.float32))


def outliers(every: int) -> Batches:
    """Normal numbers; one sample in so many has one value far beyond them."""
    batches = normal([1.0] * 40)
    for batch in batches[::every]:
        batch[0, 0] = 100
    return batches


#: Made when a test first reads them: they are large, and every worker imports this file.
DATA: dict[str, Callable[[], Batches]] = {
    "alike": lambda: normal([1.0] * 20),
    "two magnitudes": lambda: normal([1.0, 1.0, 1.0, 8.0] * 5),
    "sparse": lambda: sparse(1e-5),
    "sparser": lambda: sparse(1e-7),
    "outliers in some samples": lambda: outliers(8),
    "outliers in all": lambda: outliers(1),
}


@cache
def batches_of(name: str) -> Batches:
    return DATA[name]()


@pytest.mark.parametrize("name", DATA)
def test_no_candidate_has_a_smaller_relative_error(name: str) -> None:
    batches = batches_of(name)
    least = min(
        relative_error(ranged(method, batches), batches)
        for method in CANDIDATES.values()
    )
    assert (
        relative_error(ranged(Best(), batches), batches) <= 1.1 * least
    )  # what clips has to be 5 % better; bins; octaves that count together


def test_a_percentile_of_zeros_says_nothing_of_the_signal() -> None:
    batches = batches_of("sparse")
    assert float(ranged(Percentile(), batches).hi[0]) < float(
        ranged(Best(), batches).hi[0]
    )
    best, percentile = (
        relative_error(ranged(method, batches), batches)
        for method in (Best(), Percentile())
    )
    assert best < percentile


def test_outliers_of_a_few_samples_do_not_take_the_range() -> None:
    batches = batches_of("outliers in some samples")
    best = float(ranged(Best(), batches).hi[0])
    assert best < 20 and float(ranged(MinMax(), batches).hi[0]) == 100


def test_clipping_for_next_to_nothing_is_not_worth_it() -> None:
    """Percentile takes a few values off the end of a flat distribution: its error is smaller, but
    hardly.
    """
    noise = np.random.default_rng(3)
    batches = list(noise.uniform(0, 1, (40, 1, 20_000)).astype(np.float32))
    for batch in batches[:2]:
        batch[0, :2] = 1.02
    clipped, whole = (ranged(method, batches) for method in (Percentile(), MinMax()))
    assert clipped.hi < whole.hi and relative_error(clipped, batches) < relative_error(
        whole, batches
    )
    assert ranged(Best(), batches).hi == whole.hi
