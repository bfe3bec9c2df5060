"""The integer formats: the types of QuantizeLinear and DequantizeLinear, and the opset that brought
each.
"""

import numpy as np
from onnx import TensorProto, helper

from quark_onnx.dtypes.base import Integer
from quark_onnx.registry import DTYPES


def integer(  # noqa: PLR0913
    name: str,
    onnx: int,
    bits: int,
    signed: bool,
    min_opset: int,
    *,
    emitted: bool = True,
    read: bool = True,
) -> Integer:
    """Register an integer format."""
    qmin = -(1 << (bits - 1)) if signed else 0
    storage = np.dtype(helper.tensor_dtype_to_np_dtype(onnx))
    row = Integer(
        name,
        bits,
        min_opset,
        onnx,
        storage,
        qmin,
        qmin + (1 << bits) - 1,
        emitted,
        read,
    )
    DTYPES.add(name, row)
    return row


if hasattr(TensorProto, "INT2"):  # since onnx 1.20
    integer("int2", TensorProto.INT2, 2, True, 25)
    integer("uint2", TensorProto.UINT2, 2, False, 25)
INT4 = integer("int4", TensorProto.INT4, 4, True, 21)
UINT4 = integer("uint4", TensorProto.UINT4, 4, False, 21)
INT8 = integer("int8", TensorProto.INT8, 8, True, 10)
UINT8 = integer("uint8", TensorProto.UINT8, 8, False, 10)
INT16 = integer("int16", TensorProto.INT16, 16, True, 21)
UINT16 = integer("uint16", TensorProto.UINT16, 16, False, 21)
#: DequantizeLinear reads it, QuantizeLinear does not write it: it is for biases above all.
INT32 = integer("int32", TensorProto.INT32, 32, True, 10, emitted=False)
UINT32 = integer("uint32", TensorProto.UINT32, 32, False, 17, emitted=False, read=False)
