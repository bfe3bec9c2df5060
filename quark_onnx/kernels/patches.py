"""What a layer multiplies its weight with: rows of inputs, one for each place of its output.

A Conv at one place of its output is the product of a row of inputs and the weight of each output channel; so is a
ConvTranspose, whose row is spread over fewer inputs, and a MatMul or Gemm, whose rows are there already. Places lie
along the batch and the spatial axes; a row holds the inputs of a group in the order in which the weight stores them:
channel, then kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class Window:
    """The places of the input that a place of the output sees, axis by axis.

    Attributes:
        kernel, strides, dilations: of the layer, one number for each spatial axis.
        pads: how many zeros come before the input.
        turned: it is a ConvTranspose.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    turned: bool = False

    @lru_cache(maxsize=64)  # noqa: B019 (a window is a few numbers, and what it is asked for are small tables)
    def seen(self, axis: int, size: int, output: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Along an axis the inputs behind each tap of the kernel, (kernel, output), and whether there are any."""
        places = np.arange(output)
        taps = np.arange(self.kernel[axis])[:, None] * self.dilations[axis]
        if not self.turned:
            found = places * self.strides[axis] - self.pads[axis] + taps
            inside = (found >= 0) & (found < size)
            return found.clip(0, max(0, size - 1)), inside
        spread = places + self.pads[axis] - taps
        found = spread // self.strides[axis]
        inside = (spread % self.strides[axis] == 0) & (found >= 0) & (found < size)
        return found.clip(0, max(0, size - 1)), inside


def windowed(
    x: NDArray[T], places: NDArray[np.int64], output: tuple[int, ...], window: Window, groups: int, zero: int = 0
) -> NDArray[T]:
    """Rows of a convolution, (groups, places, channels / groups * kernel); in memory the places come last.

    Args:
        x: the input, (batch, channels, ...).
        places: indices into the batch and the spatial axes of the output, taken as one.
        output: the sizes of those spatial axes.
        zero: what stands for 0 around the input.
    """
    batch, *spots = np.unravel_index(places, (x.shape[0], *output))
    rank = len(window.kernel)
    index: NDArray[np.int64] = batch
    outside: NDArray[np.bool_] = np.zeros(1, bool)
    for axis, spot in enumerate(spots):
        found, inside = window.seen(axis, x.shape[2 + axis], output[axis])
        shape = (*[window.kernel[axis] if other == axis else 1 for other in range(rank)], len(places))
        index = index * x.shape[2 + axis] + found.take(spot, axis=1).reshape(shape)
        if not inside.all():
            outside = outside | ~inside.take(spot, axis=1).reshape(shape)
    taken = _planes(x).take(index.reshape(-1), axis=1)
    if outside.any():
        taken[:, np.flatnonzero(np.broadcast_to(outside, index.shape))] = zero
    rows: NDArray[T] = taken.reshape(groups, -1, len(places)).swapaxes(1, 2)
    return rows


def _planes(x: NDArray[T]) -> NDArray[T]:
    """(channels, everything else); without a copy for a batch of one."""
    planes: NDArray[T] = x.swapaxes(0, 1).reshape(x.shape[1], -1)
    return planes


def places_of(count: int, wanted: int, seed: int) -> NDArray[np.int64]:
    """Some of ``count`` places in random order, each once; the same for the same seed.

    One is taken of each of as many equal stretches, so that they lie evenly.
    """
    random = np.random.default_rng(seed)
    wanted = min(count, wanted)
    ends = np.arange(wanted + 1) * count // max(1, wanted)
    places = ends[:-1] + (random.random(wanted) * np.diff(ends)).astype(np.int64)
    random.shuffle(places)
    return places


def at_places(y: NDArray[T], places: NDArray[np.int64], groups: int) -> NDArray[T]:
    """The outputs of a convolution at some places, (groups, places, channels / groups); in memory the places come last.

    Args:
        y: the output, (batch, channels, ...).
    """
    rows: NDArray[T] = _planes(y).take(places, axis=1).reshape(groups, -1, len(places)).swapaxes(1, 2)
    return rows


def rows_at(x: NDArray[T], places: NDArray[np.int64]) -> NDArray[T]:
    """Some rows of a tensor whose last axis holds the values of a row, (1, places, values)."""
    return x.reshape(-1, x.shape[-1]).take(places, axis=0)[None]


def count_places(output: tuple[int, ...], *, spatial: bool) -> int:
    """How many places the output of a layer has, by its shape."""
    return output[0] * prod(output[2:]) if spatial else prod(output[:-1])
