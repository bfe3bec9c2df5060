"""Knowing how good a quantized model is, and why."""

from quark_onnx.analysis.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
