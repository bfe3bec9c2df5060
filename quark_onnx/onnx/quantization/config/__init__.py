"""Configurations and presets, with AMD Quark's names."""

from quark_onnx.onnx.quantization.config.config import (
    Config,
    QConfig,
    QuantizationConfig,
)
from quark_onnx.onnx.quantization.config.custom_config import (
    DefaultConfigMapping,
    get_default_config,
    get_default_config_mapping,
)

__all__ = [
    "Config",
    "DefaultConfigMapping",
    "QConfig",
    "QuantizationConfig",
    "get_default_config",
    "get_default_config_mapping",
]
