"""What a layer multiplies its weight with: rows of inputs, one for each place of its output.

A Conv at one place of its output is the product of a row of inputs and the weight of each output
channel; so is a ConvTranspose, whose row is spread over fewer inputs, and a MatMul or Gemm, whose
rows are there already. Places lie along the batch and the spatial axes; a row holds the inputs of a
group in the order in which the weight stores them: channel, then kernel. Rows are taken from
several tensors of one shape at a time, for what is small in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    @lru_cache(maxsize=64)  # noqa: B019  (a window is a few numbers, and what it is asked for are small tables)
    def seen(
        self,
        axis: int,
        size: int,
        output: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Along an axis the inputs behind each tap of the kernel, (kernel, output), and whether
        there are any.
        """
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


def windowed(  # noqa: PLR0913
    xs: Sequence[NDArray[T]],
    places: NDArray[np.int64],
    output: tuple[int, ...],
    window: Window,
    groups: int,
    zero: int = 0,
) -> NDArray[T]:
    """Rows of a convolution, (tensors, groups, places, channels / groups * kernel).

    In memory the places come last.

    Args:
        xs: inputs of one shape, (batch, channels, ...).
        places: (tensors, places), indices into the batch and the spatial axes of the output, taken
            as one.
        output: the sizes of those spatial axes.
        zero: what stands for 0 around the input.
    """
    shape, rank, ones = xs[0].shape, len(window.kernel), [1] * len(window.kernel)
    spots: list[NDArray[np.int64]] = [
        spot.reshape(len(xs), *ones, places.shape[1])
        for spot in np.unravel_index(places, (shape[0], *output))
    ]
    index = spots[0]
    outside: NDArray[np.bool_] = np.zeros(1, bool)
    for axis, spot in enumerate(spots[1:]):
        found, inside = window.seen(axis, shape[2 + axis], output[axis])
        taps = np.arange(window.kernel[axis]).reshape(
            [-1 if other == axis else 1 for other in range(rank)] + [1],
        )
        index = index * shape[2 + axis] + found[taps, spot]
        if not inside.all():
            outside = outside | ~inside[taps, spot]
    index = index.reshape(len(xs), prod(window.kernel), places.shape[1])
    taken = np.empty((len(xs), shape[1], *index.shape[1:]), xs[0].dtype)
    for x, at, values in zip(xs, index, taken, strict=True):
        _planes(x).take(at, axis=1, out=values, mode="clip")  # which does not buffer
    if outside.any():
        beyond = np.broadcast_to(outside, (len(xs), *window.kernel, places.shape[1]))
        np.copyto(
            taken,
            np.array(zero, taken.dtype),
            where=beyond.reshape(index.shape)[:, None],
        )
    inputs = shape[1] // groups * prod(window.kernel)
    rows: NDArray[T] = taken.reshape(len(xs), groups, inputs, places.shape[1]).swapaxes(
        2,
        3,
    )
    return rows


def _planes(x: NDArray[T]) -> NDArray[T]:
    """(channels, everything else); without a copy for a batch of one."""
    planes: NDArray[T] = x.swapaxes(0, 1).reshape(
        x.shape[1],
        x.shape[0] * prod(x.shape[2:]),
    )
    return planes


def places_of(count: int, wanted: int, seeds: Sequence[int]) -> NDArray[np.int64]:
    """Some of ``count`` places in random order, each once, for each seed; (seeds, places).

    One is taken of each of as many equal stretches, so that they lie evenly.
    """
    wanted = min(count, wanted)
    ends = np.arange(wanted + 1) * count // max(1, wanted)
    draws = [np.random.default_rng(seed) for seed in seeds]
    shares = np.array([random.random(wanted) for random in draws]).reshape(
        len(draws),
        wanted,
    )
    places: NDArray[np.int64] = ends[:-1] + (shares * np.diff(ends)).astype(np.int64)
    for random, own in zip(draws, places, strict=True):
        random.shuffle(own)
    return places


def at_places(
    ys: Sequence[NDArray[T]],
    places: NDArray[np.int64],
    groups: int,
) -> NDArray[T]:
    """The outputs of a convolution at some places, (tensors, groups, places, channels / groups).

    Places last in memory.

    Args:
        ys: outputs of one shape, (batch, channels, ...).
        places: (tensors, places).
    """
    taken = np.empty((len(ys), ys[0].shape[1], places.shape[1]), ys[0].dtype)
    for y, at, values in zip(ys, places, taken, strict=True):
        _planes(y).take(at, axis=1, out=values, mode="clip")
    rows: NDArray[T] = taken.reshape(
        len(ys),
        groups,
        taken.shape[1] // groups,
        places.shape[1],
    ).swapaxes(2, 3)
    return rows


def rows_at(xs: Sequence[NDArray[T]], places: NDArray[np.int64]) -> NDArray[T]:
    """Some rows of tensors whose last axis holds the values of a row, (tensors, 1, places, values)."""  # noqa: E501
    rows = [
        x.reshape(-1, x.shape[-1]).take(at, axis=0)
        for x, at in zip(xs, places, strict=True)
    ]
    return np.stack(rows)[:, None]


def count_places(output: tuple[int, ...], *, spatial: bool) -> int:
    """How many places the output of a layer has, by its shape."""
    return output[0] * prod(output[2:]) if spatial else prod(output[:-1])
