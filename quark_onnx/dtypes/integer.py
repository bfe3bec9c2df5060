"""Define the integer formats of QuantizeLinear and DequantizeLinear, with their opsets."""

import numpy as np
from onnx import TensorProto, helper

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import DTYPES
from quark_onnx.dtypes.base import Integer


def integer(  # noqa: PLR0913  the columns of the table
    name: str,
    onnx: int,
    bits: int,
    signed: bool,
    min_opset: int,
    *,
    emitted: bool = True,
    read: bool = True,
    override: bool = False,
) -> Integer:
    """Register an integer format.

    Args:
        name: how configurations call it.
        onnx: the ``TensorProto.DataType`` that stores its codes; it may have more of them, where
            ONNX has no type of so few bits.
        bits: of a code.
        signed: two's complement.
        min_opset: first opset whose QuantizeLinear and DequantizeLinear have the type.
        emitted: QuantizeLinear writes it.
        read: DequantizeLinear reads it.
        override: replace the format that has this name.

    Raises:
        ConfigError: the name is taken, or a code does not fit into the type.
    """
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
    # ONNX may have no type of so few bits: 6-bit codes are stored as int8, not the other way round.
    least, greatest = row.storable
    if not (least <= row.qmin and row.qmax <= greatest):
        stored = TensorProto.DataType.Name(onnx)
        raise ConfigError(
            f"{name}: codes from {row.qmin} to {row.qmax} do not fit into {stored},"
            f" which stores {least} to {greatest}; choose a wider type",
        )
    DTYPES.add(name, row, override=override)
    return row


# Opsets: QuantizeLinear has 8 bits since 10, 4 and 16 bits since 21, 2 bits since 25.
if hasattr(TensorProto, "INT2"):  # since onnx 1.20
    integer("int2", TensorProto.INT2, 2, True, 25)
    integer("uint2", TensorProto.UINT2, 2, False, 25)
INT4 = integer("int4", TensorProto.INT4, 4, True, 21)
UINT4 = integer("uint4", TensorProto.UINT4, 4, False, 21)
INT8 = integer("int8", TensorProto.INT8, 8, True, 10)
UINT8 = integer("uint8", TensorProto.UINT8, 8, False, 10)
INT16 = integer("int16", TensorProto.INT16, 16, True, 21)
UINT16 = integer("uint16", TensorProto.UINT16, 16, False, 21)
#: DequantizeLinear reads int32, QuantizeLinear does not write it: the format of biases.
INT32 = integer("int32", TensorProto.INT32, 32, True, 10, emitted=False)
# ONNX's DequantizeLinear reads no uint32; operators of vendors do.
integer("uint32", TensorProto.UINT32, 32, False, 17, emitted=False, read=False)
