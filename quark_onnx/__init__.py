"""Quantization of ONNX models: from float model and data to a verified integer model.

    from quark_onnx import quantize_static
    quantize_static("model.onnx", samples, "A8W8", "quantized.onnx")

``samples`` is any iterable of ``{input name: array}``. See ``QConfig`` for the settings and
``compare`` for the error.
"""

from calibrators.onnx_runtime.installed import require_onnxruntime
from calibrators.readers.open import ImageSpec, InputSpec, RandomData, open_reader
from quark_onnx.analysis import (
    Analysis,
    Comparison,
    advise,
    analyze,
    compare,
    quantize_to_accuracy,
)
from quark_onnx.api import (
    calibrate,
    custom_op_libraries,
    quantize,
    quantize_dynamic,
    quantize_static,
    quantize_weights,
)
from quark_onnx.common.errors import QuarkError
from quark_onnx.common.version import __version__ as __version__
from quark_onnx.config import Override, QConfig, QuantizationSpec, TensorOverride
from quark_onnx.convert import Converted, convert
from quark_onnx.engines import on_engine
from quark_onnx.job import Result
from quark_onnx.measuring.calibration import Calibration
from quark_onnx.onnxruntime_spelling import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
)
from quark_onnx.optimizers import (
    CLE,
    GPTQ,
    AdaQuant,
    AdaRound,
    AutoMixedPrecision,
    BiasAbsorption,
    BiasCorrection,
    QuaRot,
    SmoothQuant,
)
from quark_onnx.report.verdict import changed
from quark_onnx.search.result import SearchResult
from quark_onnx.search.search import search
from quark_onnx.search.space import Space
from quark_onnx.torch.exports.quantize_module import quantize_module

# quark-onnx-core depends on no onnxruntime; without one the import ends here, with what to
# install.
require_onnxruntime()
del require_onnxruntime

__all__ = [
    "CLE",
    "GPTQ",
    "AdaQuant",
    "AdaRound",
    "Analysis",
    "AutoMixedPrecision",
    "BiasAbsorption",
    "BiasCorrection",
    "Calibration",
    "CalibrationDataReader",
    "CalibrationMethod",
    "Comparison",
    "Converted",
    "ImageSpec",
    "InputSpec",
    "Override",
    "QConfig",
    "QuaRot",
    "QuantFormat",
    "QuantType",
    "QuantizationSpec",
    "QuarkError",
    "RandomData",
    "Result",
    "SearchResult",
    "SmoothQuant",
    "Space",
    "TensorOverride",
    "advise",
    "analyze",
    "calibrate",
    "changed",
    "compare",
    "convert",
    "custom_op_libraries",
    "on_engine",
    "open_reader",
    "quantize",
    "quantize_dynamic",
    "quantize_module",
    "quantize_static",
    "quantize_to_accuracy",
    "quantize_weights",
    "search",
]
