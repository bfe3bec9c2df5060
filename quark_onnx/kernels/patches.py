"""What a layer multiplies its weight with: rows of inputs, one for each place of its output.

A Conv at one place of its output is the product of a row of inputs and the weight of each output channel; so is a
ConvTranspose, whose row is spread over fewer inputs, and a MatMul or Gemm, whose rows are there already. Places lie
along the batch and the spatial axes; a row holds the inputs of a group in the order in which the weight stores them:
channel, then kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


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

    def seen(self, places: NDArray[np.int64], axis: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """For each place of the output along an axis, the inputs behind the kernel, and whether there are any."""
        taps = np.arange(self.kernel[axis]) * self.dilations[axis]
        if not self.turned:
            found = places[:, None] * self.strides[axis] - self.pads[axis] + taps
            inside = (found >= 0) & (found < size)
            return found.clip(0, max(0, size - 1)), inside
        spread = places[:, None] + self.pads[axis] - taps
        found = spread // self.strides[axis]
        inside = (spread % self.strides[axis] == 0) & (found >= 0) & (found < size)
        return found.clip(0, max(0, size - 1)), inside


def windowed(x: Floats, places: NDArray[np.int64], output: tuple[int, ...], window: Window, groups: int) -> Floats:
    """Rows of a convolution, (groups, places, channels / groups * kernel).

    Args:
        x: the input, (batch, channels, ...).
        places: indices into the batch and the spatial axes of the output, taken as one.
        output: the sizes of those spatial axes.
    """
    batch, *spots = np.unravel_index(places, (x.shape[0], *output))
    rank = len(window.kernel)
    index: list[NDArray[np.int64]] = [batch.reshape(-1, *[1] * rank)]
    valid = np.ones((1,) * (rank + 1), bool)
    for axis, spot in enumerate(spots):
        found, inside = window.seen(spot, axis, x.shape[2 + axis])
        shape = (-1, *[window.kernel[axis] if other == axis else 1 for other in range(rank)])
        index.append(found.reshape(shape))
        valid = valid & inside.reshape(shape)
    chosen: Any = (index[0], slice(None), *index[1:])
    taken: Floats = x[chosen]  # (places, kernel..., channels)
    if not valid.all():
        taken = taken * valid[..., None]
    rows = np.moveaxis(taken, -1, 1).reshape(len(places), groups, -1)
    return np.ascontiguousarray(rows.swapaxes(0, 1))


def places_of(count: int, wanted: int, seed: int) -> NDArray[np.int64]:
    """Some of ``count`` places, in order, each once; the same for the same seed."""
    if wanted >= count:
        return np.arange(count)
    chosen = np.random.default_rng(seed).choice(count, wanted, replace=False, shuffle=False)
    return np.sort(chosen)


def at_places(y: Floats, places: NDArray[np.int64], groups: int) -> Floats:
    """The outputs of a convolution at some places, (groups, places, channels / groups).

    Args:
        y: the output, (batch, channels, ...).
    """
    output = y.shape[2:]
    batch, *spots = np.unravel_index(places, (y.shape[0], *output))
    chosen: Any = (batch, slice(None), *spots)
    taken = y[chosen].reshape(len(places), groups, -1)
    return np.ascontiguousarray(taken.swapaxes(0, 1))


def rows_at(x: Floats, places: NDArray[np.int64]) -> Floats:
    """Some rows of a tensor whose last axis holds the values of a row, (1, places, values)."""
    return np.ascontiguousarray(x.reshape(-1, x.shape[-1])[places][None])


def count_places(output: tuple[int, ...], *, spatial: bool) -> int:
    """How many places the output of a layer has, by its shape."""
    return output[0] * prod(output[2:]) if spatial else prod(output[:-1])
