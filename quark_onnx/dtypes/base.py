"""Define the families of number formats: scaled codes, 16-bit floats, and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from calibrators import Grid, QParams, quantize

_FLOAT4 = np.dtype(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT4E2M1))
#: Bits of the smallest formats whose reduced range is symmetric in onnxruntime.
_BYTE = 8


@dataclass(frozen=True)
class DType:
    """A number format.

    Attributes:
        name: name in configurations.
        bits: width of a stored value, without shared exponents.
        min_opset: first opset that can express the format.
    """

    name: str
    bits: int
    min_opset: int

    @property
    def scaled(self) -> bool:
        """Whether the format needs a scale from calibration."""
        return isinstance(self, Scaled)

    @property
    def uniform(self) -> bool:
        """Whether steps are equal everywhere, so that a wide range rounds small values to 0."""
        return isinstance(self, Integer)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Scaled(DType):
    """Codes of QuantizeLinear and DequantizeLinear, with a scale.

    Attributes:
        onnx: ``TensorProto.DataType`` of the codes.
        numpy: type of the stored codes.
        qmin: least code.
        qmax: greatest code.
        emitted: QuantizeLinear writes the codes; otherwise a vendor's operator does.
        read: DequantizeLinear reads the codes; otherwise a vendor's operator does.
    """

    onnx: int
    numpy: np.dtype[Any]
    qmin: int
    qmax: int
    emitted: bool = True
    read: bool = True

    @property
    def signed(self) -> bool:
        """Whether the format has negative codes."""
        return self.qmin < 0

    def grid(
        self,
        *,
        symmetric: bool,
        pow2: bool = False,
        narrow: bool = False,
        bits: int = 0,
        half: bool = False,
    ) -> Grid:
        """Return the integer codes as calibration sees them.

        Args:
            symmetric: the zero point is fixed in the middle.
            pow2: the scale is a power of two.
            narrow: omit the least code of a signed format, so that codes are symmetric too.
            bits: number of bits to use; 0 for all.
            half: scales are float16 numbers.
        """
        raise NotImplementedError

    def encode(self, array: NDArray[Any], params: QParams, grid: Grid) -> NDArray[Any]:
        """Quantize an array to codes of type ``numpy`` in its shape."""
        raise NotImplementedError


@dataclass(frozen=True)
class Integer(Scaled):
    """Two's complement or unsigned integers.

    The type that stores them may have more codes: int8 those of a format of 6 bits.
    """

    @property
    def storable(self) -> tuple[int, int]:
        """The least and the greatest code of the storage type."""
        info = ml_dtypes.iinfo(self.numpy)  # type: ignore[no-untyped-call]
        return int(info.min), int(info.max)

    def grid(
        self,
        *,
        symmetric: bool,
        pow2: bool = False,
        narrow: bool = False,
        bits: int = 0,
        half: bool = False,
    ) -> Grid:
        """Return the integer codes as calibration sees them."""
        spare = 1 << (self.bits - bits) if bits else 1
        # Fewer bits divide the ends: -128 to 127 with 4 of 8 bits become -8 to 7.
        qmin = self.qmin // spare
        qmax = (self.qmax + 1) // spare - 1
        if symmetric and self.signed and spare > 1 and self.bits >= _BYTE:
            # -64 to 64 for int8, as in onnxruntime: the type has room for both ends, and the sum of
            # two products with 255 stays within int16.
            qmax = -qmin
        else:
            # A bool adds 1 to the least code: -127 to 127 for int8.
            qmin += narrow and self.signed
        return Grid(qmin, qmax, symmetric, pow2, half)

    def encode(self, array: NDArray[Any], params: QParams, grid: Grid) -> NDArray[Any]:
        """Quantize an array to codes of type ``numpy``."""
        return quantize(array, params, grid, self.numpy)


@dataclass(frozen=True)
class Minifloat(Scaled):
    """Floats of at most 8 bits.

    The scale maps the greatest magnitude to the greatest code; zero stays zero.
    """

    @property
    def levels(self) -> NDArray[np.float32]:
        """Finite values in ascending order."""
        # All bit patterns of the format, read as its numbers; sub-byte types of ml_dtypes lie in a
        # byte each.
        patterns = np.arange(1 << self.bits, dtype=np.uint8)
        values = patterns.view(self.element_dtype).astype(np.float32)
        # Two zeros, NaN and infinities are no levels.
        return np.unique(values[np.isfinite(values)])

    @property
    def element_dtype(self) -> np.dtype[Any]:
        """The numpy type whose values the codes stand for."""
        return self.numpy

    def grid(
        self,
        *,
        symmetric: bool,
        pow2: bool = False,
        narrow: bool = False,
        bits: int = 0,
        half: bool = False,
    ) -> Grid:
        """Return the integer codes as calibration sees them."""
        # Floats have both signs and a zero of their own, so that the grid is always symmetric.
        return Grid(self.qmin, self.qmax, True, pow2, half)

    def encode(self, array: NDArray[Any], params: QParams, grid: Grid) -> NDArray[Any]:
        """Quantize an array to codes of type ``numpy``."""
        scale, _ = params.spread(array.shape)
        # Clipped first: beyond the greatest value, casts to FP8 give NaN (E4M3FN) or infinity
        # (E5M2). The cast itself rounds half to even.
        reals = np.clip(np.asarray(array, np.float32) / scale, self.qmin, self.qmax)
        codes: NDArray[Any] = reals.astype(self.element_dtype)
        return codes


@dataclass(frozen=True)
class Float4(Minifloat):
    """Floats of 4 bits, stored as bit patterns: onnxruntime has no operator for the type."""

    @property
    def element_dtype(self) -> np.dtype[Any]:
        """The numpy type whose values the codes stand for."""
        return _FLOAT4

    def encode(self, array: NDArray[Any], params: QParams, grid: Grid) -> NDArray[Any]:
        """Quantize an array to codes of type ``numpy``."""
        # FP4 E2M1 has neither infinity nor NaN; the clip saturates at 6.
        values = super().encode(array, params, grid)
        # The four bits as an unsigned integer, which ONNX can store as UINT4.
        return values.view(np.uint8).astype(self.numpy)


@dataclass(frozen=True)
class Half(DType):
    """16-bit floats: a cast there and back.

    Attributes:
        onnx: ``TensorProto.DataType`` of the format.
        numpy: type of the stored values.
        largest: greatest finite value.
    """

    onnx: int
    numpy: np.dtype[Any]
    largest: float


@dataclass(frozen=True)
class Block(DType):
    """Blocks of values with a shared exponent, as a node of the vendor's domain.

    Attributes:
        op_type: operator in the domain ``com.amd.quark``.
        attributes: attributes of the node, except ``axis``, which comes from the plan.
        block_size: values in a block.
    """

    op_type: str
    attributes: tuple[tuple[str, Any], ...]
    block_size: int

    @property
    def element(self) -> str:
        """Element type of a microscaling format as in the node; empty for block floating point."""
        return str(dict(self.attributes).get("element_dtype", ""))
