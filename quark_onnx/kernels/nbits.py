"""Quantize weight matrices to 2, 4 and 8 bits in the layout of com.microsoft::MatMulNBits.

``y = x @ W`` with W of shape (K, N). Each column of W is cut into blocks of ``block_size`` values
along K; the last block is padded. ``W = (code - zero_point) * scale``, block by block; codes are
unsigned. The operator's inputs, row n of each for column n of W: B uint8 (N, blocks, block_size *
bits / 8), the codes of a block packed by themselves; scales float32 (N, blocks); zero_points,
either uint8 (N, ceil(blocks * bits / 8)), a row's zero points packed like codes, or of the scales'
type (N, blocks), or left out, which stands for 2^(bits-1).

What onnxruntime 1.31 runs correctly on an x86-64 CPU (AVX-512 with VNNI), found by running every
combination of K and N divisible or not by the block and of 1, 2 and 17 rows of x against float64.
"float" is within 1e-6 of the greatest output; "int8" means that x is rounded to int8 codes block by
block, which costs up to 3e-2 of it:

    bits  block_size           zero_points           accuracy_level 0   accuracy_level 4
    2     32, 64, 128          none, uint8           float              int8
    2     16, 256              none, uint8           float              float (the level is ignored)
    4, 8  16, 32, ..., 256     none, uint8           float              int8
    2, 4  16, 32, ..., 256     float32               float              float (the level is ignored)
    8     32                   float32               refused when run   refused when run
    any   8, 512               none                  refused on loading

It takes negative scales too, and scales and zero points that are flattened to one axis.

Rounding to nearest tries two scales per block and keeps the one with the smaller squared error.
Symmetric: the extremum as code 0, which reaches one step further than the greatest code, so that
the scale is negative where the extremum is positive (onnxruntime's own quantizer does this); or the
extremum as the greatest code. Asymmetric: the range of the block, or again the extremum as code 0.
Relative error sqrt(sum (W - W')^2 / sum W^2) on the weights of a sentence encoder (MiniLM-L6), in
%:

    bits, block        2, 32   2, 128   4, 32   4, 128   8, 32   8, 128
    symmetric
      greatest code    65.0    76.9     9.92    12.54    0.549   0.703
      code 0           36.3    44.1     8.76    11.03    0.545   0.698
      better of both   36.3    44.1     8.68    11.03    0.523   0.687
    asymmetric
      range            39.8    50.9     8.01    10.37    0.471   0.612
      better of both   35.8    43.8     7.90    10.28    0.463   0.609
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.affine import params_for
from calibrators.grid import Grid, QParams, Range
from quark_onnx.common.errors import ConfigError, PlanError
from quark_onnx.kernels.packing import BITS, pack

Float32 = NDArray[np.float32]

#: Block sizes that onnxruntime supports.
BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, eq=False)
class NBitsWeight:
    """A quantized weight matrix: constant inputs and attributes of a MatMulNBits node.

    Attributes:
        packed: the input B, uint8 (N, blocks, block_size * bits / 8).
        scales: float32 (N, blocks).
        zero_points: uint8 (N, ceil(blocks * bits / 8)) packed, or float32 (N, blocks); None for
            2^(bits-1).
        bits: 2, 4 or 8.
        block_size: values of a column that share a scale.
        rows: K, the rows of the weight matrix without padding.
    """

    packed: NDArray[np.uint8]
    scales: Float32
    zero_points: NDArray[np.uint8] | Float32 | None
    bits: int
    block_size: int
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N) of the weight matrix."""
        return self.rows, self.packed.shape[0]

    @property
    def inputs(self) -> tuple[NDArray[Any], ...]:
        """The node's inputs after x: B, scales and, if any, zero_points."""
        if self.zero_points is None:
            return (self.packed, self.scales)
        return (self.packed, self.scales, self.zero_points)

    @property
    def attributes(self) -> dict[str, int]:
        """The node's required attributes."""
        return {
            "K": self.rows,
            "N": self.packed.shape[0],
            "bits": self.bits,
            "block_size": self.block_size,
        }


