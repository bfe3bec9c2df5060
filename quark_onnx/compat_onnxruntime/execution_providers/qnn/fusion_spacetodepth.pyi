from typing import Any

from onnxruntime.quantization.execution_providers.qnn.fusion_spacetodepth import *

def __getattr__(name: str) -> Any: ...
