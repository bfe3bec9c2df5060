"""What makes a quantized model better: rewrites of the float graph, and of what it becomes."""

from quark_onnx.optimizers.base import FloatOptimizer, Samples
from quark_onnx.optimizers.cle import CLE

__all__ = ["CLE", "FloatOptimizer", "Samples"]
