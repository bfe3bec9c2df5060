"""Extract im2col patches, the rows of inputs for products with the weight.

A Conv at a position of its output is the product of a row of inputs and the weight of each output
channel; so is a ConvTranspose, with fewer inputs in a row, and a MatMul or Gemm, whose rows exist
already. Positions run along the batch and the spatial axes; a row holds the inputs of a group in
the order of the weight: channel, then kernel. Rows of several small tensors of one shape are
extracted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quark_onnx.kernels.axes import along

Floats = NDArray[np.float32]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class Window:
    """The input positions of an output position, axis by axis.

    Attributes:
        kernel: sizes of the layer's kernel, per spatial axis.
        strides: strides, per spatial axis.
        dilations: dilations, per spatial axis.
        pads: zeros before the input, per spatial axis.
        turned: the layer is a ConvTranspose.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    turned: bool = False

    @lru_cache(maxsize=64)  # noqa: B019  (windows and tables are small)
    def seen(
        self, axis: int, size: int, output: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the inputs along an axis for each tap, and a mask of valid ones.

        Both of shape (kernel, output).
        """
        places = np.arange(output)
        taps = np.arange(self.kernel[axis])[:, None] * self.dilations[axis]
        if self.turned:
            # A tap reaches only the outputs at multiples of the stride.
            # Output o reads input i by tap t if o + pad = i * stride + t * dilation.
            spread = places + self.pads[axis] - taps
            inputs = spread // self.strides[axis]
            inside = spread % self.strides[axis] == 0
        else:
            inputs = places * self.strides[axis] - self.pads[axis] + taps
            inside = np.ones(inputs.shape, np.bool_)
        inside = inside & (inputs >= 0) & (inputs < size)
        # Padding reads any valid place here, and is overwritten afterwards.
        return inputs.clip(0, max(0, size - 1)), inside


def windowed(  # noqa: PLR0913  the geometry of a convolution
    xs: Sequence[NDArray[T]],
    places: NDArray[np.int64],
    output: tuple[int, ...],
    window: Window,
    groups: int,
    zero: int = 0,
) -> NDArray[T]:
    """Return patches of a convolution, (tensors, groups, places, channels / groups * kernel).

    In memory the places come last.

    Args:
        xs: inputs of one shape, (batch, channels, ...).
        places: (tensors, places), flat indices into the batch and the spatial axes of the output.
        output: sizes of these spatial axes.
        window: geometry of the kernel.
        groups: groups of the convolution.
        zero: padding value.
    """
    shape = xs[0].shape
    rank = len(window.kernel)
    ones = [1] * rank
    # (tensors, 1, ..., places), to broadcast against the taps of every axis.
    coordinates: list[NDArray[np.int64]] = [
        coordinate.reshape(len(xs), *ones, places.shape[1])
        for coordinate in np.unravel_index(places, (shape[0], *output))
    ]
    # Flat index into (batch, *spatial): Horner's scheme over the axes, the batch first.
    index = coordinates[0]
    outside: NDArray[np.bool_] = np.zeros(1, bool)
    for axis, coordinate in enumerate(coordinates[1:]):
        inputs_seen, inside = window.seen(axis, shape[2 + axis], output[axis])
        taps = np.arange(window.kernel[axis]).reshape(*along(axis, rank), 1)
        index = index * shape[2 + axis] + inputs_seen[taps, coordinate]
        # Most layers have axes without padding, for which no mask is built.
        if not inside.all():
            outside = outside | ~inside[taps, coordinate]
    count = places.shape[1]
    index = index.reshape(len(xs), prod(window.kernel), count)
    # (tensors, channels, taps, places): a channel's taps are adjacent, as in the weight.
    patches = np.empty((len(xs), shape[1], *index.shape[1:]), xs[0].dtype)
    for x, indices, values in zip(xs, index, patches, strict=True):
        # "clip" avoids a buffer.
        _planes(x).take(indices, axis=1, out=values, mode="clip")
    if outside.any():
        mask = np.broadcast_to(outside, (len(xs), *window.kernel, count))
        padding = np.array(zero, patches.dtype)
        np.copyto(patches, padding, where=mask.reshape(index.shape)[:, None])
    inputs = shape[1] // groups * prod(window.kernel)
    rows: NDArray[T] = patches.reshape(len(xs), groups, inputs, count).swapaxes(2, 3)
    return rows


def _planes(x: NDArray[T]) -> NDArray[T]:
    """Return (channels, everything else); uncopied for a batch of one."""
    size = x.shape[0] * prod(x.shape[2:])
    planes: NDArray[T] = x.swapaxes(0, 1).reshape(x.shape[1], size)
    return planes


def places_of(count: int, wanted: int, seeds: Sequence[int]) -> NDArray[np.int64]:
    """Return distinct random places out of ``count``, for each seed; (seeds, places).

    Stratified sampling: one place per stratum, strata of equal length.
    """
    # Fewer places than wanted: each is taken once.
    wanted = min(count, wanted)
    # Integer ends: strata differ in length by one at most, and do not overlap.
    ends = np.arange(wanted + 1) * count // max(1, wanted)
    generators = [np.random.default_rng(seed) for seed in seeds]
    draws = np.array([generator.random(wanted) for generator in generators])
    shares = draws.reshape(len(generators), wanted)
    places: NDArray[np.int64] = ends[:-1] + (shares * np.diff(ends)).astype(np.int64)
    # Strata are in the order of the image, and optimizers take consecutive rows as a batch.
    for generator, row in zip(generators, places, strict=True):
        generator.shuffle(row)
    return places


def at_places(
    ys: Sequence[NDArray[T]], places: NDArray[np.int64], groups: int
) -> NDArray[T]:
    """Return outputs of a convolution at places, (tensors, groups, places, channels / groups).

    In memory the places come last.

    Args:
        ys: outputs of one shape, (batch, channels, ...).
        places: (tensors, places).
        groups: groups of the convolution.
    """
    channels = ys[0].shape[1]
    count = places.shape[1]
    columns = np.empty((len(ys), channels, count), ys[0].dtype)
    for y, indices, values in zip(ys, places, columns, strict=True):
        _planes(y).take(indices, axis=1, out=values, mode="clip")
    rows = columns.reshape(len(ys), groups, channels // groups, count)
    swapped: NDArray[T] = rows.swapaxes(2, 3)
    return swapped


def rows_at(xs: Sequence[NDArray[T]], places: NDArray[np.int64]) -> NDArray[T]:
    """Return rows of tensors along the last axis, (tensors, 1, places, values)."""
    # Leading axes are flattened: each place is a row of the last axis.
    rows = [
        x.reshape(-1, x.shape[-1]).take(indices, axis=0)
        for x, indices in zip(xs, places, strict=True)
    ]
    return np.stack(rows)[:, None]


def count_places(output: tuple[int, ...], *, spatial: bool) -> int:
    """Return the number of places of a layer's output of some shape."""
    if spatial:
        return output[0] * prod(output[2:])
    return prod(output[:-1])
