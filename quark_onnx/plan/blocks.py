"""Blocks of a weight: along which axes they run, and what a weight gets that is too small for them."""  # noqa: E501

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from quark_onnx.config import QuantizationSpec
from quark_onnx.dtypes import INT8
from quark_onnx.plan.entries import Entry, Keep, Quantize

if TYPE_CHECKING:
    from quark_onnx.plan.plan import Plan

#: A float32 scale for fewer values costs more than two bits for each of them.
_FEWEST = 16
#: A kernel with fewer values for a channel is small beside the others of its model.
_SMALL = 32
#: Blocks of more values are no longer than the axis that they lie along.
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
    """Return what becomes of a weight that is asked for in blocks.

    Blocks run along the axis that the operator sums over. Where they would hold few values there,
    as in a convolution with few input channels for each group, they run over all axes behind the
    first one. A kernel that has few values even so is small, and rounding it hurts most: it gets
    8-bit codes with one scale for each channel. No form is chosen that takes more space than the
    floats.

    Args:
        spec: how the weight is quantized; it has a block size.
        shape: of the weight.
        axis: of the output channels, None where scales of channels cannot be used.
        along: the axis that the operator sums over.
        padded: a matrix is stored with its last block filled up, as MatMulNBits has it.

    >>> str(in_blocks(QuantizationSpec("int4", block_size=32), (64, 1, 3, 3), 0, 1, padded=False))
    'quantize int8 symmetric axis 0 minmax, as its channels have too few values for int4 in blocks of 32'
    >>> str(in_blocks(QuantizationSpec("int4", block_size=32), (64, 3, 7, 7), 0, 1, padded=False))
    'quantize int4 symmetric axes from 1, blocks of 32 minmax, as few values lie along the axis of the sum'
    """  # noqa: E501
    length, row = shape[along], prod(shape[1:])
    spec = _no_longer(spec, length)
    size = spec.block_size
    if (
        len(shape) > 2 and axis is not None and max(axis, along) == 1
    ):  # a kernel: channels come first
        if max(length, row) < min(size, _SMALL):
            return _by_channel(spec, shape, axis)
        if _mean(length, size) < min(_FEWEST, _mean(row, size)):
            return Quantize(
                spec,
                1,
                flat=True,
                note="few values lie along the axis of the sum",
            )
        return Quantize(spec, along)
    blocks = -(-length // size)
    codes = blocks * size if padded and len(shape) == 2 else length
    scale = _scale_bits(spec) + (0 if spec.symmetric else spec.dtype.bits)
    if codes * spec.dtype.bits + blocks * scale >= length * _FLOAT_BITS:
        return _by_channel(spec, shape, axis)
    return Quantize(spec, along)


def describe_blocks(plans: Iterable[Plan]) -> list[str]:
    """Return notes for the report on weights that are not quantized in blocks as it was asked for."""  # noqa: E501
    found = defaultdict[str, list[str]](list)
    for plan in plans:
        for use, entry in plan.entries.items():
            if isinstance(entry, Quantize) and entry.note:
                found[f"{entry.form}, as {entry.note}"].append(use.tensor)
    return [
        f"{len(names)} weights ({names[0]!r} the first): {what}"
        for what, names in found.items()
    ]


def _no_longer(spec: QuantizationSpec, length: int) -> QuantizationSpec:
    """Return a spec whose blocks are no longer than it takes: what lies beyond the axis is filled
    up.
    """
    if spec.block_size <= _LARGEST_BLOCK:
        return spec
    whole = 1 << max(0, length - 1).bit_length()
    return spec.with_(block_size=min(spec.block_size, max(_LARGEST_BLOCK, whole)))


def _mean(length: int, size: int) -> float:
    """Return how many values a block of a line holds on average."""
    return length / max(1, -(-length // size))


def _by_channel(
    spec: QuantizationSpec,
    shape: tuple[int, ...],
    axis: int | None,
) -> Entry:
    """Return 8-bit codes with one scale for each channel, or the float weight where that takes no
    more space.
    """
    dtype = spec.dtype if spec.dtype.bits >= INT8.bits else INT8
    plain = spec.with_(
        dtype=dtype,
        symmetric=True,
        per_channel=True,
        block_size=0,
        solver="nearest",
    )
    channels, values = 1 if axis is None else shape[axis], prod(shape)
    if values * dtype.bits + channels * _scale_bits(spec) >= values * _FLOAT_BITS:
        return Keep("its scales would take more space than its floats")
    note = (
        f"its channels have too few values for {spec.dtype.name} in blocks of"
        f" {spec.block_size}"
    )
    return Quantize(plain, axis, note=note)


def _scale_bits(spec: QuantizationSpec) -> int:
    return 16 if spec.scale == "float16" else _FLOAT_BITS
