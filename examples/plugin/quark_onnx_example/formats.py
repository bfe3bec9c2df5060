"""int6: integers of 6 bits, stored as int8. Q/DQ pairs saturate at -32 and 31."""

from onnx import TensorProto

from quark_onnx.dtypes import integer

INT6 = integer("int6", TensorProto.INT8, bits=6, signed=True, min_opset=10)
