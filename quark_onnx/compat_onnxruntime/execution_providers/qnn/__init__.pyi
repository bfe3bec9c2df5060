from typing import Any

from onnxruntime.quantization.execution_providers.qnn import *

def __getattr__(name: str) -> Any: ...
