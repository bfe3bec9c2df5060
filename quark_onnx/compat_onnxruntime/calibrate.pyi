from typing import Any

from onnxruntime.quantization.calibrate import *

def __getattr__(name: str) -> Any: ...
