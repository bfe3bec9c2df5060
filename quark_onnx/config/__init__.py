"""Hold the user's decisions as frozen, composable values."""

from quark_onnx.config.override import Override
from quark_onnx.config.presets import A8W8, A16W8, S8S8, XINT8
from quark_onnx.config.qconfig import FORMS, QConfig, from_dict, load_yaml
from quark_onnx.config.serialize import to_dict, to_yaml
from quark_onnx.config.spec import QuantizationSpec, format_calibrator, parse_calibrator
from quark_onnx.config.tensors import TensorOverride, TensorOverrides
from quark_onnx.config.text import name_tuple

__all__ = [
    "A8W8",
    "A16W8",
    "FORMS",
    "S8S8",
    "XINT8",
    "Override",
    "QConfig",
    "QuantizationSpec",
    "TensorOverride",
    "TensorOverrides",
    "format_calibrator",
    "from_dict",
    "load_yaml",
    "name_tuple",
    "parse_calibrator",
    "to_dict",
    "to_yaml",
]
