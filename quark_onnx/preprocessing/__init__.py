"""Find wrong preprocessing of the data in what the float model makes of it."""

from quark_onnx.preprocessing.check import PreprocessingCheck
from quark_onnx.preprocessing.finding import Finding

__all__ = ["Finding", "PreprocessingCheck"]
