"""Half-quadratic quantization: never worse than rounding to nearest, better by a known margin,
runnable.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quark_onnx.common.errors import ConfigError
from quark_onnx.kernels.hqq import HalfQuadratic, half_quadratic, shrink
from quark_onnx.kernels.nbits import NBitsWeight, round_to_nearest
from quark_onnx.kernels.packing import BITS
from tests.nbits import block_errors, dequantized, quantized, zero_points


def weights(k: int = 200, n: int = 48) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    draws = {
        "normal": rng.normal(size=(k, n)) * 0.02,
        "heavy": rng.standard_t(3, size=(k, n)),
        "positive": rng.exponential(size=(k, n)),
    }
    return {name: draw.astype(np.float32) for name, draw in draws.items()}


def nearest(w: NDArray[np.float32], bits: int, block_size: int) -> NBitsWeight:
    return quantized(
        w,
        bits,
        block_size,
        lambda blocks: round_to_nearest(blocks, bits, symmetric=False),
    )


def solved(
    w: NDArray[np.float32],
    bits: int,
    block_size: int,
    settings: HalfQuadratic | None = None,
) -> NBitsWeight:
    return quantized(
        w, bits, block_size, lambda blocks: half_quadratic(blocks, bits, settings)
    )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_no_block_is_worse_than_rounded_to_nearest(bits: int, block_size: int) -> None:
    for w in weights(256).values():
        before = block_errors(w, nearest(w, bits, block_size))
        after = block_errors(w, solved(w, bits, block_size))
        assert (after <= before * (1 + 1e-4)).all()
        assert after.sum() < before.sum() * (0.98 if bits < 8 else 0.99)


@pytest.mark.parametrize(("bits", "gain"), [(2, 0.94), (4, 0.98)])
def test_the_error_of_normal_weights_falls_by_what_was_measured(
    bits: int, gain: float
) -> None:
    w = weights(512, 128)["normal"]
    before = block_errors(w, nearest(w, bits, 32)).sum()
    after = block_errors(w, solved(w, bits, 32)).sum()
    assert np.sqrt(after / before) < gain


@pytest.mark.parametrize("bits", BITS)
def test_unusual_columns(bits: int) -> None:
    w = weights(48, 6)["normal"]
    w[:, 1], w[:, 2] = 0, 2.5
    w[:, 3] *= np.float32(1e-36)
    w[:, 4] /= np.abs(w[:, 4]).max()
    w[:, 4] *= np.finfo(np.float32).max
    w[:, 5] = np.where(w[:, 5] > 0, 1, -1) * np.finfo(np.float32).max
    weight = solved(w, bits, 16)
    real = dequantized(weight)
    assert np.isfinite(real.astype(np.float32)).all()
    assert np.isfinite(weight.scales).all()
    assert (np.abs(weight.scales) >= np.finfo(np.float32).tiny).all()
    np.testing.assert_allclose(real[:, 1], 0, atol=1e-30)
    np.testing.assert_allclose(real[:, 2], 2.5, rtol=1e-5)
    assert (
        block_errors(w, weight)
        <= block_errors(w, nearest(w, bits, 16)) * (1 + 1e-4) + 1e-80
    ).all()


def test_no_iteration_is_rounding_to_nearest() -> None:
    w = weights(224)["heavy"]
    none = solved(w, 4, 32, HalfQuadratic(iterations=0))
    rounded = nearest(w, 4, 32)
    np.testing.assert_array_equal(none.scales, rounded.scales)
    np.testing.assert_array_equal(zero_points(none), zero_points(rounded))


def test_the_units_of_the_weight_do_not_matter() -> None:
    w = weights(224)["normal"]
    a, b = solved(w, 4, 32), solved(w * np.float32(2.0**20), 4, 32)
    np.testing.assert_array_equal(a.packed, b.packed)
    np.testing.assert_array_equal(a.scales * np.float32(2.0**20), b.scales)


def test_the_shrinkage_is_the_proximal_step_of_the_norm() -> None:
    """At p = 1 it is the soft threshold; zero stays zero."""
    error = np.linspace(-0.5, 0.5, 21).astype(np.float32)
    soft = np.sign(error) * np.maximum(np.abs(error) - 0.1, 0)
    np.testing.assert_allclose(shrink(error, 10.0, 1.0), soft, atol=1e-7)
    shrunk = shrink(error, 10.0, 0.7)
    with np.errstate(divide="ignore"):
        expected = np.sign(error) * np.maximum(
            np.abs(error) - np.abs(error) ** -0.3 / 10, 0
        )
    np.testing.assert_allclose(shrunk, expected, atol=1e-6)


def test_refusals() -> None:
    for name, value in {"p": 0.0, "beta": 0.0, "kappa": 0.5, "iterations": -1}.items():
        with pytest.raises(ConfigError, match=name):
            HalfQuadratic(**{name: value})  # type: ignore[arg-type]
