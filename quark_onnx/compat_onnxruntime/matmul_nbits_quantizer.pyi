from typing import Any

from onnxruntime.quantization.matmul_nbits_quantizer import *

def __getattr__(name: str) -> Any: ...
from quark_onnx.compat_onnxruntime.weights import MatMulNBitsQuantizer as MatMulNBitsQuantizer
