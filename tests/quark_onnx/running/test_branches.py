"""The branches of an If that no sample takes are named where the condition may change."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx.running.branches import Branches
from tests.models import parse


def model_of(inputs: str, condition: str) -> ModelProto:
    """A model with one If, and the lines that compute its condition."""
    return parse(
        f"""g ({inputs}) => (y) {{
            {condition}
            [choice] y = If (c) <
                then_branch = t () => (float[N] p) {{ p = Relu (x) }},
                else_branch = e () => (float[N] q) {{ q = Neg (x) }}
            >
        }}"""
    )


FOUR = "s = Shape (x) n = Size (x) k = Constant <value = int64 {4}> ()"


@pytest.mark.parametrize(
    ("inputs", "condition", "is_named"),
    [
        ("float[4] x, bool c", "", True),
        ("float[4] x", "z = ReduceSum <keepdims = 0> (x) c = Cast <to = 9> (z)", True),
        ("float[N] x", f"{FOUR} c = Equal (n, k)", True),
        # The size of this input is fixed, whatever its values are.
        ("float[4] x", f"{FOUR} c = Equal (n, k)", False),
        ("float[4] x", "c = Constant <value = bool {1}> ()", False),
        ("float[4] x", "a = Constant <value = bool {1}> () c = Not (a)", False),
        # Another number each time the model runs.
        (
            "float[4] x",
            "r = RandomUniform <shape = [1]> () c = Cast <to = 9> (r)",
            True,
        ),
    ],
)
def test_a_condition_that_cannot_change_leaves_nothing_unseen(
    inputs: str, condition: str, is_named: bool
) -> None:
    branches = Branches(model_of(inputs, condition))
    feeds = {"x": np.ones(4, np.float32), "c": np.array(True)}
    branches.add(feeds)
    assert bool(branches.unseen) == is_named
    assert all("'choice'" in name for name in branches.unseen)
