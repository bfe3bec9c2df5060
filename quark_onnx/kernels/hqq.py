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
- The start is the better of the two RTN variants in :mod:`quark_onnx.kernels.nbits`; float zero
  points continue from codes that span the full range of the block, which reduces the error by
  another 1 to 5 %.
- Of all iterations, including the start, a block takes the one with the least squared error: for
  uncorrelated inputs the squared error of the outputs is proportional to it. The lp norm only moves
  zero points out of the minima of least squares. So no block is worse than under RTN.

Relative error sqrt(sum (W - W')^2 / sum W^2) on the weights of a sentence encoder (MiniLM-L6), in
%:

    bits, block                      2, 32   2, 128   4, 32   4, 128   8, 32   8, 128
    rounding to nearest              35.8    43.8     7.90    10.28    0.463   0.609
    integer zero points              33.0    36.8     7.68     9.92    0.448   0.599
    float zero points                30.0    34.0     7.01     9.54
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.grid import QParams
from quark_onnx.common.errors import ConfigError
from quark_onnx.kernels.nbits import (
    Float32,
    NBitsWeight,
    check,
    round_to_nearest,
    slabs,
)
from quark_onnx.kernels.packing import pack, packed_size

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


def quantize_hqq(
    weight: NDArray[Any],
    bits: int = 4,
    block_size: int = 32,
    *,
    float_zero_points: bool = False,
    settings: HalfQuadratic | None = None,
) -> NBitsWeight:
    """Quantize a weight matrix asymmetrically by half-quadratic splitting.

    Args:
        weight: floats of shape (K, N).
        bits: 2, 4 or 8.
        block_size: 16, 32, 64, 128 or 256.
        float_zero_points: store zero points as float32 (2 and 4 bits): smaller errors, but four
            bytes more per block, and onnxruntime then ignores accuracy_level 4.
        settings: the defaults, if None.

    Raises:
        ConfigError: bits or block_size is invalid, or float zero points of 8-bit codes are
            requested, which onnxruntime refuses.
        ModelError: the weight is not a matrix of floats, is empty, or holds NaN or an infinity.

    >>> from quark_onnx.kernels.nbits import dequantize_nbits
    >>> weight = np.array([[-1.5], [-0.5], [0.5], [1.5]], np.float32)
    >>> hqq = quantize_hqq(weight, bits=2, block_size=16, float_zero_points=True)
    >>> dequantize_nbits(hqq).ravel()
    array([-1.5, -0.5,  0.5,  1.5], dtype=float32)
    """
    check(weight, bits, block_size)
    if float_zero_points and bits == 8:
        raise ConfigError(
            "float zero points of 8 bits cannot be run by onnxruntime; use"
            " float_zero_points=False",
        )
    settings = settings or HalfQuadratic()
    n = weight.shape[1]
    count = -(-weight.shape[0] // block_size)
    packed = np.empty((n, count, packed_size(block_size, bits)), np.uint8)
    scales = np.empty((n, count), np.float32)
    zeros = np.empty((n, count), np.float32)
    # Values in the last block of a column; 0 if it is full.
    short = weight.shape[0] % block_size
    for position, blocks in slabs(weight, block_size):
        params = round_to_nearest(
            blocks.reshape(-1, block_size), bits, symmetric=False
        )[1]
        scale = params.scale.reshape(blocks.shape[:2])
        zero = params.zero_point.reshape(blocks.shape[:2]).astype(np.float32)
        # The padding of the last block is not part of the weight, and must not move its zero point.
        full_blocks = blocks.shape[1] - (short > 0 and position[1].stop == count)
        for part, length in (
            (slice(0, full_blocks), block_size),
            (slice(full_blocks, None), short),
        ):
            values = blocks[:, part, :length]
            # The slab may have no full blocks, or no incomplete one.
            if values.size:
                best_scale, best_zero = _solve(
                    values.reshape(-1, length),
                    scale[:, part].ravel(),
                    zero[:, part].ravel(),
                    bits,
                    float_zero_points,
                    settings,
                )
                # (columns, blocks): one scale and one zero point per block.
                scale[:, part] = best_scale.reshape(values.shape[:2])
                zero[:, part] = best_zero.reshape(values.shape[:2])
        scales[position] = scale
        zeros[position] = zero
        codes = _codes(blocks / scale[..., None], zero[..., None], bits)
        packed[position] = pack(codes.astype(np.uint8), bits)
    if float_zero_points:
        # float32 zero points are not packed: (N, blocks), as scales.
        stored = zeros
    else:
        stored = pack(zeros.astype(np.uint8), bits)
    return NBitsWeight(packed, scales, stored, bits, block_size, weight.shape[0])


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
    start = round_to_nearest(blocks, bits, symmetric=False)[1]
    zero = start.zero_point.astype(np.float32)
    settings = settings or HalfQuadratic()
    scale, zero = _solve(blocks, start.scale, zero, bits, False, settings)
    return QParams(scale, zero.astype(np.int64), 0)


def _solve(  # noqa: PLR0913  the state and the settings of the iteration
    values: Float32,
    scale: Float32,
    zero: Float32,
    bits: int,
    floating: bool,
    settings: HalfQuadratic,
) -> tuple[Float32, Float32]:
    """Return scale and zero point per row with the least squared error."""
    start = scale
    size = np.abs(scale)
    beta = settings.beta
    # Near the ends of float32 a fitted scale might overflow, or its products: the start is kept.
    free = (size > 2 * _F32.tiny) & (size < _F32.max / (2 << bits))
    best_scale = scale
    best_zero = zero
    least = np.full(scale.shape, np.inf, np.float32)
    # One pass more than updates: the parameters of the last update are judged, too.
    for iteration in range(settings.iterations + 1):
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
        # RTN's integer zero point spans zero; a float one may start from the exact range.
        if floating and iteration == 0:
            scale, zero = _tight(values, scale, zero, bits, free)
            continue

        target = steps - shrink(error, beta, settings.p)
        # The zero point of least squares for fixed codes.
        moved = (codes - target).mean(axis=1)
        if not floating:
            # Packed zero points are codes.
            moved = np.clip(np.rint(moved), 0, (1 << bits) - 1)
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


def _tight(
    values: Float32, scale: Float32, zero: Float32, bits: int, free: NDArray[np.bool_]
) -> tuple[Float32, Float32]:
    """Return scales and float zero points for codes that span the rows completely.

    Rows that are not free keep the given ones.
    """
    lo = np.where(free, values.min(axis=1), 0)
    top = (1 << bits) - 1
    extent = np.where(free, values.max(axis=1), 0) - lo
    # For ranges far from zero, code - zero_point would lose precision.
    spans = (extent > 2 * top * _F32.tiny) & (extent * 4 > np.abs(lo))
    step = np.where(spans, extent, 1) / np.float32(top)
    return np.where(spans, step, scale), np.where(spans, -lo / step, zero)


def _codes(steps: Float32, zero: Float32, bits: int) -> Float32:
    """Return codes of values in steps of the scale, as floats, for zero points of any kind."""
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
