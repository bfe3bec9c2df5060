"""Accuracy of quantized models: measurement, causes of errors, and search."""

from quark_onnx.analysis.accuracy import AccuracyResult, quantize_to_accuracy
from quark_onnx.analysis.advise import advise
from quark_onnx.analysis.analyze import analyze
from quark_onnx.analysis.compare import Comparison, compare
from quark_onnx.analysis.result import Analysis
from quark_onnx.trials.latency import Latency, measure_latency

__all__ = [
    "AccuracyResult",
    "Analysis",
    "Comparison",
    "Latency",
    "advise",
    "analyze",
    "compare",
    "measure_latency",
    "quantize_to_accuracy",
]
