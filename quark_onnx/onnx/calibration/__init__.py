"""Readers of calibration data, with AMD Quark's names."""

from quark_onnx.onnx.calibration.data_readers import (
    CachedDataReader,
    PathDataReader,
    RandomDataReader,
)

__all__ = ["CachedDataReader", "PathDataReader", "RandomDataReader"]
