"""Statistics as plain values and back, and those that are read off others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from calibrators import (
    CalibrationError,
    Extremes,
    Grid,
    GroupedHistogram,
    Histogram,
    MeanExtremes,
    MovingExtremes,
    create,
)
from calibrators.derived import derived
from calibrators.stored import from_plain, to_plain

KINDS = [
    Extremes,
    MeanExtremes,
    Histogram,
    GroupedHistogram,
    lambda: MovingExtremes(0.1),
]
GRID = Grid(0, 255, symmetric=False)


def batches(rows: int) -> list[np.ndarray]:
    random = np.random.default_rng(rows)
    return [
        (random.normal(size=(rows, 500)) * 2.0 ** random.integers(-6, 6)).astype(
            np.float32
        )
        for _ in range(9)
    ]


def observed(statistic: Any, rows: int = 1) -> Any:
    for batch in batches(rows):
        statistic.observe(batch)
    return statistic


def same(one: Any, other: Any) -> bool:
    """Compare statistics by what is in them; arrays exactly."""
    return json.dumps(to_plain(one)) == json.dumps(to_plain(other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_they_come_back_as_they_were(kind: Any, rows: int) -> None:
    statistic = observed(kind(), rows) if rows else kind()
    again = from_plain(json.loads(json.dumps(to_plain(statistic))))
    assert type(again) is type(statistic) and same(again, statistic)
    if not rows:
        return
    for each in (again, statistic):  # and go on alike
        each.observe(batches(rows)[0] * np.float32(100))
    assert same(again, statistic)


@pytest.mark.parametrize(
    "name",
    [
        "minmax",
        "mean_minmax",
        "percentile",
        "layerwise_percentile",
        "minmse",
        "entropy",
        "nonoverflow",
        "best",
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_grouped_histogram_serves_every_calibrator(name: str, rows: int) -> None:
    """The range is that of a statistic which was measured itself."""
    calibrator = create(name)
    own = observed(calibrator.statistic(), rows)
    found = derived(observed(GroupedHistogram(), rows), calibrator.statistic())
    one, other = (calibrator.range(each, GRID) for each in (own, found))
    np.testing.assert_array_equal(one.lo, other.lo)
    np.testing.assert_array_equal(one.hi, other.hi)


def test_what_was_not_measured_cannot_be_read_off() -> None:
    extremes = observed(Extremes())
    for wanted in (
        MeanExtremes(),
        Histogram(),
        GroupedHistogram(),
        MovingExtremes(0.1),
    ):
        assert derived(extremes, wanted) is None
    moving = observed(MovingExtremes(0.1))
    assert derived(moving, MovingExtremes(0.1)) is moving
    assert derived(moving, MovingExtremes(0.2)) is derived(moving, Extremes()) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "none"},
        {"lo": None},
        {"lo": {"shape": [2], "dtype": "<f8", "data": ""}},
        {"hi": {"shape": [3], "dtype": "|O", "data": ""}},
        {"positive": {"shape": [1, 2], "dtype": "<i8", "data": "eJxjYIAAAAAQAAE="}},
        {"nonfinite": "many"},
        {"exponent": {"shape": [1], "dtype": "<i8", "data": "not base64"}},
        {"exponent": "a"},
        {"exponent": to_plain(Histogram(exponent=np.array([4000])))["exponent"]},
        {"lo": 1, "hi": 1},
        {"hi": to_plain(Extremes(hi=np.array([np.nan])))["hi"]},
        {"lo": to_plain(Extremes(lo=np.array([1e9])))["lo"]},
        {"positive": [0]},
        {"nonfinite": -1},
        {"nonfinite": True},
    ],
)
def test_what_is_damaged_is_an_error(damage: dict[str, Any]) -> None:
    plain = {**to_plain(observed(Histogram())), **damage}
    with pytest.raises(CalibrationError, match="a stored statistic: "):
        from_plain(plain)
    for nothing in (None, [], {}, "text"):
        with pytest.raises(CalibrationError, match="a stored statistic: "):
            from_plain(nothing)
