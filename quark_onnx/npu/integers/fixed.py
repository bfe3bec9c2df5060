"""Fixed: numbers as integers under one position and one divisor, so that sums and products are
exact.

Rounding happens in one place, ``rounded``, which is what an integer engine does at the end of an
operator: a shift to the right by the difference of positions. A value that would need more bits
than int64 has is an OverflowError, never a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Rounding = Literal["even", "up"]

#: Magnitudes stay below this, so that a sum of two and their rounding fit into int64.
_LIMIT = 1 << 60
#: Below this float64 holds every integer, and so every partial sum of a product, in whatever order
#: it is added up.
_EXACT = 1 << 53


@dataclass(frozen=True)
class Fixed:
    """The numbers ``values * 2**-position / divisor``.

    Attributes:
        values: whole numbers below 2**60.
        position: of the last bit; negative where it stands for more than 1.
        divisor: above 1 behind an average.

    Raises:
        OverflowError: a value does not fit.
    """

    values: Ints
    position: int
    divisor: int = 1

    def __post_init__(self) -> None:
        _fits(self.reach)

    @classmethod
    def exactly(cls, reals: NDArray[Any]) -> Fixed:
        """Floats, each of which is a whole number times a power of two.

        >>> Fixed.exactly(np.array([0.75, -2.0]))
        Fixed(values=array([ 3, -8]), position=2, divisor=1)
        """
        reals = np.asarray(reals, np.float64)
        if not np.isfinite(reals).all():
            raise OverflowError("a constant is infinite or no number")
        mantissa, exponent = np.frexp(reals[reals != 0])
        whole = np.ldexp(mantissa, 53).astype(np.int64)
        last = (
            exponent - 54 + np.frexp((whole & -whole).astype(np.float64))[1]
        )  # exponent of the last bit that is set
        position = -int(last.min()) if last.size else 0
        _fits(int(np.ceil(np.ldexp(np.abs(reals).max(initial=0), position))))
        return cls(np.ldexp(reals, position).astype(np.int64), position)

    @property
    def reach(self) -> int:
        """The greatest magnitude among the values."""
        return (
            max(-int(self.values.min()), int(self.values.max()))
            if self.values.size
            else 0
        )

    def reals(self) -> NDArray[np.float64]:
        """The nearest floats."""
        return np.ldexp(self.values.astype(np.float64), -self.position) / self.divisor

    def shaped(self, change: Callable[[Ints], Ints]) -> Fixed:
        """The same numbers at other places, or some of them."""
        return Fixed(change(self.values), self.position, self.divisor)


def aligned(parts: Sequence[Fixed]) -> tuple[list[Ints], int, int]:
    """The values of several numbers at the finest of their positions, that position, and their
    common divisor.
    """
    position, divisor = (
        max(part.position for part in parts),
        lcm(*(part.divisor for part in parts)),
    )
    found = []
    for part in parts:
        factor = (1 << (position - part.position)) * (divisor // part.divisor)
        _fits(part.reach * factor)
        found.append(part.values * factor if factor > 1 else part.values)
    return found, position, divisor


def together(function: Callable[..., Ints], *parts: Fixed) -> Fixed:
    """A function of numbers whose result has their unit: a sum, the greater of two."""
    values, position, divisor = aligned(parts)
    return Fixed(function(*values), position, divisor)


def times(first: Fixed, second: Fixed) -> Fixed:
    """The product of two, element by element; positions add up."""
    _fits(first.reach * second.reach)
    return Fixed(
        first.values * second.values,
        first.position + second.position,
        first.divisor * second.divisor,
    )


def summed(
    first: Fixed,
    second: Fixed,
    count: int,
    product: Callable[[Any, Any], NDArray[np.float64]],
) -> Fixed:
    """Sums of ``count`` products each, which float64 adds up without an error as long as they stay
    below 2**53.

    Args:
        product: makes the sums from both values in float64.
    """
    bound = count * first.reach * second.reach
    if bound >= _EXACT:
        raise OverflowError(
            f"its sums may need {bound.bit_length()} bits, and float64 is exact up to 53",
        )
    sums = product(first.values.astype(np.float64), second.values.astype(np.float64))
    return Fixed(
        sums.astype(np.int64),
        first.position + second.position,
        first.divisor * second.divisor,
    )


def rounded(number: Fixed, position: int, rounding: Rounding) -> Ints:
    """The nearest whole numbers of units ``2**-position``.

    A shift to the right by ``number.position - position``, of what half a unit was added to. Ties
    go to the even neighbour, as in QuantizeLinear (ONNX specification), or upward, as in the engine
    (DPU_ROUND: zmaychek84/vaip ad80269, 2025-03, to_xir_ops_pass.cpp; rounding mode 1 of amd-quark
    0.13, custom_ops/src/bfp_kernel.cc). Is the number the coarser one, the shift goes to the left
    and nothing is rounded.

    >>> halves = Fixed(np.array([-3, -1, 1, 3, 4]), 1)
    >>> rounded(halves, 0, "even"), rounded(halves, 0, "up")
    (array([-2,  0,  0,  2,  2]), array([-1,  0,  1,  2,  2]))
    """
    shift = number.position - position
    if shift < 0:
        _fits(number.reach << -shift)
    doubled = 2 * number.values << max(0, -shift)
    # beyond the limit all values are less than half a unit, whatever it is
    unit = min(number.divisor << max(0, shift), 2 * _LIMIT)
    above = doubled + unit
    nearest: Ints = above // (2 * unit)
    if rounding == "even":
        nearest = nearest - (nearest & (above == 2 * unit * nearest))
    return nearest


def _fits(magnitude: int) -> None:
    if magnitude >= _LIMIT:
        raise OverflowError(f"it needs integers of {magnitude.bit_length() + 1} bits")
