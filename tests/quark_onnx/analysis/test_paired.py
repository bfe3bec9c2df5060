"""A gain over a good model is more than chance, by the samples that judge."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto
from onnxruntime import InferenceSession

from quark_onnx.analysis.paired import Paired, is_clear_gain
from tests.models import normal, parse, weight

Sample = dict[str, np.ndarray]


def signal(noise: float = 0.0) -> ModelProto:
    """Two layers, with noise on the weights of the last one."""
    return parse(
        """g (float[N, 6] x) => (float[N, 4] y) {
            h = MatMul (x, a)
            r = Relu (h)
            y = MatMul (r, b)
        }""",
        a=weight(6, 8),
        b=weight(8, 4, seed=1) + noise * weight(8, 4, seed=2),
    )


def classes(noise: float = 0.0) -> ModelProto:
    """A classifier, with noise on the weights of its last layer."""
    return parse(
        """g (float[N, 6] x) => (float[N, 4] y) {
            h = MatMul (x, a)
            r = Relu (h)
            z = MatMul (r, b)
            y = Softmax (z)
        }""",
        a=weight(6, 8),
        b=weight(8, 4, seed=1) + noise * weight(8, 4, seed=2),
    )


def outputs(model: ModelProto, data: list[Sample]) -> np.ndarray:
    session = InferenceSession(model.SerializeToString())
    return np.concatenate([session.run(None, sample)[0] for sample in data])


def samples(count: int) -> list[Sample]:
    return [{"x": normal(1, 6, seed=seed)} for seed in range(count)]


def tail(statistic: float, freedom: int) -> float:
    """How often Student's t is beyond a value on either side: with t = sqrt(freedom) tan(angle),
    the density is a power of the cosine.
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    beyond = angles >= np.arctan(statistic / freedom**0.5)
    return float(density[beyond].sum() / density.sum())


@pytest.mark.parametrize("count", range(2, 11))
def test_the_interval_is_that_of_students_t(count: int) -> None:
    """The least clear gain has a probability of one percent by chance."""
    spread = normal(count).astype(np.float64)
    spread = (spread - spread.mean()) / spread.std(ddof=1) * count**0.5
    unclear, clear = 2.0, 80.0
    assert is_clear_gain(spread + clear) and not is_clear_gain(spread + unclear)
    for _ in range(40):
        middle = (unclear + clear) / 2
        if is_clear_gain(spread + middle):
            clear = middle
        else:
            unclear = middle
    assert tail(clear, count - 1) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(
    ("differences", "clear"),
    [
        ([0.0] * 10, False),
        ([0.5] * 10, True),
        ([1.0] + [0.0] * 9, False),  # one more of the samples agrees
        ([-0.5] * 10, False),
        ([0.5], False),  # a single sample has no interval
        ([0.5, np.nan, 0.5], False),
    ],
)
def test_differences(differences: list[float], clear: bool) -> None:
    assert is_clear_gain(np.array(differences)) == clear


def test_pseudo_values_of_a_mean_are_the_groups_means() -> None:
    """The share of equal classes is a mean over samples, so that the jackknife is exact."""
    held_out = samples(40)
    other = classes(0.5)
    expected, found = (outputs(model, held_out) for model in (classes(), other))
    equal = (expected.argmax(axis=1) == found.argmax(axis=1)).astype(float)
    assert 0 < equal.mean() < 1
    values = Paired(classes(), other, held_out, "classifier").pseudo_values(other)
    # Every tenth sample is of the same group.
    assert values == pytest.approx(equal.reshape(4, 10).mean(axis=0))


def test_decibels_decide_where_the_task_has_no_figure() -> None:
    held_out = samples(20)
    fine, coarse = signal(1e-3), signal(1e-2)
    assert Paired(signal(), coarse, held_out, "signal").is_clear_gain(fine)
    assert not Paired(signal(), fine, held_out, "signal").is_clear_gain(coarse)
    assert not Paired(signal(), fine, held_out, "signal").is_clear_gain(fine)


def test_an_exact_model_is_a_gain_in_decibels() -> None:
    """Its SQNR is infinite."""
    paired = Paired(signal(), signal(1e-3), samples(20), "signal")
    assert paired.is_clear_gain(signal())


def test_classes_that_agree_already_cannot_gain() -> None:
    """Although the probabilities are much nearer to those of the float model."""
    held_out = samples(20)
    fine, coarse = classes(1e-4), classes(1e-2)
    assert not Paired(classes(), coarse, held_out, "classifier").is_clear_gain(fine)
    assert Paired(classes(), coarse, held_out, "signal").is_clear_gain(fine)


def test_classes_that_agree_again_are_a_gain() -> None:
    held_out = samples(60)
    fine, coarse = classes(1e-3), classes(2.0)
    assert Paired(classes(), coarse, held_out, "classifier").is_clear_gain(fine)
    assert not Paired(classes(), fine, held_out, "classifier").is_clear_gain(coarse)
