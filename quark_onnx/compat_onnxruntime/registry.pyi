from typing import Any

from onnxruntime.quantization.registry import *

def __getattr__(name: str) -> Any: ...
