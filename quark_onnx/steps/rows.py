"""rows: what a layer learns from, put together from the rows of several samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quark_onnx.kernels.parallel import side_by_side
from quark_onnx.optimizers.problem import Floats, Rows


class Mix:
    """Rows of several samples on their way into the order in which they are learned from.

    Many groups of one output each are multiplied fastest where the rows come last in memory. Those are put down sample
    by sample, and mixed at the end: to do so at once would scatter single numbers.
    """

    def __init__(self, shape: tuple[int, ...], samples: int, each: int) -> None:
        """``shape``: of the weight, (groups, outputs, inputs); ``each``: rows of a sample, at most."""
        groups, outputs, inputs = shape
        self._samples, self._each, self._deep = samples, each, outputs == 1
        self._arrays = [self._empty(groups, size) for size in (inputs, outputs)]
        self._counts = [0] * samples

    def _empty(self, groups: int, size: int) -> Floats:
        """(groups, rows, size) in the order of memory that serves best."""
        rows = self._samples * self._each
        if self._deep:
            deep: Floats = np.zeros((groups, size, rows), np.float32).swapaxes(1, 2)
            return deep
        return np.zeros((groups, rows, size), np.float32)

    def put(self, at: int, *parts: Floats) -> None:
        """Take in the rows of the sample at a place; inputs and targets."""
        count = self._counts[at] = parts[0].shape[1]
        first, step = (at * self._each, 1) if self._deep else (at, self._samples)
        for whole, part in zip(self._arrays, parts, strict=True):
            whole[:, first : first + count * step : step] = part

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
            deep[:] = deep.reshape(-1, self._samples, self._each).swapaxes(1, 2).reshape(deep.shape)


@np.errstate(over="ignore", invalid="ignore")
def _sums_up(rows: Floats) -> bool:
    """Whether the sum of all is a number; then each of them is one."""
    return bool(np.isfinite(rows.sum()))


def finite(rows: Floats) -> NDArray[np.bool_]:
    """Which rows of (groups, rows, values) hold numbers alone."""
    found: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(rows), axis=(0, 2))
    return found
