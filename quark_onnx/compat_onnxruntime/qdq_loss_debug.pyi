from typing import Any

from onnxruntime.quantization.qdq_loss_debug import *

def __getattr__(name: str) -> Any: ...
