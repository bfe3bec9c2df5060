"""Number formats, one row each."""

from quark_onnx.dtypes.base import Block, DType, Float4, Half, Integer, Minifloat, Scaled
from quark_onnx.dtypes.block import (
    BFP16,
    BODY_OPSET,
    MX4,
    MX6,
    MX9,
    MXFP4E2M1,
    MXFP6E2M3,
    MXFP6E3M2,
    MXFP8E4M3,
    MXFP8E5M2,
    MXINT8,
)
from quark_onnx.dtypes.floating import BFLOAT16, FLOAT16, FP4E2M1, FP8E4M3, FP8E5M2
from quark_onnx.dtypes.integer import INT4, INT8, INT16, INT32, UINT4, UINT8, UINT16, UINT32

__all__ = [
    "BFLOAT16",
    "BFP16",
    "BODY_OPSET",
    "FLOAT16",
    "FP4E2M1",
    "FP8E4M3",
    "FP8E5M2",
    "INT4",
    "INT8",
    "INT16",
    "INT32",
    "MX4",
    "MX6",
    "MX9",
    "MXFP4E2M1",
    "MXFP6E2M3",
    "MXFP6E3M2",
    "MXFP8E4M3",
    "MXFP8E5M2",
    "MXINT8",
    "UINT4",
    "UINT8",
    "UINT16",
    "UINT32",
    "Block",
    "DType",
    "Float4",
    "Half",
    "Integer",
    "Minifloat",
    "Scaled",
]
