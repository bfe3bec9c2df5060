from typing import Any

from onnxruntime.quantization.execution_providers.qnn.mixed_precision_overrides_utils import *

def __getattr__(name: str) -> Any: ...
