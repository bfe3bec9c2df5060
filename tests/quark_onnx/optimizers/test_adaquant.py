"""AdaQuant: scales of outputs are chosen too where they may be, and what it stores is what it
learned.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import numpy_helper

from quark_onnx import (
    GPTQ,
    AdaQuant,
    AdaRound,
    BiasCorrection,
    QConfig,
    QuantizationSpec,
    quantize,
)
from quark_onnx.common.errors import ConfigError
from quark_onnx.kernels.levels import Levels
from quark_onnx.optimizers.problem import RoundingProblem, SampledRows, Solution
from quark_onnx.patterns.activation import Activation
from tests.quark_onnx.optimizers.networks import convolutional, images

CHANNELS = QConfig.of("A8W8").with_(
    weight=QuantizationSpec("int4", per_channel=True, calibrator="minmax")
)


def problem_of(*, scalable: bool) -> RoundingProblem:
    """A layer of which every weight row has one outlier, so that its scale is much too wide."""
    random = np.random.default_rng(3)
    weight = random.normal(size=(1, 4, 24))
    weight[:, :, 0] = 9
    x = random.normal(size=(1, 2000, 24)).astype(np.float32)
    x[:, :, 0] *= 0.01
    targets = (x @ weight[0].T).astype(np.float32)
    scale = np.full(weight.shape, 9 / 7, np.float32)
    least, greatest = (
        np.full(weight.shape, -8, np.float32),
        np.full(weight.shape, 7, np.float32),
    )
    lattice = Levels(scale, np.zeros(0, np.float32), least, greatest)
    train, held = (
        SampledRows(x[:, :1600], targets[:, :1600]),
        SampledRows(x[:, 1600:], targets[:, 1600:]),
    )
    mean, bias = x.mean(axis=1, dtype=np.float64), np.zeros((1, 4))
    gram = np.einsum("grk,grl->gkl", *[train.inputs.astype(np.float64)] * 2), len(train)
    return RoundingProblem(
        "n",
        weight,
        bias,
        lattice,
        True,
        Activation(),
        train,
        held,
        lambda: mean,
        lambda: gram,
        scalable=scalable,
    )


def test_scales_are_chosen_and_codes_are_whole() -> None:
    problem = problem_of(scalable=True)
    plain, free = (
        AdaQuant(iterations=100, scales=scales)(problem, problem.nearest())
        for scales in (False, True)
    )
    assert (free.factors < 1).any() and (plain.factors == 1).all()
    assert problem.loss(free).mean() < 0.8 * problem.loss(plain).mean()
    codes = free.weight.astype(np.float64) / (
        problem.lattice.scale * free.factors[..., None]
    )
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-4)
    assert codes.min() >= -8 and codes.max() <= 7


@pytest.mark.parametrize(
    "optimizer",
    [AdaQuant(iterations=20, scales=True), GPTQ(scales=True)],
    ids=lambda o: o.name,
)
def test_scales_that_are_shared_stay(optimizer: AdaQuant | GPTQ) -> None:
    problem = problem_of(scalable=False)
    assert optimizer(problem, problem.nearest()).factor is None


def test_gptq_chooses_scales_and_others_go_on_under_them() -> None:
    problem = problem_of(scalable=True)
    plain, free = (
        GPTQ(scales=scales)(problem, problem.nearest()) for scales in (False, True)
    )
    assert (free.factors < 1).all() and (plain.factors == 1).all()
    assert (problem.loss(free) < problem.loss(plain)).all()
    for optimizer in (AdaRound(iterations=20), AdaQuant(iterations=20), GPTQ()):
        after = optimizer(problem, free)
        np.testing.assert_array_equal(after.factors, free.factors)
        codes = after.weight.astype(np.float64) / (
            problem.lattice.scale * after.factors[..., None]
        )
        np.testing.assert_allclose(codes, np.rint(codes), atol=1e-4)
        assert codes.min() >= -8 and codes.max() <= 7


def test_a_correction_behind_it_keeps_the_scales() -> None:
    problem = problem_of(scalable=True)
    present = AdaQuant(iterations=50, scales=True)(problem, problem.nearest())
    after = problem.allowed(BiasCorrection()(problem, present))
    np.testing.assert_array_equal(after.factors, present.factors)
    better = np.array([[True, False, True, False]])
    chosen = problem.nearest().chosen(after, better)
    np.testing.assert_array_equal(chosen.factors, np.where(better, after.factors, 1))


@pytest.mark.parametrize(
    "name", ["adaquant:iterations=60,scales=true", "gptq:scales=true"]
)
def test_what_is_stored_is_what_was_learned(name: str) -> None:
    data, optimizers = images(16), (name, "bias_correction")
    plain, better = (
        quantize(convolutional(), data, CHANNELS.with_(optimizers=each))
        for each in ((), optimizers)
    )
    assert better.report.worst_sqnr > plain.report.worst_sqnr
    assert any(layer.changed[name.partition(":")[0]] for layer in better.report.layers)
    scales = [
        {
            i.name: numpy_helper.to_array(i)
            for i in result.model.graph.initializer
            if i.name.endswith("_scale")
        }
        for result in (plain, better)
    ]
    moved = [
        name
        for name in scales[0]
        if name in scales[1] and not np.array_equal(scales[0][name], scales[1][name])
    ]
    assert moved, "some scale of a weight has moved"
    again = quantize(convolutional(), data, CHANNELS.with_(optimizers=optimizers))
    assert again.model == better.model


def test_a_descent_keeps_the_best_of_its_stages() -> None:
    problem = problem_of(scalable=False)
    wild = AdaQuant(iterations=100, rate=0.3)(problem, problem.nearest())
    assert (problem.loss(wild) <= problem.loss(problem.nearest())).all()
    worse = replace(
        problem, held=SampledRows(problem.held.inputs, -problem.held.targets)
    )
    kept = AdaQuant(iterations=20)(worse, worse.nearest())
    assert (
        isinstance(kept, Solution)
        and (worse.loss(kept) <= worse.loss(worse.nearest())).all()
    )


def test_settings() -> None:
    with pytest.raises(
        ConfigError, match="scales of adaquant is 2; it must be true or false"
    ):
        AdaQuant(scales=2)  # type: ignore[arg-type]
