"""Translation of ``onnxruntime.quantization`` arguments and options into a QConfig."""

from quark_onnx.onnxruntime_spelling.cache import write_cache
from quark_onnx.onnxruntime_spelling.call import (
    TranslatedCall,
    is_dynamic_call,
    is_static_call,
    translate_dynamic,
    translate_static,
)
from quark_onnx.onnxruntime_spelling.names import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
)
from quark_onnx.onnxruntime_spelling.request import CallError
from quark_onnx.onnxruntime_spelling.table import option_table

__all__ = [
    "CalibrationDataReader",
    "CalibrationMethod",
    "CallError",
    "QuantFormat",
    "QuantType",
    "TranslatedCall",
    "is_dynamic_call",
    "is_static_call",
    "option_table",
    "translate_dynamic",
    "translate_static",
    "write_cache",
]
