"""Matrices in blocks of 2, 4 and 8 bits: quantized by a solver, and dequantized in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from calibrators import QParams
from quark_onnx.kernels.nbits import NBitsWeight, codes_of, from_codes

Floats = NDArray[np.float32]


def quantized(
    w: Floats, bits: int, block_size: int, solve: Callable[[Floats], QParams]
) -> NBitsWeight:
    """The weight (K, N) of a solver for rows of a block; the last block is padded with zeros."""
    k, n = w.shape
    columns = np.pad(w.T, [(0, 0), (0, -k % block_size)])
    blocks = np.ascontiguousarray(columns).reshape(-1, block_size)
    params = solve(blocks)
    shape = (n, columns.shape[1] // block_size)
    return from_codes(
        codes_of(blocks, params, 2**bits - 1).astype(int).reshape(*shape, block_size),
        params.scale.reshape(shape),
        params.zero_point.reshape(shape),
        bits,
        k,
    )


def codes_in(packed: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """The codes of the last axis, bit by bit."""
    single = np.unpackbits(packed, axis=-1, bitorder="little")
    return single.reshape(*packed.shape[:-1], -1, bits) @ (1 << np.arange(bits))


def zero_points(weight: NBitsWeight) -> NDArray[np.float64]:
    """The zero point of each block, (N, blocks)."""
    if weight.zero_points is None:
        return np.full(weight.scales.shape, 2.0 ** (weight.bits - 1))
    if weight.zero_points.dtype == np.float32:
        return weight.zero_points.astype(np.float64)
    codes = codes_in(weight.zero_points.astype(np.uint8), weight.bits)
    return codes[:, : weight.scales.shape[1]].astype(np.float64)


def dequantized(weight: NBitsWeight) -> NDArray[np.float64]:
    """The matrix (K, N) that the codes stand for."""
    codes = codes_in(weight.packed, weight.bits) - zero_points(weight)[..., None]
    values = codes * weight.scales[..., None].astype(np.float64)
    return values.reshape(len(values), -1)[:, : weight.rows].T


def block_errors(w: Floats, weight: NBitsWeight) -> NDArray[np.float64]:
    """The squared error of each block, (N, blocks)."""
    squares = np.square(w - dequantized(weight)).T
    return np.add.reduceat(squares, np.arange(0, len(w), weight.block_size), axis=1)
