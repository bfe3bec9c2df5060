"""Optimizers of layers start from the float weights that those before them aimed at."""

from __future__ import annotations

import numpy as np
import pytest

from quark_onnx.kernels.levels import Levels
from quark_onnx.optimizers import GPTQ, AdaQuant, AdaRound, BiasCorrection
from quark_onnx.optimizers.problem import RoundingProblem, SampledRows
from quark_onnx.patterns.activation import Activation


def problem() -> RoundingProblem:
    """A layer that reads each of six values twice, the second time with twice the size and much
    noise.
    """
    random = np.random.default_rng(1)
    weight, clean = random.normal(size=(1, 6, 12)), random.normal(size=(4000, 6))
    x = np.concatenate(
        [clean, 2 * clean + 2 * random.normal(size=clean.shape)], axis=1
    )[None]
    targets = np.concatenate([clean, 2 * clean], axis=1)[None] @ weight.swapaxes(1, 2)
    x, targets = x.astype(np.float32), targets.astype(np.float32)
    scale = np.full(weight.shape, 0.25, np.float32)
    lattice = Levels(
        scale,
        np.zeros(0, np.float32),
        np.full_like(scale, -128),
        np.full_like(scale, 127),
    )
    train, held = (
        SampledRows(x[:, :3000], targets[:, :3000]),
        SampledRows(x[:, 3000:], targets[:, 3000:]),
    )
    gram = (x[0, :3000].T @ x[0, :3000]).astype(np.float64)[None], 3000
    mean = np.zeros((1, 12))
    return RoundingProblem(
        "n",
        weight,
        np.zeros((1, 6)),
        lattice,
        True,
        Activation(),
        train,
        held,
        lambda: mean,
        lambda: gram,
    )


def oracle(layer: RoundingProblem) -> np.ndarray:
    """The weights of the least squares, without any rounding."""
    x, y = (
        layer.train.inputs[0].astype(np.float64),
        layer.train.targets[0].astype(np.float64),
    )
    return np.linalg.lstsq(x, y, rcond=None)[0].T[None]


@pytest.mark.parametrize(
    "optimizer",
    [AdaRound(iterations=100), AdaQuant(iterations=100)],
    ids=lambda o: o.name,
)
def test_one_goes_on_from_where_the_other_aimed(optimizer: AdaRound | AdaQuant) -> None:
    layer = problem()
    plain = layer.nearest()
    aimed = layer.allowed(GPTQ(asymmetric=True)(layer, plain))
    assert aimed.aim is not None
    distances = [
        np.abs(aim - oracle(layer)).mean() for aim in (layer.weight, aimed.aim)
    ]
    assert distances[1] < 0.3 * distances[0]
    alone, behind = (
        layer.allowed(optimizer(layer, present)) for present in (plain, aimed)
    )
    assert layer.loss(behind).mean() < 0.8 * layer.loss(alone).mean()
    np.testing.assert_array_equal(behind.aim, aimed.aim)


def test_what_is_chosen_keeps_its_aim_output_by_output() -> None:
    layer = problem()
    plain = layer.nearest()
    aimed = layer.allowed(BiasCorrection()(layer, GPTQ(asymmetric=True)(layer, plain)))
    better = np.arange(6)[None] % 2 == 0
    chosen = plain.chosen(aimed, better)
    assert chosen.aim is not None and aimed.aim is not None
    np.testing.assert_array_equal(chosen.aim[0, ::2], aimed.aim[0, ::2])
    np.testing.assert_array_equal(chosen.aim[0, 1::2], layer.weight[0, 1::2])
