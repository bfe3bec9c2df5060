from typing import Any

from onnxruntime.quantization.quant_utils import *

def __getattr__(name: str) -> Any: ...
