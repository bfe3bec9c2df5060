from typing import Any

from onnxruntime.quantization.tensor_quant_overrides import *

def __getattr__(name: str) -> Any: ...
