"""A pytest plugin: every test begins with the same random numbers, so that counts repeat."""

from __future__ import annotations

import random

import numpy as np


def pytest_runtest_setup() -> None:
    """Seed the generators that tests draw models and data from."""
    random.seed(0)
    np.random.seed(0)
