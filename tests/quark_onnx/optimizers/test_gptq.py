"""GPTQ on few samples: what it takes from their inputs is judged by others."""

from __future__ import annotations

import numpy as np
import pytest

from quark_onnx.kernels.levels import Levels
from quark_onnx.optimizers import GPTQ
from quark_onnx.optimizers.problem import Doubles, RoundingProblem, SampledRows
from quark_onnx.patterns.activation import Activation

SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)


def layer(rows: int) -> tuple[RoundingProblem, Doubles]:
    """A layer of 40 inputs that are alike, learned from some rows.

    And the true mean of products of two inputs.
    """
    random = np.random.default_rng(3)
    weight = random.normal(size=(1, 8, 40))
    mixing = 0.15 * random.normal(size=(40, 40)) + np.eye(40)
    x = (random.normal(size=(1, rows + 400, 40)) @ mixing).astype(np.float32)
    targets = x @ weight.swapaxes(1, 2).astype(np.float32)
    scale = np.full(weight.shape, 0.4, np.float32)
    lattice = Levels(
        scale, np.zeros(0, np.float32), np.full_like(scale, -8), np.full_like(scale, 7)
    )
    train, held = (
        SampledRows(x[:, :rows], targets[:, :rows]),
        SampledRows(x[:, rows:], targets[:, rows:]),
    )
    gram = (x[:, :rows].swapaxes(1, 2) @ x[:, :rows]).astype(np.float64), rows
    nothing = np.zeros((1, 8))
    found = RoundingProblem(
        "n",
        weight,
        nothing,
        lattice,
        True,
        Activation(),
        train,
        held,
        lambda: nothing,
        lambda: gram,
    )
    return found, mixing.T @ mixing


@pytest.mark.parametrize("rows", [12, 30, 2000])
def test_the_damping_is_the_one_that_serves_the_rows_held_out(rows: int) -> None:
    problem, _ = layer(rows)
    chosen, *fixed = (
        problem.loss(GPTQ(damping=damping)(problem, problem.nearest())).mean()
        for damping in ("auto", *SHARES)
    )
    assert chosen == min(fixed)


def test_less_is_learned_from_few_rows() -> None:
    problem, products = layer(12)

    def truth(damping: float | str) -> float:
        """The error that all rows there could be have on average."""
        off = GPTQ(damping=damping)(problem, problem.nearest()).weight - problem.weight
        return float(((off @ products) * off).sum())

    assert truth("auto") < 0.9 * truth(0.01)
