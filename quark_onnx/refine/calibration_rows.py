"""Rows of calibration samples for the optimization of a layer."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from quark_onnx.kernels.parallel import side_by_side, slabs
from quark_onnx.optimizers.problem import Floats, SampledRows

#: Groups that a thread shuffles at a time.
_GROUPS = 16


class Room:
    """A buffer for the rows of one layer after another.

    Allocation takes longer than filling the rows.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)

    def empty(self, *shapes: tuple[int, ...]) -> list[Floats]:
        """Return uninitialized arrays.

        Arrays of earlier calls are overwritten.

        Args:
            *shapes: the shapes, at least one.

        Returns:
            A float32 array per shape; all of them are views of the buffer.
        """
        ends = np.cumsum(list(map(prod, shapes))).tolist()
        # The buffer only grows: layers of one model need similar sizes.
        if ends[-1] > self._memory.size:
            self._memory = np.empty(ends[-1], np.float32)
        parts = (self._memory[start:end] for start, end in pairwise([0, *ends]))
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class Mix:
    """Shuffled rows of several samples.

    Products of many groups with one output each are fastest with rows along the last axis. Such
    rows are stored sample by sample and shuffled at the end, because immediate shuffling would
    scatter single numbers.
    """

    def __init__(
        self, shape: tuple[int, ...], samples: int, each: int, room: Room
    ) -> None:
        """Allocate the rows.

        Args:
            shape: shape of the weight, (groups, outputs, inputs).
            samples: number of samples.
            each: maximum rows per sample.
            room: the buffer.
        """
        groups, outputs, inputs = shape
        self._samples, self._each, self._deep = samples, each, outputs == 1
        rows = samples * each
        # Outputs of depthwise convolutions: (groups, values, rows) in memory, (groups, rows,
        # values) in use.
        if self._deep:
            arrays = room.empty((groups, inputs, rows), (groups, outputs, rows))
            self._arrays = [array.swapaxes(1, 2) for array in arrays]
        else:
            self._arrays = room.empty((groups, rows, inputs), (groups, rows, outputs))
        self._counts = [0] * samples

    def put(self, at: int, *parts: Floats) -> None:
        """Add the rows of the samples from position ``at`` on.

        Args:
            at: position of the first sample.
            parts: inputs and targets, (samples, groups, rows, values).
        """
        count, rows = len(parts[0]), parts[0].shape[2]
        # Samples may have fewer rows than ``each``; the rest of their places is not used.
        self._counts[at : at + count] = [rows] * count
        for array, part in zip(self._arrays, parts, strict=True):
            groups, _, values = array.shape
            if self._deep:
                view = array.reshape(groups, self._samples, self._each, values)
                view[:, at : at + count, :rows] = part.swapaxes(0, 1)
            else:
                # Samples along the inner axis: consecutive rows come from different samples, and
                # any slice of the rows is a mixed batch.
                view = array.reshape(groups, self._each, self._samples, values)
                view[:, :rows, at : at + count] = part.transpose(1, 2, 0, 3)

    def mixed(self) -> SampledRows:
        """Return the shuffled rows, without non-finite rows.

        The rows may be views of the buffer, which the rows of the next layer overwrite.
        """
        if self._deep:
            # Exhausts the iterator, which does the work.
            for _ in side_by_side(self._mix, slabs(len(self._arrays[0]), _GROUPS)):
                pass
        # The sum is one pass without a mask; a sum that overflows takes the exact test below.
        if min(self._counts) == self._each and all(map(_sums_up, self._arrays)):
            return SampledRows(*self._arrays)
        # (each, samples) as one axis: the places that ``put`` has filled.
        usable = (np.arange(self._each)[:, None] < self._counts).reshape(-1)
        for array in self._arrays:
            usable &= finite(array)
        return SampledRows(*[array[:, usable] for array in self._arrays])

    def _mix(self, groups: slice) -> None:
        """Interleave the rows of groups in place: one row of each sample after another."""
        # From sample by sample to one row of each sample after another.
        for group in (group for array in self._arrays for group in array[groups]):
            deep = group.T
            deep[:] = (
                deep.reshape(-1, self._samples, self._each)
                .swapaxes(1, 2)
                .reshape(deep.shape)
            )


@np.errstate(over="ignore", invalid="ignore")
def _sums_up(rows: Floats) -> bool:
    """Return whether the sum of rows is finite, which implies finite values."""
    return bool(np.isfinite(rows.sum()))


def finite(rows: Floats) -> NDArray[np.bool_]:
    """Return a mask of the finite rows.

    Args:
        rows: (groups, rows, values).
    """
    mask: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(rows), axis=(0, 2))
    return mask
