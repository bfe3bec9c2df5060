"""Define floating-point formats of at most 16 bits, and round to them.

Follows the OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2), the OCP Microscaling Formats
(MX) Specification 1.0 (E3M2, E2M3, E2M1) and IEEE 754 (FP16); BF16 is the upper half of a float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quark_onnx.common.errors import ConfigError

Floats = NDArray[np.float64]

HALF_AWAY = 0
HALF_UP = 1
HALF_EVEN = 2


@dataclass(frozen=True)
class MiniFloat:
    """A format of a sign, ``exponent_bits`` and ``mantissa_bits``.

    With subnormals; values are never rounded to infinities.

    Attributes:
        name: name in the specification.
        exponent_bits: width of the exponent.
        mantissa_bits: width of the mantissa, without the leading 1 of normal numbers.
        bias: difference between the stored and the actual exponent.
        largest: greatest finite value.
        emax: exponent of ``largest``.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    emax: int

    @property
    def emin(self) -> int:
        """Exponent of the least normal number, and of the subnormals.

        >>> E4M3.emin
        -6
        """
        return 1 - self.bias


# OCP FP8: E4M3 has no infinities, and above 448 = 1.75 * 2^8 NaN alone. E5M2 is like IEEE 754,
# whose last exponent stands for infinities and NaN. FP6 and FP4 (OCP MX) have only finite values.
E4M3 = MiniFloat("E4M3", 4, 3, 7, 448.0, 8)
E5M2 = MiniFloat("E5M2", 5, 2, 15, 57344.0, 15)
E3M2 = MiniFloat("E3M2", 3, 2, 3, 28.0, 4)
E2M3 = MiniFloat("E2M3", 2, 3, 1, 7.5, 2)
E2M1 = MiniFloat("E2M1", 2, 1, 1, 6.0, 2)
FP16 = MiniFloat("FP16", 5, 10, 15, 65504.0, 15)
BF16 = MiniFloat("BF16", 8, 7, 127, 255 * 2.0**120, 127)


#: Rounding functions by the value of the vendor's attribute ``rounding_mode``.
_ROUNDINGS: dict[int, Callable[[Floats], Floats]] = {
    # Magnitudes are rounded, so that ties move away from zero on both sides of it.
    HALF_AWAY: lambda v: np.copysign(np.floor(np.abs(v) + 0.5), v),
    HALF_UP: lambda v: np.floor(v + 0.5),
    HALF_EVEN: np.rint,
}


def to_integer(v: Floats, rounding: int = HALF_EVEN) -> Floats:
    """Round to integers.

    Args:
        v: float64 with float32 values times powers of two, so that adding a half is exact where
            needed.
        rounding: direction of ties: 0 away from zero, 1 up, 2 to the even integer.

    Raises:
        ConfigError: the rounding is unknown.

    >>> [to_integer(np.array([0.5, 1.5, -0.5]), rounding).tolist() for rounding in (0, 1, 2)]
    [[1.0, 2.0, -1.0], [1.0, 2.0, 0.0], [0.0, 2.0, -0.0]]
    """
    if rounding not in _ROUNDINGS:
        raise ConfigError(
            f"rounding mode {rounding} is unknown; use 0 (half away), 1 (half up) or 2"
            " (half to even)",
        )
    return _ROUNDINGS[rounding](v)


def round_to(
    x: ArrayLike, format: MiniFloat, rounding: int = HALF_EVEN
) -> NDArray[np.float32]:
    """Round to the values of ``format``; larger values saturate, NaN stays NaN.

    Args:
        x: float32, any shape.
        format: the target format.
        rounding: direction of ties: 0 away from zero, 1 up, 2 to the even mantissa.

    Raises:
        ConfigError: the rounding is unknown.

    >>> round_to(np.float32([0.24, 0.26, 2.5, 3.5, 100, -100]), E2M1)
    array([ 0. ,  0.5,  2. ,  4. ,  6. , -6. ], dtype=float32)
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        wide = np.asarray(x, np.float32).astype(np.float64)
    # Below the least normal number, the step no longer shrinks: subnormals share its exponent.
    exponent = np.maximum(np.frexp(wide)[1] - 1, format.emin) - format.mantissa_bits
    # ldexp and float64 are exact here, so that only to_integer rounds; a carry into the next power
    # of two needs no case of its own.
    rounded = np.ldexp(to_integer(np.ldexp(wide, -exponent), rounding), exponent)
    saturated: Floats = np.clip(rounded, -format.largest, format.largest)
    return saturated.astype(np.float32)
