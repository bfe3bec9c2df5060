"""Quantization of ONNX models, with AMD Quark's names."""

from quark_onnx.onnx.algorithm import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    BiasCorrectionConfig,
    CLEConfig,
    GPTQConfig,
    QuarotConfig,
    SmoothQuantConfig,
    _algo_flag,
)
from quark_onnx.onnx.quantization.api import ModelQuantizer
from quark_onnx.onnx.quantization.config.config import (
    Config,
    QConfig,
    QuantizationConfig,
)

__all__ = [
    "AdaQuantConfig",
    "AdaRoundConfig",
    "AlgoConfig",
    "AutoMixprecisionConfig",
    "BiasCorrectionConfig",
    "CLEConfig",
    "Config",
    "GPTQConfig",
    "ModelQuantizer",
    "QConfig",
    "QuantizationConfig",
    "QuarotConfig",
    "SmoothQuantConfig",
    "_algo_flag",
]
