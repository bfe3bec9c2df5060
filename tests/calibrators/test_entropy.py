"""Entropy: the definition in plain loops, and what the method is expected to keep and to cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from calibrators import (
    Entropy,
    Grid,
    Histogram,
    MinMSE,
    Range,
    fake_quantize,
    params_for,
    rows,
)
from tests.cases import loop_over

Values = NDArray[np.float32]
N = 200_000
NOISE = np.random.default_rng(0)
GAUSSIAN = NOISE.standard_normal(N).astype(np.float32)
INT8, UINT8 = Grid(-128, 127), Grid(0, 255, symmetric=False)
BYTES = pytest.mark.parametrize("grid", [INT8, UINT8], ids=["int8", "uint8"])


def seen(values: Values) -> Histogram:
    statistic = Histogram()
    statistic.observe(rows(values))
    return statistic


def found(values: Values, grid: Grid, method: Entropy | MinMSE | None = None) -> Range:
    return (method or Entropy()).range(seen(values), grid)


def decibels(values: Values, range_: Range, grid: Grid) -> float:
    kept = fake_quantize(values, params_for(range_, grid), grid)
    return 10 * math.log10(float(np.mean(np.square(values.astype(np.float64) - kept))))


def divergence(counts: list[int], end: int, levels: int) -> float:
    """KL(P || Q) of the published definition, with plain loops.

    P is the histogram up to ``end``, what lies beyond added to its last bin. For Q, equal stretches
    of it, one for each level, share their counts evenly among those of their bins in which P has
    something.
    """
    p = [float(count) for count in counts[:end]]
    p[-1] += sum(counts[end:])
    members: list[list[int]] = [[] for _ in range(levels)]
    for place in range(end):
        members[place * levels // end].append(place)
    q = [0.0] * end
    for places in members:
        occupied = [place for place in places if p[place]]
        for place in occupied:
            q[place] = sum(counts[place] for place in places) / len(occupied)
    total_p, total_q = sum(p), sum(q)
    if not total_q:
        return math.inf
    return sum(
        one / total_p * math.log((one / total_p) / max(other / total_q, 1e-12))
        for one, other in zip(p, q, strict=True)
        if one
    )


@pytest.mark.parametrize("name", ["gamma", "heavy tails", "bumps"])
def test_no_threshold_diverges_less(name: str) -> None:
    """Of values away from zero: of those at zero the literature has many opinions."""
    grid = Grid(-512, 511)
    values = {
        "gamma": NOISE.gamma(3, size=N),
        "heavy tails": np.abs(NOISE.standard_t(4, N)),
        "bumps": np.concatenate(
            [NOISE.normal(3, 0.2, N), NOISE.normal(6, 0.1, N // 100)]
        ),
    }[name].astype(np.float32)
    values = values[np.abs(values) > 0.05]
    statistic = seen(values)
    counts = statistic.magnitude()[0].tolist()
    used = max(place for place, count in enumerate(counts) if count) + 1
    ends = range(grid.levels // 2, used + 1)
    best = min(divergence(counts, end, grid.levels // 2) for end in ends)
    chosen = Entropy(candidates=len(ends)).range(statistic, grid).hi[0]
    ours = divergence(
        counts, min(used, round(chosen / statistic.width[0])), grid.levels // 2
    )
    assert ours <= best * (1 + 1e-9) + 1e-12


@BYTES
@pytest.mark.parametrize("least", [-1, 0], ids=["both signs", "positive"])
def test_a_uniform_distribution_is_kept_whole(least: float, grid: Grid) -> None:
    values = NOISE.uniform(least, 1, N).astype(np.float32)
    assert found(values, grid).hi[0] > 0.97


@BYTES
def test_little_of_a_gaussian_is_clipped(grid: Grid) -> None:
    range_ = found(GAUSSIAN, grid)
    assert np.mean((range_.lo[0] > GAUSSIAN) | (range_.hi[0] < GAUSSIAN)) < 0.002


@BYTES
def test_one_far_outlier_is_cut(grid: Grid) -> None:
    values = np.append(NOISE.standard_normal(1_000_000), 100).astype(np.float32)
    range_ = found(values, grid)
    assert 4 < range_.hi[0] < 20
    assert range_.lo[0] < -4


@BYTES
def test_what_a_relu_leaves_loses_little_against_the_least_error(grid: Grid) -> None:
    values = np.maximum(GAUSSIAN, 0)
    ours, least = (
        decibels(values, found(values, grid, method), grid)
        for method in (Entropy(), MinMSE())
    )
    assert ours - least < 3


@BYTES
@loop_over("scale", [1e-20, 1, 1e20])
@loop_over("values", [GAUSSIAN, np.abs(GAUSSIAN), -np.abs(GAUSSIAN), GAUSSIAN**3])
def test_the_threshold_lies_within_the_data(
    values: Values, scale: float, grid: Grid
) -> None:
    values = values * np.float32(scale)
    range_ = found(values, grid)
    assert (
        min(values.min(), 0)
        <= range_.lo[0]
        <= 0
        <= range_.hi[0]
        <= max(values.max(), 0)
    )
    assert range_.lo[0] < range_.hi[0]


@pytest.mark.parametrize(
    "grid",
    [Grid(-32768, 32767), Grid(0, 65535, symmetric=False)],
    ids=["int16", "uint16"],
)
def test_more_levels_than_bins_keep_everything(grid: Grid) -> None:
    range_ = found(GAUSSIAN, grid)
    assert (range_.lo[0], range_.hi[0]) == (GAUSSIAN.min(), GAUSSIAN.max())


def test_fewer_levels_cut_more() -> None:
    bounds = [
        found(GAUSSIAN, Grid(-(2**bits), 2**bits - 1)).hi[0] for bits in (3, 5, 7)
    ]
    assert bounds == sorted(bounds)


@BYTES
def test_values_at_the_bound_of_a_clip_count(grid: Grid) -> None:
    """6 is the edge of a bin, and nothing that occurs often may be cut."""
    values = np.minimum(NOISE.exponential(0.5, N), 6).astype(np.float32)
    values[: N // 2] = 6
    assert found(values, grid).hi[0] == 6


@BYTES
def test_a_few_values_are_kept(grid: Grid) -> None:
    """Constants and switches: nothing that occurs often may be cut."""
    values = np.repeat(np.float32([-1, 0, 4]), [100, 700, 200])
    assert found(values, grid).hi[0] == 4 and found(values, grid).lo[0] == -1
