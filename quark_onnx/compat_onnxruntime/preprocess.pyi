from typing import Any

from onnxruntime.quantization.preprocess import *

def __getattr__(name: str) -> Any: ...
