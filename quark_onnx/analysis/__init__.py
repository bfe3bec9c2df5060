"""Knowing how good a quantized model is, and why."""

from quark_onnx.analysis.analyze import analyze
from quark_onnx.analysis.compare import Comparison, compare
from quark_onnx.analysis.findings import Analysis

__all__ = ["Analysis", "Comparison", "analyze", "compare"]
