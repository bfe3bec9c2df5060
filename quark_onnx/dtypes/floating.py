"""The floating formats: 8-bit floats with a scale (OCP OFP8), and the 16-bit floats, which need none."""

import numpy as np
from onnx import TensorProto, helper

from quark_onnx.dtypes.base import Half, Minifloat
from quark_onnx.registry import DTYPES


def minifloat(name: str, onnx: int, bits: int, largest: int, min_opset: int) -> Minifloat:
    """Register a floating format that QuantizeLinear writes."""
    storage = np.dtype(helper.tensor_dtype_to_np_dtype(onnx))
    row = Minifloat(name, bits, min_opset, onnx, storage, -largest, largest)
    DTYPES.add(name, row)
    return row


def half(name: str, onnx: int, largest: float, min_opset: int) -> Half:
    """Register a 16-bit floating format."""
    row = Half(name, 16, min_opset, onnx, np.dtype(helper.tensor_dtype_to_np_dtype(onnx)), largest)
    DTYPES.add(name, row)
    return row


FP8E4M3 = minifloat("fp8e4m3", TensorProto.FLOAT8E4M3FN, 8, 448, 19)
FP8E5M2 = minifloat("fp8e5m2", TensorProto.FLOAT8E5M2, 8, 57344, 19)
FLOAT16 = half("float16", TensorProto.FLOAT16, 65504.0, 6)
#: Its greatest finite value is 2^127 (2 - 2^-7). Cast knows it from opset 13 on.
BFLOAT16 = half("bfloat16", TensorProto.BFLOAT16, 2.0**127 * (2 - 2.0**-7), 13)
