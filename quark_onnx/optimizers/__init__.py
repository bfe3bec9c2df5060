"""What makes a quantized model better: rewrites of the float graph, and of what it becomes."""

from quark_onnx.optimizers.base import FloatOptimizer, Rewrites, Samples
from quark_onnx.optimizers.cle import CLE
from quark_onnx.optimizers.quarot import QuaRot
from quark_onnx.optimizers.smoothquant import SmoothQuant

__all__ = ["CLE", "FloatOptimizer", "QuaRot", "Rewrites", "Samples", "SmoothQuant"]
