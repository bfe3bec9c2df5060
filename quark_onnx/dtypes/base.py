"""What the rest of the package knows about a number format: a row of a table, of one of three
families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from calibrators import Grid, QParams, quantize

_FLOAT4 = np.dtype(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT4E2M1))


@dataclass(frozen=True)
class DType:
    """A row of the table of formats.

    Attributes:
        name: how configurations call it.
        bits: width of a value as it is stored, shared exponents not counted.
        min_opset: first opset that can express it.
    """

    name: str
    bits: int
    min_opset: int

    @property
    def scaled(self) -> bool:
        """Whether it needs a scale that is found by calibration."""
        return isinstance(self, Scaled)

    @property
    def uniform(self) -> bool:
        """Whether its steps are alike everywhere, so that a wide range leaves nothing for small
        values.
        """
        return isinstance(self, Integer)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Scaled(DType):
    """Codes of QuantizeLinear and DequantizeLinear, with a scale.

    Attributes:
        onnx: the ``TensorProto.DataType`` of the codes.
        numpy: the type that stores them. qmin, qmax: the least and the greatest code. emitted,
        read: whether QuantizeLinear writes it and DequantizeLinear reads it; otherwise a vendor's
        does.
    """

    onnx: int
    numpy: np.dtype[Any]
    qmin: int
    qmax: int
    emitted: bool = True
    read: bool = True

    @property
    def signed(self) -> bool:
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
        """The codes as calibration sees them.

        Args:
            symmetric: the zero point is fixed in the middle.
            pow2: the scale is a power of two.
            narrow: leave out the least code of a signed format, so that codes are symmetric too.
            bits: use only so many bits; 0 for all.
            half: scales are float16 numbers.
        """
        raise NotImplementedError

    def encode(self, array: NDArray[Any], params: QParams, grid: Grid) -> NDArray[Any]:
        """The codes of an array, of type ``numpy`` and of the array's shape."""
        raise NotImplementedError


@dataclass(frozen=True)
class Integer(Scaled):
    """Two's complement or unsigned integers.

    The type that stores them may have more codes: int8 those of a format of 6 bits.
    """

    @property
    def storable(self) -> tuple[int, int]:
        """The least and the greatest code of the type that stores them."""
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
        spare = 1 << (self.bits - bits) if bits else 1
        qmin, qmax = self.qmin // spare, (self.qmax + 1) // spare - 1
        return Grid(qmin + (narrow and self.signed), qmax, symmetric, pow2, half)

    def encode(self, array: NDArray[Any], params: QParams, grid: Grid) -> NDArray[Any]:
        return quantize(array, params, grid, self.numpy)


@dataclass(frozen=True)
class Minifloat(Scaled):
    """Floats of 8 bits and fewer.

    The scale brings the greatest magnitude to the greatest code, zero stays zero.
    """

    @property
    def levels(self) -> NDArray[np.float32]:
        """The finite values, in ascending order."""
        values = (
            np.arange(1 << self.bits, dtype=np.uint8)
            .view(self._element)
            .astype(np.float32)
        )
        return np.unique(values[np.isfinite(values)])

    @property
    def _element(self) -> np.dtype[Any]:
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
        return Grid(self.qmin, self.qmax, True, pow2, half)

    def encode(self, array: NDArray[Any], params: QParams, grid: Grid) -> NDArray[Any]:
        scale, _ = params.spread(array.shape)
        codes: NDArray[Any] = np.clip(
            np.asarray(array, np.float32) / scale,
            self.qmin,
            self.qmax,
        ).astype(self.numpy)
        return codes


@dataclass(frozen=True)
class Float4(Minifloat):
    """Floats of 4 bits, whose codes are stored as their bit patterns: onnxruntime has no operator
    for the type.
    """

    @property
    def _element(self) -> np.dtype[Any]:
        return _FLOAT4

    def encode(self, array: NDArray[Any], params: QParams, grid: Grid) -> NDArray[Any]:
        scale, _ = params.spread(array.shape)
        reals = np.clip(np.asarray(array, np.float32) / scale, self.qmin, self.qmax)
        codes: NDArray[Any] = reals.astype(_FLOAT4).view(np.uint8).astype(self.numpy)
        return codes


@dataclass(frozen=True)
class Half(DType):
    """Sixteen-bit floats: a cast there and back.

    Attributes:
        onnx: the ``TensorProto.DataType``.
        numpy: the type that stores it.
        largest: the greatest finite value.
    """

    onnx: int
    numpy: np.dtype[Any]
    largest: float


@dataclass(frozen=True)
class Block(DType):
    """Blocks of values that share an exponent, as one node of the vendor's domain.

    Attributes:
        op_type: of the node, in the domain ``com.amd.quark``.
        attributes: of the node; ``axis`` comes from the plan.
        block_size: values to a block.
    """

    op_type: str
    attributes: tuple[tuple[str, Any], ...]
    block_size: int

    @property
    def element(self) -> str:
        """The element type of a microscaling format, as the node calls it.

        Empty for block floating point.
        """
        return str(dict(self.attributes).get("element_dtype", ""))
