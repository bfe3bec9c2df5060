"""Number formats of PyTorch models: those of the ONNX flow, and a few that ONNX has no type for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from quark_onnx.dtypes import Block, DType, Integer, Minifloat
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.kernels.minifloat import E2M1, E2M3, E3M2, E4M3, E5M2, MiniFloat
from quark_onnx.registry import DTYPES


def _narrow(name: str, bits: int, signed: bool) -> Integer:
    storage = np.dtype(np.int8 if signed else np.uint8)
    onnx = TensorProto.INT8 if signed else TensorProto.UINT8
    least = -(1 << bits - 1) if signed else 0
    return Integer(name, bits, 0, onnx, storage, least, least + (1 << bits) - 1, emitted=False, read=False)


@dataclass(frozen=True)
class TwoLevel(DType):
    """Blocks of FP4 values with a scale in FP8 (E4M3) each, and one float32 scale for the tensor (NVIDIA's NVFP4).

    Attributes:
        block_size: values to a block.
    """

    block_size: int


NVFP4 = TwoLevel("nvfp4", 4, 0, 16)

#: What ONNX has no type for, or has one only since its release 1.20.
_OWN: dict[str, DType] = {
    row.name: row
    for row in (
        _narrow("int3", 3, True),
        _narrow("uint3", 3, False),
        _narrow("int2", 2, True),
        _narrow("uint2", 2, False),
        NVFP4,
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
    """The number format that is called so.

    Raises:
        ConfigError: there is none.

    >>> format_named("int3").bits, format_named("fp8e4m3").bits
    (3, 8)
    """
    row = _OWN.get(name) or DTYPES.get(name)
    if row is None:
        raise ConfigError(f"unknown number format {name!r}{nearest(name, [*_OWN, *DTYPES])}")
    return row


def element_of(dtype: DType) -> MiniFloat | None:
    """The floats that the blocks of a microscaling format are made of; None for other formats.

    >>> element_of(format_named("mxfp4e2m1")).largest
    6.0
    """
    return _ELEMENTS.get(dtype.name)


def block_of(dtype: DType) -> int:
    """Values to a block, for formats that have blocks of their own; 0 for others."""
    return dtype.block_size if isinstance(dtype, Block | TwoLevel) else 0


def is_float8(dtype: DType) -> bool:
    """Whether torch has the format as a type of tensors."""
    return isinstance(dtype, Minifloat) and dtype.bits == 8
