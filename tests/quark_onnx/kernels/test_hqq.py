"""Half-quadratic quantization: never worse than rounding to nearest, better by a known margin,
runnable.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.kernels.hqq import HalfQuadratic, quantize_hqq, shrink
from quark_onnx.kernels.nbits import (
    NBitsWeight,
    dequantize_nbits,
    quantize_nbits,
    zero_points_of,
)

KINDS = [(2, False), (4, False), (8, False), (2, True), (4, True)]


def weights(k: int = 200, n: int = 48) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    draws = {
        "normal": rng.normal(size=(k, n)) * 0.02,
        "heavy": rng.standard_t(3, size=(k, n)),
        "positive": rng.exponential(size=(k, n)),
    }
    return {name: draw.astype(np.float32) for name, draw in draws.items()}


def block_errors(w: NDArray[np.float32], weight: NBitsWeight) -> NDArray[np.float64]:
    difference = np.square(w.astype(np.float64) - dequantize_nbits(weight)).T
    return np.add.reduceat(
        difference, np.arange(0, w.shape[0], weight.block_size), axis=1
    )


@pytest.mark.parametrize(("bits", "floating"), KINDS)
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_no_block_is_worse_than_rounded_to_nearest(
    bits: int, floating: bool, block_size: int
) -> None:
    for w in weights().values():
        nearest = block_errors(w, quantize_nbits(w, bits, block_size, symmetric=False))
        solved = block_errors(
            w, quantize_hqq(w, bits, block_size, float_zero_points=floating)
        )
        assert (solved <= nearest * (1 + 1e-4)).all()
        assert solved.sum() < nearest.sum() * (0.98 if floating or bits < 8 else 0.99)


@pytest.mark.parametrize(
    ("bits", "floating", "gain"),
    [(2, False, 0.94), (4, False, 0.98), (2, True, 0.90), (4, True, 0.93)],
)
def test_the_error_of_normal_weights_falls_by_what_was_measured(
    bits: int, floating: bool, gain: float
) -> None:
    w = weights(512, 128)["normal"]
    nearest = block_errors(w, quantize_nbits(w, bits, 32, symmetric=False)).sum()
    solved = block_errors(
        w, quantize_hqq(w, bits, 32, float_zero_points=floating)
    ).sum()
    assert np.sqrt(solved / nearest) < gain


@pytest.mark.parametrize("bits", [2, 4])
def test_a_zero_point_between_the_codes_is_found(bits: int) -> None:
    """Codes that straddle zero evenly have no integer zero point; a float one makes them exact."""
    rng = np.random.default_rng(0)
    w = (rng.integers(0, 2**bits, (64, 10)) - (2**bits - 1) / 2).astype(np.float32)
    w[::32], w[1::32] = w.min(), w.max()
    weight = quantize_hqq(w, bits, 32, float_zero_points=True)
    np.testing.assert_allclose(dequantize_nbits(weight), w, atol=1e-3)
    np.testing.assert_allclose(zero_points_of(weight), (2**bits - 1) / 2, atol=1e-3)


def test_padding_is_no_part_of_the_weight() -> None:
    w = weights(70, 6)["positive"] + 1
    whole, rest = (
        quantize_hqq(w, 4, 64, float_zero_points=True),
        quantize_hqq(w[64:], 4, 64, float_zero_points=True),
    )
    assert whole.packed.shape == (6, 2, 32)
    np.testing.assert_array_equal(dequantize_nbits(whole)[64:], dequantize_nbits(rest))
    # six values of one sign: without the zeros of the padding, a line through them
    long = quantize_hqq(np.repeat(w[64:], 8, axis=0), 4, 64, float_zero_points=True)
    assert (
        block_errors(w[64:], rest).sum()
        <= block_errors(np.repeat(w[64:], 8, axis=0), long).sum() / 8 * 1.01
    )


@pytest.mark.parametrize(("bits", "floating"), KINDS)
def test_unusual_columns(bits: int, floating: bool) -> None:
    w = weights(40, 6)["normal"]
    w[:, 1], w[:, 2] = 0, 2.5
    w[:, 3] *= np.float32(1e-36)
    w[:, 4] /= np.abs(w[:, 4]).max()
    w[:, 4] *= np.finfo(np.float32).max
    w[:, 5] = np.where(w[:, 5] > 0, 1, -1) * np.finfo(np.float32).max
    weight = quantize_hqq(w, bits, 16, float_zero_points=floating)
    real = dequantize_nbits(weight)
    assert (
        np.isfinite(real).all()
        and np.isfinite(weight.scales).all()
        and np.isfinite(zero_points_of(weight)).all()
    )
    assert (np.abs(weight.scales) >= np.finfo(np.float32).tiny).all()
    np.testing.assert_allclose(real[:, 1], 0, atol=1e-30)
    np.testing.assert_allclose(real[:, 2], 2.5, rtol=1e-5)
    nearest = quantize_nbits(w, bits, 16, symmetric=False)
    assert (
        block_errors(w, weight) <= block_errors(w, nearest) * (1 + 1e-4) + 1e-80
    ).all()


def test_no_iteration_is_rounding_to_nearest() -> None:
    w = weights()["heavy"]
    none = quantize_hqq(w, 4, 32, settings=HalfQuadratic(iterations=0))
    nearest = quantize_nbits(w, 4, 32, symmetric=False)
    np.testing.assert_array_equal(none.scales, nearest.scales)
    np.testing.assert_array_equal(zero_points_of(none), zero_points_of(nearest))


def test_the_units_of_the_weight_do_not_matter() -> None:
    w = weights()["normal"]
    a, b = quantize_hqq(w), quantize_hqq(w * np.float32(2.0**20))
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


def test_memory_is_bounded() -> None:
    w = np.zeros((1024, 8192), np.float32)
    w[::3] = 1
    tracemalloc.start()
    quantize_hqq(w, 4, 128, settings=HalfQuadratic(iterations=1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < w.nbytes


def test_refusals() -> None:
    w = weights(20, 3)["normal"]
    with pytest.raises(ConfigError, match="onnxruntime"):
        quantize_hqq(w, 8, float_zero_points=True)
    with pytest.raises(ConfigError, match="bits is 3"):
        quantize_hqq(w, 3)
    w[3, 1] = np.nan
    with pytest.raises(ModelError, match=r"holds nan at \[3, 1\]"):
        quantize_hqq(w)
    for name, value in {"p": 0.0, "beta": 0.0, "kappa": 0.5, "iterations": -1}.items():
        with pytest.raises(ConfigError, match=name):
            HalfQuadratic(**{name: value})  # type: ignore[arg-type]
