"""Quantization of ONNX models, with AMD Quark's names."""

from quark_onnx.onnx.quantization.api import ModelQuantizer
from quark_onnx.onnx.quantization.config.config import (
    Config,
    QConfig,
    QuantizationConfig,
)

__all__ = ["Config", "ModelQuantizer", "QConfig", "QuantizationConfig"]
