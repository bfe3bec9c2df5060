from typing import Any

from onnxruntime.quantization.execution_providers.qnn.quant_config import *

def __getattr__(name: str) -> Any: ...
