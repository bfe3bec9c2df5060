"""Calibrators by name."""

from __future__ import annotations

import pytest

from calibrators.base import create
from calibrators.errors import CalibrationError


def test_a_setting_may_have_any_name() -> None:
    with pytest.raises(
        CalibrationError,
        match="calibrator 'percentile' has no setting 'name'; known: percentile",
    ):
        create("percentile", name=3)
