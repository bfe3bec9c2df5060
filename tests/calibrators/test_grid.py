"""Codes, intervals and scales as values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from calibrators import Grid, QParams, Range


@pytest.mark.parametrize(
    ("qmin", "qmax", "zero", "levels"),
    [
        (-128, 127, 0, 255),
        (-127, 127, 0, 254),
        (0, 255, 128, 255),
        (-32768, 32767, 0, 65535),
        (0, 65535, 32768, 65535),
        (-8, 7, 0, 15),
        (0, 15, 8, 15),
    ],
)
def test_the_middle_of_a_grid(qmin: int, qmax: int, zero: int, levels: int) -> None:
    grid = Grid(qmin, qmax)
    assert (grid.zero, grid.levels) == (zero, levels)


def test_a_range_always_contains_zero() -> None:
    range_ = Range(np.array([1.0, -2.0, -5.0]), np.array([3.0, -1.0, 7.0]))
    assert range_.lo.tolist() == [0, -2, -5]
    assert range_.hi.tolist() == [3, 0, 7]


def test_one_number_is_a_range_of_one_row() -> None:
    range_ = Range(-1, 2)  # type: ignore[arg-type]
    assert range_.lo.shape == range_.hi.shape == (1,)
    assert range_.lo.dtype == np.float64


def test_values_are_frozen() -> None:
    params = QParams(np.float32([1, 2]), np.int64([3, 4]), axis=1)
    for value, field in ((Grid(0, 1), "qmin"), (Range(0, 1), "lo"), (params, "axis")):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, 0)


def test_another_scale_leaves_the_old_one_as_it_is() -> None:
    old = QParams(np.float32([1, 2]), np.int64([3, 4]), axis=1)
    new = old.with_scale(np.array([5.0, 6.0]))  # type: ignore[arg-type]
    assert new.scale.tolist() == [5, 6] and new.scale.dtype == np.float32
    assert old.scale.tolist() == [1, 2]
    assert new.zero_point is old.zero_point and new.axis == 1
