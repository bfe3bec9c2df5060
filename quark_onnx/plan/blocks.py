"""Choose the axes of a weight's blocks, and the fallback for weights with few values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from quark_onnx.common.wording import counted
from quark_onnx.config import QuantizationSpec
from quark_onnx.dtypes import INT8
from quark_onnx.plan.entries import Entry, Keep, Quantize

if TYPE_CHECKING:
    from quark_onnx.plan.plan import Plan

#: With fewer values in a block, a float32 scale costs more than two bits per value.
_MIN_BLOCK_VALUES = 16
#: A kernel with fewer values per channel is small compared with the others of its model.
_SMALL = 32
#: Larger blocks are cut to the length of their axis.
_LARGEST_BLOCK = 256
_FLOAT_BITS = 32


def in_blocks(
    spec: QuantizationSpec,
    shape: tuple[int, ...],
    axis: int | None,
    along: int,
    *,
    padded: bool,
) -> Entry:
    """Return the decision for a weight that is to be quantized in blocks.

    Blocks run along the axis that the operator sums over. Where blocks would hold few values there,
    as in a convolution with few input channels per group, they run over all axes after the first
    one. A kernel with few values even then is small, and rounding hurts it most: it gets 8-bit
    codes with a scale per channel. No format is chosen that takes more space than the floats.

    Args:
        spec: quantization of the weight, with a block size.
        shape: shape of the weight.
        axis: axis of the output channels, None where per-channel scales are impossible.
        along: axis that the operator sums over.
        padded: a matrix is stored with its last block padded, as in MatMulNBits.

    Returns:
        A ``Quantize`` entry, or ``Keep``.

    >>> int4 = QuantizationSpec("int4", block_size=32)
    >>> str(in_blocks(int4, (64, 1, 3, 3), 0, 1, padded=False))
    'quantize int8 symmetric axis 0 minmax, as its channels have too few values for int4 in blocks
    of 32'
    >>> str(in_blocks(int4, (64, 3, 7, 7), 0, 1, padded=False))
    'quantize int4 symmetric axes from 1, blocks of 32 minmax, as few values lie along the axis of
    the sum'
    """
    length = shape[along]
    row_size = prod(shape[1:])
    spec = _no_longer(spec, length)
    size = spec.block_size
    # A convolution kernel, whose channels come first.
    # Axes 0 and 1 in either order: (M, C/group, ...) of Conv, (C, M/group, ...) of ConvTranspose.
    # Weights of recurrent layers (axis 2) and stacks of matrices (no axis) do not match.
    if len(shape) > 2 and axis is not None and max(axis, along) == 1:
        # A depthwise 3 x 3 kernel has a length of 1 and a row of 9 values: one block per channel
        # would be a 4-bit code with a float scale per 9 values.
        if max(length, row_size) < min(size, _SMALL):
            return _by_channel(spec, shape, axis)
        if _mean(length, size) < min(_MIN_BLOCK_VALUES, _mean(row_size, size)):
            return Quantize(
                spec, 1, flat=True, note="few values lie along the axis of the sum"
            )
        return Quantize(spec, along)
    # Bits of a line along the sum: its codes, and a scale (and zero point) per block. Beyond 32
    # bits a value, quantization only loses.
    blocks = -(-length // size)
    if padded and len(shape) == 2:
        codes = blocks * size
    else:
        codes = length
    scale = _scale_bits(spec) + (0 if spec.symmetric else spec.dtype.bits)
    if codes * spec.dtype.bits + blocks * scale >= length * _FLOAT_BITS:
        return _by_channel(spec, shape, axis)
    return Quantize(spec, along)


def describe_blocks(plans: Iterable[Plan]) -> list[str]:
    """Return notes for the report on weights whose blocks differ from the request.

    Args:
        plans: the plans of the main graph and of bodies.

    Returns:
        A note per decision, with the number of weights and the first one.
    """
    # A network has hundreds of depthwise kernels: one note per decision, with the number of
    # weights.
    tensors = defaultdict[str, list[str]](list)
    for plan in plans:
        for use, entry in plan.entries.items():
            if isinstance(entry, Quantize) and entry.note:
                tensors[str(entry)].append(use.tensor)
    notes = list[str]()
    for entry_text, names in tensors.items():
        notes.append(
            f"{counted(len(names), 'weight')} ({names[0]!r} the first): {entry_text}"
        )
    return notes


def _no_longer(spec: QuantizationSpec, length: int) -> QuantizationSpec:
    """Limit block sizes above 256 to the padded length of the axis."""
    if spec.block_size <= _LARGEST_BLOCK:
        return spec
    # The next power of two: a block of an axis that is no power of two stays a power of two.
    padded = 1 << max(0, length - 1).bit_length()
    return spec.with_(block_size=min(spec.block_size, max(_LARGEST_BLOCK, padded)))


def _mean(length: int, size: int) -> float:
    """Return the mean size of the blocks of a line, the last of which may be shorter."""
    return length / max(1, -(-length // size))


def _by_channel(
    spec: QuantizationSpec, shape: tuple[int, ...], axis: int | None
) -> Entry:
    """Return 8-bit codes with a scale per channel, or Keep if the floats take no more space.

    Args:
        spec: the requested quantization in blocks; formats of 8 bits or more are kept.
        axis: axis of the output channels; None for a scale per tensor.
    """
    # Symmetric codes save the zero points, and the solvers of blocks have no block to solve.
    dtype = spec.dtype if spec.dtype.bits >= INT8.bits else INT8
    plain = spec.with_(
        dtype=dtype, symmetric=True, per_channel=True, block_size=0, solver="nearest"
    )
    if axis is None:
        channels = 1
    else:
        channels = shape[axis]
    # Tiny kernels, such as one value per channel: 8 bits of code and 32 bits of scale exceed 32
    # bits.
    values = prod(shape)
    if values * dtype.bits + channels * _scale_bits(spec) >= values * _FLOAT_BITS:
        return Keep("its scales would take more space than its floats")
    note = (
        f"its channels have too few values for {spec.dtype.name} in blocks of"
        f" {spec.block_size}"
    )
    return Quantize(plain, axis, note=note)


def _scale_bits(spec: QuantizationSpec) -> int:
    """Return the bits of a stored scale."""
    return 16 if spec.scale == "float16" else _FLOAT_BITS
