"""Round weights to the values of a quantization grid, or to both neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Levels:
    """Possible values of a weight: levels times a scale.

    Attributes:
        scale: scale of each weight, float32, of the weight's shape; ``nearest`` also takes a shape
            that broadcasts to it, for all three arrays.
        levels: levels in ascending order; empty for integers.
        least: least integers, of the weight's shape; unused with ``levels``.
        greatest: greatest integers, of the weight's shape; unused with ``levels``.
    """

    scale: Floats
    levels: Floats
    least: Floats
    greatest: Floats

    @property
    def ends(self) -> tuple[Floats, Floats]:
        """Least and greatest level, of the weight's shape."""
        if not self.levels.size:
            return self.least, self.greatest
        return (
            np.full_like(self.least, self.levels[0]),
            np.full_like(self.greatest, self.levels[-1]),
        )

    def times(self, factor: NDArray[np.float64]) -> Levels:
        """Return the same codes under scales times a factor per output, (groups, outputs)."""
        return replace(self, scale=self.scale * factor[..., None].astype(np.float32))

    def part(self, position: tuple[Any, ...]) -> Levels:
        """Return the levels of a part of the weight, by an index of its groups and outputs."""
        return self.mapped(lambda field: field[position])

    def mapped(self, change: Callable[[Floats], Floats]) -> Levels:
        """Return the levels of a weight that a change rearranges."""
        return replace(
            self,
            scale=change(self.scale),
            least=change(self.least),
            greatest=change(self.greatest),
        )

    def nearest(self, weight: NDArray[np.float64]) -> Floats:
        """Round each weight to a level, as QuantizeLinear does."""
        # Division in float32, as QuantizeLinear computes it: a product with the reciprocal rounds
        # ties to another code.
        units = weight.astype(np.float32) / self.scale
        if not self.levels.size:
            codes: Floats = np.clip(np.rint(units), self.least, self.greatest)
            return codes * self.scale
        below, above = self._around(units)
        # Ties to even (IEEE 754): among sorted levels, mantissas alternate, and that of 0 is even.
        parity = np.searchsorted(self.levels, 0.0) % 2
        even = np.searchsorted(self.levels, below) % 2 == parity
        from_below = units - below
        from_above = above - units
        lower = (from_below < from_above) | ((from_below == from_above) & even)
        return np.where(lower, below, above) * self.scale

    def neighbours(self, weight: NDArray[np.float64]) -> tuple[Floats, Floats]:
        """Return the values below and above each weight; the last two beyond the ends."""
        units = weight.astype(np.float32) / self.scale
        if self.levels.size:
            below, above = self._around(units)
            return below * self.scale, above * self.scale
        # `below` stops one short of the end, so that both neighbours are codes.
        last = np.maximum(self.greatest - 1, self.least)
        below = np.clip(np.floor(units), self.least, last)
        above = np.minimum(below + 1, self.greatest)
        return below * self.scale, above * self.scale

    def _around(self, units: Floats) -> tuple[Floats, Floats]:
        """Return the levels below and above each weight, in units of the scale."""
        # Index of the last level at or below each weight.
        index = np.searchsorted(self.levels, units, side="right") - 1
        # Beyond the ends both neighbours are the last two levels, so that rounding saturates.
        index = index.clip(0, self.levels.size - 2)
        return self.levels[index], self.levels[index + 1]
