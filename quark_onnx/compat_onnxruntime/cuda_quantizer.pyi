from typing import Any

from onnxruntime.quantization.cuda_quantizer import *

def __getattr__(name: str) -> Any: ...
