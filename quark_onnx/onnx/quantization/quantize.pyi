from quark_onnx.onnx.quantize import quantize_dynamic as quantize_dynamic
from quark_onnx.onnx.quantize import quantize_static as quantize_static
