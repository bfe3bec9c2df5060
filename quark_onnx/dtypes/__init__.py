"""Number formats, one row each."""

from quark_onnx.dtypes.base import DType
from quark_onnx.dtypes.integer import INT8, INT16, INT32, UINT8, UINT16

__all__ = ["INT8", "INT16", "INT32", "UINT8", "UINT16", "DType"]
