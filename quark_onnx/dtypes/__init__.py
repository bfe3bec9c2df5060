"""Define the number formats as rows of a table."""

from quark_onnx.dtypes.base import (
    Block,
    DType,
    Float4,
    Half,
    Integer,
    Minifloat,
    Scaled,
)
from quark_onnx.dtypes.block import (
    BODY_OPSET,
)
from quark_onnx.dtypes.floating import BFLOAT16, FLOAT16, FP8E4M3, FP8E5M2
from quark_onnx.dtypes.integer import (
    INT4,
    INT8,
    INT16,
    INT32,
    UINT4,
    UINT8,
    UINT16,
    integer,
)

__all__ = [
    "BFLOAT16",
    "BODY_OPSET",
    "FLOAT16",
    "FP8E4M3",
    "FP8E5M2",
    "INT4",
    "INT8",
    "INT16",
    "INT32",
    "UINT4",
    "UINT8",
    "UINT16",
    "Block",
    "DType",
    "Float4",
    "Half",
    "Integer",
    "Minifloat",
    "Scaled",
    "integer",
]
