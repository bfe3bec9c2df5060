"""Fixed-point numbers: integers with a common position and divisor.

Sums and products are exact. Rounding happens in one function, ``rounded``, as an integer engine
does at the end of an operator: a shift to the right by the difference of positions. A value beyond
int64 raises OverflowError, and never wraps around.
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

#: Magnitudes stay below this limit, so that the rounded sum of two values fits into int64.
_LIMIT = 1 << 60
#: Below this limit float64 is exact for integers, and for partial sums of a product in any order.
_EXACT = 1 << 53


@dataclass(frozen=True)
class Fixed:
    """Fixed-point numbers ``values * 2**-position / divisor``.

    Attributes:
        values: integers below 2**60.
        position: position of the last bit; negative if the last bit is worth more than 1.
        divisor: above 1 after an average.

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
        """Represent floats exactly, as integers times a power of two.

        >>> Fixed.exactly(np.array([0.75, -2.0]))
        Fixed(values=array([ 3, -8]), position=2, divisor=1)
        """
        # float16, bfloat16 and float32 convert exactly.
        reals = np.asarray(reals, np.float64)
        if not np.isfinite(reals).all():
            raise OverflowError("a constant is infinite or no number")
        # float64 has 53 bits of mantissa, so that every mantissa times 2**53 is an integer.
        mantissa, exponent = np.frexp(reals[reals != 0])
        whole = np.ldexp(mantissa, 53).astype(np.int64)
        # whole & -whole is the lowest set bit 2**k, of which frexp returns the exponent k + 1.
        lowest = np.frexp((whole & -whole).astype(np.float64))[1]
        # Exponents of the last bits that are set. Zeros alone have none: any position represents
        # them.
        last = exponent - 54 + lowest
        position = -int(last.min()) if last.size else 0
        _fits(int(np.ceil(np.ldexp(np.abs(reals).max(initial=0), position))))
        return cls(np.ldexp(reals, position).astype(np.int64), position)

    @property
    def reach(self) -> int:
        """Return the greatest magnitude of the values."""
        if not self.values.size:
            return 0
        return max(-int(self.values.min()), int(self.values.max()))

    def reals(self) -> NDArray[np.float64]:
        """Return the values as floats, rounded to nearest."""
        return np.ldexp(self.values.astype(np.float64), -self.position) / self.divisor

    def shaped(self, change: Callable[[Ints], Ints]) -> Fixed:
        """Apply a move or a selection to the values."""
        return Fixed(change(self.values), self.position, self.divisor)


def aligned(parts: Sequence[Fixed]) -> tuple[list[Ints], int, int]:
    """Align several numbers at the finest position and the common divisor.

    Returns:
        The values, the position and the divisor.
    """
    # The greatest position has the finest unit.
    position = max(part.position for part in parts)
    divisor = lcm(*(part.divisor for part in parts))
    values = []
    for part in parts:
        # Exact, as positions and divisors only grow.
        factor = (1 << (position - part.position)) * (divisor // part.divisor)
        _fits(part.reach * factor)
        values.append(part.values * factor if factor > 1 else part.values)
    return values, position, divisor


def together(function: Callable[..., Ints], *parts: Fixed) -> Fixed:
    """Apply a function whose result has the unit of its arguments: a sum, a maximum."""
    values, position, divisor = aligned(parts)
    return Fixed(function(*values), position, divisor)


def times(first: Fixed, second: Fixed) -> Fixed:
    """Multiply element by element; positions add up."""
    # Python integers do not overflow: the bound is checked before numpy multiplies in int64.
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
    """Compute sums of ``count`` products each, in float64.

    float64 is exact for sums below 2**53.

    Args:
        first: first factor.
        second: second factor.
        count: number of products in a sum.
        product: function that computes the sums from both factors in float64.

    Raises:
        OverflowError: a sum may need more than 53 bits.
    """
    # The worst case, in which all products have the same sign: any partial sum stays below it.
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
    """Round to nearest multiples of ``2**-position``, and return their integers.

    The result is a shift to the right by ``number.position - position``, after adding half a unit.
    Ties go to the even neighbour, as in QuantizeLinear (ONNX specification), or upward, as in the
    engine (DPU_ROUND: zmaychek84/vaip ad80269, 2025-03, to_xir_ops_pass.cpp; rounding mode 1 of
    amd-quark 0.13, custom_ops/src/bfp_kernel.cc). If the number is coarser than the result, the
    shift goes to the left and is exact.

    >>> halves = Fixed(np.array([-3, -1, 1, 3, 4]), 1)
    >>> rounded(halves, 0, "even"), rounded(halves, 0, "up")
    (array([-2,  0,  0,  2,  2]), array([-1,  0,  1,  2,  2]))
    """
    # The unit of the result is 2**shift units of the number, times the divisor.
    shift = number.position - position
    if shift < 0:
        _fits(number.reach << -shift)
    # floor(v / unit + 1/2) = floor((2 v + unit) / (2 unit)), in integers.
    # Below 2**61 by the limit of 2**60 on magnitudes.
    doubled = 2 * number.values << max(0, -shift)
    # beyond the limit all values round to zero for any unit
    unit = min(number.divisor << max(0, shift), 2 * _LIMIT)
    above = doubled + unit
    nearest: Ints
    if unit & (unit - 1):
        nearest = above // (2 * unit)
    else:  # a shift, which is faster, rounds down as well
        nearest = above >> unit.bit_length()
    if rounding == "even":
        # A division without a remainder is a tie, which went up: an odd result is one too high.
        nearest = nearest - (nearest & (above == 2 * unit * nearest))
    return nearest


def _fits(magnitude: int) -> None:
    """Raise OverflowError for a magnitude of 2**60 or more."""
    if magnitude >= _LIMIT:
        raise OverflowError(f"it needs integers of {magnitude.bit_length() + 1} bits")
