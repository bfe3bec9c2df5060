"""Detection of wrong preprocessing from the float model's outputs."""

from quark_onnx.preprocessing.check import PreprocessingCheck
from quark_onnx.preprocessing.finding import Finding

__all__ = ["Finding", "PreprocessingCheck"]
