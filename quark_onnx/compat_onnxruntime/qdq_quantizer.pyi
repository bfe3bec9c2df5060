from typing import Any

from onnxruntime.quantization.qdq_quantizer import *

def __getattr__(name: str) -> Any: ...
from quark_onnx.compat_onnxruntime.quantizers import QDQQuantizer as QDQQuantizer
