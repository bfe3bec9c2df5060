from typing import Any

from onnxruntime.quantization.onnx_quantizer import *

def __getattr__(name: str) -> Any: ...
from quark_onnx.compat_onnxruntime.quantizers import ONNXQuantizer as ONNXQuantizer
