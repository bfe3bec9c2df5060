"""Calibrators by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from calibrators import Extremes, Grid, Range
from calibrators.base import CALIBRATORS, create, range_of, register
from calibrators.errors import CalibrationError


def test_a_setting_may_have_any_name() -> None:
    with pytest.raises(
        CalibrationError,
        match="calibrator 'percentile' has no setting 'name'; known: percentile",
    ):
        create("percentile", name=3)


# Calibrators of someone else


@dataclass(frozen=True)
class Reaching:
    """A calibrator with a fixed result."""

    result: Any

    def statistic(self) -> Extremes:
        return Extremes()

    def range(self, statistic: Extremes, grid: Grid) -> Any:
        if isinstance(self.result, str):
            return getattr(statistic, self.result)
        return self.result


NAN, INFINITE = (Range(np.array([0.0]), np.array([end])) for end in (np.nan, np.inf))


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("low", "fails: AttributeError: 'Extremes' object has no attribute 'low'"),
        ((0.0, 1.0), "returned a tuple; .* must return a Range"),
        (NAN, "returned a range that is not finite: .*nan"),
        (INFINITE, "returned a range that is not finite: .*inf"),
    ],
    ids=["error", "tuple", "nan", "infinity"],
)
def test_a_mistake_of_a_calibrator_is_its_own(result: Any, told: str) -> None:
    where = f"{__name__}.Reaching"
    with pytest.raises(CalibrationError, match=rf"calibrator {where} {told}"):
        range_of(Reaching(result), Extremes(), Grid(0, 255))


def test_what_is_no_calibrator_is_not_registered() -> None:
    class Bare:
        def statistic(self) -> Extremes:
            return Extremes()

    with pytest.raises(
        CalibrationError, match=r"Bare is no calibrator: it lacks range\(\)"
    ):
        register("bare")(Bare)
    Bare.range = None  # type: ignore[attr-defined]
    with pytest.raises(CalibrationError, match="lacks @dataclass"):
        register("bare")(Bare)
    assert "bare" not in CALIBRATORS
