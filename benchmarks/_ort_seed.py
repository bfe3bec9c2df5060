"""A pytest plugin: every test begins with the same random numbers, so that counts repeat.

The environment variable ORT_SEED has another seed than 0.
"""

from __future__ import annotations

import os
import random

import numpy as np


def pytest_runtest_setup() -> None:
    """Seed the generators that tests draw models and data from."""
    seed = int(os.environ.get("ORT_SEED", "0"))
    random.seed(seed)
    np.random.seed(seed)