def from_codes(
    codes: NDArray[Any],
    scales: Float32,
    zero_points: NDArray[Any] | None,
    bits: int,
    rows: int,
) -> NBitsWeight:
    """Return the weight for codes of another algorithm.

    Args:
        codes: integers 0..2^bits-1 of shape (N, blocks, block_size).
        scales: float32 (N, blocks).
        zero_points: (N, blocks), integers 0..2^bits-1 to be packed, or floats; None for 2^(bits-1).
        bits: 2, 4 or 8.
        rows: K, the rows of the weight matrix; codes beyond it are padding.

    Raises:
        ConfigError: bits or the block size is not supported by the operator.
        PlanError: the shapes do not match, or a code does not fit.

    >>> weight = from_codes(np.full((1, 1, 16), 9), np.float32([[0.5]]), None, bits=4, rows=16)
    >>> weight.packed[0, 0, :2]
    array([153, 153], dtype=uint8)
    """
    if (
        codes.ndim != 3
        or scales.shape != codes.shape[:2]
        # The last block may be padded, and no block may be padding alone.
        or -(-rows // codes.shape[2]) != codes.shape[1]
    ):
        raise PlanError(
            f"codes {codes.shape} and scales {scales.shape} are not those of a matrix"
            f" of {rows} rows",
        )
    if zero_points is not None and zero_points.shape != scales.shape:
        raise PlanError(
            f"zero points {zero_points.shape} and scales {scales.shape} differ in shape"
        )
    _check_sizes(bits, codes.shape[2])
    if zero_points is not None:
        if zero_points.dtype.kind == "f":
            zero_points = zero_points.astype(np.float32)
        else:
            zero_points = pack(zero_points, bits)
    return NBitsWeight(
        pack(codes, bits),
        scales.astype(np.float32),
        zero_points,
        bits,
        codes.shape[2],
        rows,
    )


def joined(parts: Sequence[NBitsWeight]) -> NBitsWeight:
    """Return the weight with the columns of several, which differ in nothing else."""
    arrays = (
        np.concatenate(column)
        for column in zip(*(part.inputs for part in parts), strict=True)
    )
    packed, scales, *zero_points = arrays
    return replace(
        parts[0],
        packed=packed,
        scales=scales,
        zero_points=zero_points[0] if zero_points else None,
    )


def round_to_nearest(blocks: Float32, bits: int, *, symmetric: bool) -> QParams:
    """Return the better of two scales for each block (see the module).

    Args:
        blocks: finite values of shape (blocks, block_size).
        bits: 2, 4 or 8.
        symmetric: the zero points are 2^(bits-1).

    Returns:
        Parameters with one entry per block.

    >>> blocks = np.float32([[0, 1, 4], [-2, 0, 1]])
    >>> params = round_to_nearest(blocks, 2, symmetric=True)
    >>> codes_of(blocks, params, 3)
    array([[2., 2., 0.],
           [0., 2., 3.]], dtype=float32)
    >>> params.scale
    array([-2.,  1.], dtype=float32)
    """
    # Codes reach one step farther below zero than above it. With the sign of the scale such that
    # the greatest magnitude is on that side, it spans 2^(bits-1) steps in place of one less.
    grid = Grid(0, (1 << bits) - 1, symmetric=symmetric)
    lo = blocks.min(axis=1)
    hi = blocks.max(axis=1)
    # The greatest magnitude: that of lo if lo is negative, or hi.
    greatest = np.maximum(hi, -lo)
    none = np.zeros(lo.shape)
    # As a negative number the extremum becomes code 0; the sign of the scale restores its sign.
    low = params_for(Range(-greatest, none), Grid(0, grid.qmax, symmetric=True), axis=0)
    low = low.with_scale(np.where(hi > -lo, -low.scale, low.scale))
    # With symmetric=True the range from 0 to the extremum gives it the greatest code.
    usual_range = Range(none, greatest) if symmetric else Range(lo, hi)
    usual = params_for(usual_range, grid, axis=0)
    low_codes = codes_of(blocks, low, grid.qmax)
    usual_codes = codes_of(blocks, usual, grid.qmax)
    # Errors are compared as fractions of the extremum, whose squares neither overflow nor vanish.
    unit = np.float32(1) / np.maximum(greatest, np.finfo(np.float32).tiny)
    # A scale whose values exceed float32 has an infinite error.
    with np.errstate(over="ignore"):
        low_error = squared_error(blocks, _reals(low_codes, low), unit)
        usual_error = squared_error(blocks, _reals(usual_codes, usual), unit)
    # Strictly: of equal errors the scale with code 0 for the extremum is kept.
    better = usual_error < low_error
    scale = np.where(better, usual.scale, low.scale)
    zero = np.where(better, usual.zero_point, low.zero_point)
    return QParams(scale, zero, 0)


def codes_of(blocks: Float32, params: QParams, qmax: int) -> Float32:
    """Compute ``calibrators.affine.quantize`` bit for bit, ten times as fast.

    All codes fit into float32.
    """
    # A tiny scale sends large values to infinity, which saturates.
    with np.errstate(over="ignore"):
        codes = blocks / params.scale[:, None]
    # Half to even, as QuantizeLinear rounds. In place, to save arrays of the size of the blocks.
    np.rint(codes, out=codes)
    codes += params.zero_point[:, None].astype(np.float32)
    np.clip(codes, 0, qmax, out=codes)
    return codes


def _reals(codes: Float32, params: QParams) -> Float32:
    """Compute ``calibrators.affine.dequantize`` bit for bit, without wider types."""
    reals: Float32 = codes - params.zero_point[:, None].astype(np.float32)
    reals *= params.scale[:, None]
    return reals


def squared_error(blocks: Float32, real: Float32, unit: Float32) -> NDArray[np.float32]:
    """Return the sum of squared differences of each block, multiplied by ``unit`` first.

    >>> squared_error(np.float32([[1, 2]]), np.float32([[1, 4]]), np.float32([0.5]))
    array([1.], dtype=float32)
    """
    difference = (blocks - real) * unit[:, None]
    error: NDArray[np.float32] = np.einsum("ij,ij->i", difference, difference)
    return error


def _check_sizes(bits: int, block_size: int) -> None:
    if bits not in BITS:
        raise ConfigError(
            f"bits is {bits!r}; onnxruntime takes {', '.join(str(width) for width in BITS)}",
        )
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"block_size is {block_size!r}; onnxruntime takes"
            f" {', '.join(str(size) for size in BLOCK_SIZES)}",
        )
