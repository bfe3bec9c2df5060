"""What the rest of the package knows about a number format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibrators import Grid
from quark_onnx.registry import DTYPES


@dataclass(frozen=True)
class DType:
    """A row of the table of formats.

    Attributes:
        name: how configurations call it.
        onnx: the ``TensorProto.DataType``.
        numpy: the type that stores its codes.
        bits: width of a code.
        qmin, qmax: the least and the greatest code.
        min_opset: first opset whose QuantizeLinear and DequantizeLinear know the format.
    """

    name: str
    onnx: int
    numpy: np.dtype[np.generic]
    bits: int
    qmin: int
    qmax: int
    min_opset: int

    @property
    def signed(self) -> bool:
        return self.qmin < 0

    def grid(self, *, symmetric: bool, pow2: bool = False, narrow: bool = False, bits: int = 0) -> Grid:
        """The codes as calibration sees them.

        Args:
            symmetric: the zero point is fixed in the middle.
            pow2: the scale is a power of two.
            narrow: leave out the least code of a signed format, so that codes are symmetric too.
            bits: use only so many bits; 0 for all.
        """
        spare = 1 << (self.bits - bits) if bits else 1
        qmin, qmax = self.qmin // spare, (self.qmax + 1) // spare - 1
        return Grid(qmin + (narrow and self.signed), qmax, symmetric, pow2)

    def __str__(self) -> str:
        return self.name


def integer(name: str, onnx: int, bits: int, signed: bool, min_opset: int) -> DType:
    """Register an integer format."""
    qmin = -(1 << (bits - 1)) if signed else 0
    row = DType(name, onnx, np.dtype(name), bits, qmin, qmin + (1 << bits) - 1, min_opset)
    DTYPES.add(name, row)
    return row
