"""Mirror of AMD Quark's module ``quark.torch.export``."""

from quark_onnx.torch.export.config.config import (
    ExporterConfig,
    JsonExporterConfig,
    OnnxExporterConfig,
)

__all__ = ["ExporterConfig", "JsonExporterConfig", "OnnxExporterConfig"]
