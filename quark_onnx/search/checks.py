"""Checks of the settings that several analyses share."""

from __future__ import annotations

from math import inf
from numbers import Integral
from typing import Any

from calibrators.base import is_number
from quark_onnx.config.checks import require


def check_limit(limit: Any) -> None:
    """Check the greatest number of samples.

    Args:
        limit: the number; None for all samples.

    Raises:
        ConfigError: the limit is no whole number of at least 1.
    """
    require(
        limit is None or (is_number(limit, Integral) and limit > 0),
        "limit",
        limit,
        "a whole number of at least 1",
    )


def check_budget(budget: Any) -> None:
    """Check a time limit.

    Args:
        budget: the time in seconds; None for no limit.

    Raises:
        ConfigError: the budget is no number of seconds above 0.
    """
    require(
        # NaN compares false with both ends, so the chain rejects NaN too.
        budget is None or (is_number(budget) and 0 < budget < inf),
        "budget",
        budget,
        "a number of seconds above 0",
    )
