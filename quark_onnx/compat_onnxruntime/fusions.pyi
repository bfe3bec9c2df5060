from typing import Any

from onnxruntime.quantization.fusions import *

def __getattr__(name: str) -> Any: ...
