"""NonOverflow against trying all powers of two and all zero points."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from calibrators import Grid, NonOverflow, QParams, covered, params_for, rows

EXAMPLES = settings(deadline=None, derandomize=True)

Values = NDArray[np.float32]
GRIDS = [
    Grid(qmin, qmax, symmetric=symmetric, pow2=pow2)
    for qmin, qmax in ((-128, 127), (0, 255), (-127, 127), (-8, 7), (0, 15))
    for symmetric in (True, False)
    for pow2 in (True, False)
]


def scale_of(values: Values, grid: Grid) -> float:
    method = NonOverflow()
    statistic = method.statistic()
    statistic.observe(rows(values))
    return float(params_for(method.range(statistic, grid), grid).scale)


def clips(values: Values, exponent: int, grid: Grid) -> bool:
    """Whether the scale 2**exponent clips some of the values, whichever zero point goes with it."""
    zeros = (
        np.array([grid.zero]) if grid.symmetric else np.arange(grid.qmin, grid.qmax + 1)
    )
    reach = covered(
        QParams(np.full(zeros.shape, 2.0**exponent, np.float32), zeros, 0), grid
    )
    return not ((reach.lo <= min(values.min(), 0)) & (values.max() <= reach.hi)).any()


@given(
    st.sampled_from(GRIDS),
    arrays(np.float32, 5, elements=st.floats(-1e9, 1e9, width=32)),
)
@example(GRIDS[0], np.float32([-128, 127]))
@example(GRIDS[0], np.float32([-1, 1]))
@example(GRIDS[2], np.float32([-1e-30, 255]))
@EXAMPLES
def test_the_smallest_that_clips_nothing(grid: Grid, values: Values) -> None:
    if not values.any():
        return
    exponents = [
        exponent for exponent in range(-126, 40) if not clips(values, exponent, grid)
    ]
    assert scale_of(values, grid) == 2.0 ** min(exponents)
    assert exponents == list(
        range(min(exponents), 40)
    )  # one octave less clips, any more does not


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_free_scale_takes_the_same_power_of_two(grid: Grid) -> None:
    """Also where scales may be any number, the range found is that of a power of two."""
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    mantissa, _ = np.frexp(scale_of(values, grid))
    assert mantissa == 0.5


@pytest.mark.parametrize(
    ("ends", "scale"),
    [
        ((-1, 127 / 128), 1 / 128),
        ((-1, 1), 1 / 64),
        ((0, 127), 1),
        ((-128, 0), 1),
        ((-129, 0), 2),
    ],
)
def test_int8_by_hand(ends: tuple[float, float], scale: float) -> None:
    assert scale_of(np.float32(ends), Grid(-128, 127, pow2=True)) == scale
