"""The model of rounding's noise: its gradient, its convexity, what it says of real rounding, and
its least value.
"""

from __future__ import annotations

import numpy as np
import pytest

from quark_onnx.kernels.noise import Rounding, Spread, Term, minimize_noise

ROUNDINGS = [
    Rounding(),
    Rounding(254, False, 255, False),
    Rounding(15, True, 255, True),
    Rounding(255, False, 255, True),
    Rounding(254, False, 0),
    Rounding(0, False, 65535, True),
]
CHANNELS = 6


def spread(random: np.random.Generator, size: int, **where: bool) -> Spread:
    low, high, matter = random.lognormal(0, 1, (3, size))
    return Spread(low * (random.random(size) < 0.5), high, matter, **where)


def chain(seed: int = 0) -> list[Term]:
    """Two layers with six channels between them, in two groups for the second.

    Its third channel is dead before it.
    """
    random = np.random.default_rng(seed)
    own, none = np.arange(1, CHANNELS + 1), np.zeros
    first = Term(
        source=none(4, np.intp),
        target=own,
        peak=random.lognormal(0, 2, (1, CHANNELS, 4)),
        energy=random.lognormal(0, 1, (1, 4)),
        matter=random.lognormal(0, 1, (1, CHANNELS)),
        spreads=(
            spread(random, 4),
            spread(random, CHANNELS, outputs=True),
            spread(random, CHANNELS, outputs=True, inverse=True),
        ),
    )
    peak = random.lognormal(0, 2, (2, 5, CHANNELS // 2))
    peak[0, :, 2] = 0
    second = Term(
        own,
        none(10, np.intp),
        peak,
        random.lognormal(0, 1, (2, 3)),
        np.ones((2, 5)),
        (spread(random, 6),),
    )
    return [first, second]


def total(
    terms: list[Term], logarithm: np.ndarray, rounding: Rounding
) -> tuple[float, np.ndarray]:
    gradient = np.zeros(logarithm.size)
    return sum(term.noise(logarithm, gradient, rounding) for term in terms), gradient


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_the_gradient_is_that_of_finite_differences(rounding: Rounding) -> None:
    terms, here = chain(), np.random.default_rng(1).normal(size=CHANNELS + 1)
    _, gradient = total(terms, here, rounding)
    for place in range(here.size):
        step = np.eye(here.size)[place] * 1e-5
        slope = (
            total(terms, here + step, rounding)[0]
            - total(terms, here - step, rounding)[0]
        ) / 2e-5
        np.testing.assert_allclose(gradient[place], slope, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_it_is_convex(rounding: Rounding) -> None:
    random, terms = np.random.default_rng(2), chain(2)
    for _ in range(50):
        one, other = random.normal(0, 2, (2, CHANNELS + 1))
        ends = total(terms, one, rounding)[0] + total(terms, other, rounding)[0]
        assert total(terms, (one + other) / 2, rounding)[0] <= ends / 2 * (1 + 1e-12)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_no_other_factors_have_less_noise(rounding: Rounding) -> None:
    terms, fixed = chain(3), np.arange(CHANNELS + 1) % 7 == 0
    fixed[4] = True
    best, before, after = minimize_noise(terms, fixed, rounding)
    assert best[0] == best[4] == 0.0
    assert (
        before == total(terms, np.zeros(CHANNELS + 1), rounding)[0]
        and after == total(terms, best, rounding)[0]
    )
    assert after < before
    random = np.random.default_rng(4)
    for size in (0.01, 0.1, 1.0):
        for _ in range(100):
            other = best + size * random.normal(size=best.size) * ~fixed
            assert total(terms, other, rounding)[0] > after * (1 - 1e-4)


@pytest.mark.parametrize("per_channel", [False, True])
def test_it_tells_the_noise_of_real_rounding(per_channel: bool) -> None:
    random = np.random.default_rng(5)
    weight, scale = random.normal(size=(64, 32)), 10.0 ** random.uniform(-1, 1, 32)
    x = random.normal(size=(5000, 32)) * scale
    step = 2 * np.abs(weight).max(axis=1 if per_channel else None, keepdims=True) / 254
    low, high = x.min(), x.max()
    width = (high - low) / 255
    rounded_weight, rounded_x = (
        np.rint(weight / step) * step,
        np.rint((x - low) / width) * width + low,
    )
    weights = np.square(x @ (rounded_weight - weight).T).mean(axis=0).sum()
    activations = np.square((rounded_x - x) @ weight.T).mean(axis=0).sum()
    spreads = (Spread(-x.min(axis=0), x.max(axis=0), np.square(weight).sum(axis=0)),)
    energy, none = np.square(x).mean(axis=0)[None], np.zeros
    term = Term(
        none(32, np.intp),
        none(64, np.intp),
        np.abs(weight)[None],
        energy,
        np.ones((1, 64)),
        spreads,
    )
    for real, rounding in (
        (weights, Rounding(254, per_channel, 0)),
        (activations, Rounding(0, per_channel, 255)),
    ):
        modelled = term.noise(none(1), none(1), rounding)
        assert (
            0.8 * real < modelled < 1.8 * real
        )  # a p-norm is a little more than the maximum


def test_factors_even_out_what_shares_a_scale() -> None:
    """Of one layer's input alone, as a weight that stays float loses nothing by any factor."""
    high = np.array([1.0, 10.0, 100.0])
    term = Term(
        np.arange(1, 4), np.zeros(2, np.intp), np.ones((1, 2, 3)), np.ones((1, 3)), np.ones((1, 2)),
        (Spread(np.zeros(3), high, np.ones(3)),),
    )  # fmt: skip
    best, before, after = minimize_noise(
        [term], np.arange(4) == 0, Rounding(0, True, 255)
    )
    found = 0.75 * np.log(
        high
    )  # where the slope is nothing: (high / factor)^6 goes as factor^2

    def noise(logarithm: np.ndarray) -> float:
        return float(
            ((high * np.exp(-logarithm)) ** 6).sum() ** (1 / 3)
            * np.exp(2 * logarithm).sum()
        )

    np.testing.assert_allclose(
        after / before, noise(found) / noise(np.zeros(3)), rtol=1e-6
    )
    np.testing.assert_allclose(np.diff(best[1:]), np.diff(found), rtol=1e-3)


def test_channels_that_matter_less_keep_room_for_data_that_was_not_seen() -> None:
    """With Frechet extremes of index 6 the least noise has reaches that go as the eighth root of
    what channels matter: where nothing kept them apart, all would reach equally far, and any of
    them could be clipped.
    """
    matter = np.float64([1.0, 1e-2, 1e-4])
    found = Spread(np.zeros(3), np.ones(3), matter)
    best = -np.log(matter ** (1 / 8))
    noise, gradient = found.noise(best, Rounding())
    np.testing.assert_allclose(gradient, 0, atol=1e-6 * noise)
    assert np.exp(-best).min() < 0.4 and noise < found.noise(np.zeros(3), Rounding())[0]
