from typing import Any

from onnxruntime.quantization.matmul_bnb4_quantizer import *

def __getattr__(name: str) -> Any: ...
