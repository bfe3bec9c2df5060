"""The integer formats: the types of QuantizeLinear and DequantizeLinear, and the opset that brought each."""

from onnx import TensorProto

from quark_onnx.dtypes.base import integer

INT8 = integer("int8", TensorProto.INT8, 8, True, 10)
UINT8 = integer("uint8", TensorProto.UINT8, 8, False, 10)
INT16 = integer("int16", TensorProto.INT16, 16, True, 21)
UINT16 = integer("uint16", TensorProto.UINT16, 16, False, 21)
#: Biases only: DequantizeLinear reads it, QuantizeLinear does not write it.
INT32 = integer("int32", TensorProto.INT32, 32, True, 10)
