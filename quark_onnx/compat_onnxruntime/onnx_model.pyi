from typing import Any

from onnxruntime.quantization.onnx_model import *

def __getattr__(name: str) -> Any: ...
