"""Define the floating formats: 8 and 4 bits with a scale (OCP OFP8 and MX), 16 bits without."""

import numpy as np
from onnx import TensorProto, helper

from quark_onnx.common.registry import DTYPES
from quark_onnx.dtypes.base import Float4, Half, Minifloat


def minifloat(
    name: str, onnx: int, bits: int, largest: int, min_opset: int
) -> Minifloat:
    """Register a floating format that QuantizeLinear writes."""
    storage = np.dtype(helper.tensor_dtype_to_np_dtype(onnx))
    row = Minifloat(name, bits, min_opset, onnx, storage, -largest, largest)
    DTYPES.add(name, row)
    return row


def half(name: str, onnx: int, largest: float, min_opset: int) -> Half:
    """Register a 16-bit floating format."""
    row = Half(
        name,
        16,
        min_opset,
        onnx,
        np.dtype(helper.tensor_dtype_to_np_dtype(onnx)),
        largest,
    )
    DTYPES.add(name, row)
    return row


# Greatest finite values: 448 for E4M3 without infinities, 57344 for E5M2 (OCP OFP8), 6 for E2M1
# (OCP MX).
FP8E4M3 = minifloat("fp8e4m3", TensorProto.FLOAT8E4M3FN, 8, 448, 19)
FP8E5M2 = minifloat("fp8e5m2", TensorProto.FLOAT8E5M2, 8, 57344, 19)
# onnxruntime has no kernel for FLOAT4E2M1, so that the codes are stored as UINT4 (see Float4).
_STORED = np.dtype(helper.tensor_dtype_to_np_dtype(TensorProto.UINT4))
DTYPES.add(
    "fp4e2m1",
    Float4("fp4e2m1", 4, 23, TensorProto.UINT4, _STORED, -6, 6, False, False),
)
# Cast takes its target as an integer from opset 6 on.
FLOAT16 = half("float16", TensorProto.FLOAT16, 65504.0, 6)
#: The greatest finite value is 2^127 (2 - 2^-7). Cast supports bfloat16 from opset 13 on.
BFLOAT16 = half("bfloat16", TensorProto.BFLOAT16, 2.0**127 * (2 - 2.0**-7), 13)
