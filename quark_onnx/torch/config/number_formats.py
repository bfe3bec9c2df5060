"""Number formats of PyTorch models: ONNX formats, and formats without ONNX type."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto, helper

from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.registry import DTYPES
from quark_onnx.dtypes import INT4, Block, DType, Integer, Minifloat
from quark_onnx.kernels.minifloat import E2M1, E2M3, E3M2, E4M3, E5M2, MiniFloat


def _narrow(name: str, bits: int, signed: bool) -> Integer:
    """Return an integer format of fewer than four bits; signed codes are in two's complement."""
    # A code takes a byte in memory. Checkpoints and exports pack codes to their own widths.
    onnx, least = TensorProto.UINT8, 0
    if signed:
        onnx, least = TensorProto.INT8, -(1 << bits - 1)
    storage = helper.tensor_dtype_to_np_dtype(onnx)
    return Integer(
        name,
        bits,
        # No opset: neither QuantizeLinear nor DequantizeLinear has the type.
        0,
        onnx,
        storage,
        least,
        least + (1 << bits) - 1,
        emitted=False,
        read=False,
    )


@dataclass(frozen=True)
class TwoLevel(DType):
    """FP4 block format with FP8 (E4M3) block scales and a float32 global scale (NVFP4).

    Attributes:
        block_size: values per block.
    """

    block_size: int


NVFP4 = TwoLevel("nvfp4", 4, 0, 16)


@dataclass(frozen=True)
class FloatScaled(DType):
    """FP4 block format with unsigned 8-bit float scales (E5M3): AMD's FP4.

    Attributes:
        block_size: values per block.
    """

    block_size: int


#: Unsigned, 5 bits of exponent and 3 of mantissa: the scales of AMD's FP4. The greatest
#: code is NaN, so that the greatest value is 1.75 * 2^16.
E5M3 = MiniFloat("E5M3", 5, 3, 15, 114688.0, 16)


@dataclass(frozen=True)
class Progressive(Integer):
    """4-bit integers whose scales are products: a per-tensor and a per-channel factor.

    AMD Quark calls the format progressive, because it quantizes in two stages: to FP8 first, then
    the FP8 codes to integers. A kernel reads the integers as FP8, and multiplies by both factors.
    """


# The same codes as int4 in a class of their own, since the scales are stored as two factors.
INT4_FP8 = Progressive(**vars(INT4) | {"name": "int4fp8"})

#: Formats without a type in ONNX, or with a type since ONNX 1.20.
_OWN: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        _narrow("int3", 3, True),
        _narrow("uint3", 3, False),
        _narrow("int2", 2, True),
        _narrow("uint2", 2, False),
        NVFP4,
        FloatScaled("amdfp4", 4, 0, 16),
        FloatScaled("amdfp4g32", 4, 0, 32),
        INT4_FP8,
    )
}
#: The elements of the microscaling formats that are floats.
_ELEMENTS = {
    "mxfp8e4m3": E4M3,
    "mxfp8e5m2": E5M2,
    "mxfp6e3m2": E3M2,
    "mxfp6e2m3": E2M3,
    "mxfp4e2m1": E2M1,
}


def format_named(name: str) -> DType:
    """Return the number format with this name.

    Raises:
        ConfigError: the name is unknown.

    >>> format_named("int3").bits, format_named("fp8e4m3").bits
    (3, 8)
    """
    dtype = _OWN.get(name) or DTYPES.get(name)
    if dtype is None:
        raise ConfigError(
            f"unknown number format {name!r}{nearest(name, [*_OWN, *DTYPES])}",
        )
    return dtype


def element_of(dtype: DType) -> MiniFloat | None:
    """Return the float format of a microscaling format's elements, if any.

    >>> element_of(format_named("mxfp4e2m1")).largest
    6.0
    """
    return _ELEMENTS.get(dtype.name)


def block_of(dtype: DType) -> int:
    """Return the values per block of a block format; 0 for another format."""
    if isinstance(dtype, Block | TwoLevel | FloatScaled):
        return dtype.block_size
    return 0


def is_float8(dtype: DType) -> bool:
    """Return whether torch has a dtype for the format."""
    # Minifloats of 8 bits are E4M3 and E5M2.
    return isinstance(dtype, Minifloat) and dtype.bits == 8
