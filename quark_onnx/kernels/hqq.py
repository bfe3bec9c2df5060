"""Half-Quadratic Quantization: zero points that minimize a robust norm of the error.

Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models". No data is
needed. The lp norm of the error, p < 1, is split by an auxiliary error W_e, and two steps
alternate: W_e is the error shrunk by the generalized soft threshold
``e * max(1 - |e|^(p-2) / beta, 0)``; the zero point of a block is the mean of
``code - (W - W_e) / scale``. Each time, beta grows by kappa.

Four deviations from the paper:

- Errors are measured in steps of the scale, not in units of W, so that beta does not depend on the
  magnitude of the weights. (In units of W, beta = 10 shrinks all errors of weights about 0.02 to
  nothing, which is least squares.)
- The scale is fitted as well, by least squares to ``W - W_e`` under the present codes. Integer zero
  points need this: the paper's steps move them by less than half, and rounding reverts that: the
  error equalled that of RTN to four digits on every matrix tried.
- The start is the better of the two RTN variants in :mod:`quark_onnx.kernels.nbits`.
- Of all iterations, including the start, a block takes the one with the least squared error: for
  uncorrelated inputs the squared error of the outputs is proportional to it. The lp norm only moves
  zero points out of the minima of least squares. So no block is worse than under RTN.

Relative error sqrt(sum (W - W')^2 / sum W^2) on the weights of a sentence encoder (MiniLM-L6), in
%:

    bits, block                      2, 32   2, 128   4, 32   4, 128   8, 32   8, 128
    rounding to nearest              35.8    43.8     7.90    10.28    0.463   0.609
    half-quadratic                   33.0    36.8     7.68     9.92    0.448   0.599
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibrators.grid import QParams
from quark_onnx.common.errors import ConfigError
from quark_onnx.kernels.nbits import Float32, round_to_nearest

_F32 = np.finfo(np.float32)


@dataclass(frozen=True)
class HalfQuadratic:
    """Settings of the minimization, with the defaults of the authors' program.

    Attributes:
        p: the norm, above 0 and at most 1.
        beta: weight of the split in the first iteration: errors (in steps) below about 1 / beta
            count as none.
        kappa: factor by which beta grows.
        iterations: number of solutions for zero point and scale; 0 is RTN.

    >>> HalfQuadratic(p=2.0)
    Traceback (most recent call last):
    quark_onnx.common.errors.ConfigError: HalfQuadratic: p is 2.0; it must be above 0 and at most 1
    """

    p: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01
    iterations: int = 20

    def __post_init__(self) -> None:
        for name, good, rule in (
            ("p", 0 < self.p <= 1, "above 0 and at most 1"),
            ("beta", 0 < self.beta < np.inf, "above 0"),
            ("kappa", 1 <= self.kappa < np.inf, "at least 1"),
            ("iterations", self.iterations >= 0, "at least 0"),
        ):
            if not good:
                raise ConfigError(
                    f"HalfQuadratic: {name} is {getattr(self, name)!r}; it must be"
                    f" {rule}",
                )


def half_quadratic(
    blocks: Float32, bits: int, settings: HalfQuadratic | None = None
) -> QParams:
    """Return scale and integer zero point of each block, asymmetric.

    Args:
        blocks: finite values of shape (blocks, block_size).
        bits: 2, 4 or 8.
        settings: the defaults, if None.

    Returns:
        Parameters with one entry per block, for codes from 0 on.

    >>> half_quadratic(np.float32([[-2, -1, 0, 1]]), bits=2)
    QParams(scale=array([1.], dtype=float32), zero_point=array([2]), axis=0, block_size=0)
    """
    start = round_to_nearest(blocks, bits, symmetric=False)
    zero = start.zero_point.astype(np.float32)
    settings = settings or HalfQuadratic()
    scale, zero = _solve(blocks, start.scale, zero, bits, settings)
    return QParams(scale, zero.astype(np.int64), 0)


def _solve(
    values: Float32, scale: Float32, zero: Float32, bits: int, settings: HalfQuadratic
) -> tuple[Float32, Float32]:
    """Return scale and integer zero point per row with the least squared error."""
    start = scale
    size = np.abs(scale)
    beta = settings.beta
    # Near the ends of float32 a fitted scale might overflow, or its products: the start is kept.
    free = (size > 2 * _F32.tiny) & (size < _F32.max / (2 << bits))
    best_scale = scale
    best_zero = zero
    least = np.full(scale.shape, np.inf, np.float32)
    # One pass more than updates: the parameters of the last update are judged, too.
    for _ in range(settings.iterations + 1):
        steps = values / scale[:, None]
        codes = _codes(steps, zero[:, None], bits)
        error = steps - (codes - zero[:, None])
        # In steps of the start's scale, as errors in steps of changing scales do not compare; and
        # not in units of the weight, whose squares overflow.
        squared = np.einsum("ij,ij->i", error, error) * np.square(scale / start)
        better = squared < least
        least = np.where(better, squared, least)
        best_scale = np.where(better, scale, best_scale)
        best_zero = np.where(better, zero, best_zero)

        target = steps - shrink(error, beta, settings.p)
        # The zero point of least squares for fixed codes, rounded: packed zero points are codes.
        moved = np.clip(np.rint((codes - target).mean(axis=1)), 0, (1 << bits) - 1)
        zero = np.where(free, moved, zero)
        # Least squares of the scale for fixed codes: <centred, target> / <centred, centred>.
        centred = codes - zero[:, None]
        # 0 if all codes equal the zero point: no scale follows then, and ``legal`` refuses it.
        energy = np.einsum("ij,ij->i", centred, centred)
        correlation = np.einsum("ij,ij->i", centred, target)
        fitted = scale * (correlation / np.where(energy > 0, energy, 1))
        legal = (np.abs(fitted) > 2 * _F32.tiny) & (np.abs(fitted) < 2 * size)
        scale = np.where(free & legal, fitted, scale)
        beta *= settings.kappa
    return best_scale, best_zero


def _codes(steps: Float32, zero: Float32, bits: int) -> Float32:
    """Return codes of values in steps of the scale, as floats."""
    codes: Float32 = np.clip(np.rint(steps + zero), 0, (1 << bits) - 1)
    return codes


def shrink(error: Float32, beta: float, p: float) -> Float32:
    """Return the auxiliary error: the generalized soft threshold of the error."""
    # An error of zero has an infinite threshold, and stays zero.
    with np.errstate(divide="ignore"):
        # p - 2 is negative: small errors have a large power, and are shrunk to 0.
        keep = 1 - np.abs(error) ** (p - 2) / beta
    shrunk: Float32 = error * np.maximum(keep, 0)
    return shrunk
