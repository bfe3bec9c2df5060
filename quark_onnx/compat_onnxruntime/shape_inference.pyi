from typing import Any

from onnxruntime.quantization.shape_inference import *

def __getattr__(name: str) -> Any: ...
