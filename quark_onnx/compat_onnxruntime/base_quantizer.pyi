from typing import Any

from onnxruntime.quantization.base_quantizer import *

def __getattr__(name: str) -> Any: ...
