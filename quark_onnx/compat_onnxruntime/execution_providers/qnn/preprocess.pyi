from typing import Any

from onnxruntime.quantization.execution_providers.qnn.preprocess import *

def __getattr__(name: str) -> Any: ...
