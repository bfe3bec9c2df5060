"""Collect the rows that a layer's optimization reads, from several samples."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from quark_onnx.kernels.parallel import side_by_side
from quark_onnx.optimizers.problem import Floats, Rows


class Room:
    """Memory for the rows of one layer after the other: to ask the system for it takes longer than
    to fill it.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)

    def empty(self, *shapes: tuple[int, ...]) -> list[Floats]:
        """Arrays with whatever was there before.

        Those that were given out earlier are overwritten.
        """
        ends = np.cumsum([prod(shape) for shape in shapes]).tolist()
        if ends[-1] > self._memory.size:
            self._memory = np.empty(ends[-1], np.float32)
        parts = (self._memory[start:end] for start, end in pairwise([0, *ends]))
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class Mix:
    """Rows of several samples on their way into the order in which they are learned from.

    Many groups of one output each are multiplied fastest where the rows come last in memory. Those
    are put down sample by sample, and mixed at the end: to do so at once would scatter single
    numbers.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        samples: int,
        each: int,
        room: Room,
    ) -> None:
        """``shape``: of the weight, (groups, outputs, inputs).

        ``each``: rows of a sample, at most.
        """
        groups, outputs, inputs = shape
        self._samples, self._each, self._deep = samples, each, outputs == 1
        rows = samples * each
        if self._deep:
            arrays = room.empty((groups, inputs, rows), (groups, outputs, rows))
            self._arrays = [array.swapaxes(1, 2) for array in arrays]
        else:
            self._arrays = room.empty((groups, rows, inputs), (groups, rows, outputs))
        self._counts = [0] * samples

    def put(self, at: int, *parts: Floats) -> None:
        """Take in the rows of the samples from a place on.

        Inputs and targets, (samples, groups, rows, values).
        """
        count, rows = len(parts[0]), parts[0].shape[2]
        self._counts[at : at + count] = [rows] * count
        for whole, part in zip(self._arrays, parts, strict=True):
            if self._deep:
                own = whole.reshape(
                    len(whole),
                    self._samples,
                    self._each,
                    whole.shape[2],
                )[:, at : at + count, :rows]
                own[:] = part.swapaxes(0, 1)
            else:
                own = whole.reshape(
                    len(whole),
                    self._each,
                    self._samples,
                    whole.shape[2],
                )[:, :rows, at : at + count]
                own[:] = part.transpose(1, 2, 0, 3)

    def mixed(self) -> Rows:
        """All rows; without those that hold something that is no number."""
        if self._deep:
            for _ in side_by_side(self._mix, range(len(self._arrays[0]))):
                pass
        if min(self._counts) == self._each and all(map(_sums_up, self._arrays)):
            return Rows(*self._arrays)
        usable = (np.arange(self._each)[:, None] < self._counts).reshape(-1)
        for array in self._arrays:
            usable &= finite(array)
        return Rows(*[array[:, usable] for array in self._arrays])

    def _mix(self, group: int) -> None:
        for array in self._arrays:
            deep = array[group].T
            deep[:] = (
                deep.reshape(-1, self._samples, self._each)
                .swapaxes(1, 2)
                .reshape(deep.shape)
            )


@np.errstate(over="ignore", invalid="ignore")
def _sums_up(rows: Floats) -> bool:
    """Whether the sum of all is a number; then each of them is one."""
    return bool(np.isfinite(rows.sum()))


def finite(rows: Floats) -> NDArray[np.bool_]:
    """Which rows of (groups, rows, values) hold numbers alone."""
    found: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(rows), axis=(0, 2))
    return found
