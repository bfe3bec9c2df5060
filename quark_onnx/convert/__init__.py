"""Convert models: one file per conversion, listed in the order of the tuple."""

from quark_onnx.common.registry import CONVERSIONS
from quark_onnx.convert.base import Conversion, ConversionSettings
from quark_onnx.convert.convert import Converted, Step, convert
from quark_onnx.convert.domains import microsoft_qdq, standard_qdq, vendor_qdq
from quark_onnx.convert.fixed_shapes import fixed_shapes
from quark_onnx.convert.float32 import float32
from quark_onnx.convert.initializers import shared_initializers, unique_initializers
from quark_onnx.convert.int16_biases import int16_biases
from quark_onnx.convert.names import quark_names, vitis_names
from quark_onnx.convert.narrow import bfloat16, float16
from quark_onnx.convert.operators import qdq_to_qoperator
from quark_onnx.convert.opset import opset
from quark_onnx.convert.pairs_from_operators import qoperator_to_qdq
from quark_onnx.convert.signs import s8s8, s16s8, u8s8, u16s8
from quark_onnx.convert.without_qdq import without_qdq

for _conversion in (
    float16,
    bfloat16,
    float32,
    fixed_shapes,
    opset,
    without_qdq,
    qdq_to_qoperator,
    qoperator_to_qdq,
    s8s8,
    u8s8,
    s16s8,
    u16s8,
    int16_biases,
    unique_initializers,
    shared_initializers,
    standard_qdq,
    microsoft_qdq,
    vendor_qdq,
    quark_names,
    vitis_names,
):
    CONVERSIONS.add(_conversion.name, _conversion)

__all__ = ["Conversion", "ConversionSettings", "Converted", "Step", "convert"]
