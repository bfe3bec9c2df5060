"""The API of vai_q_onnx, the former name of AMD Quark for ONNX.

    import quark_onnx.vai_q_onnx as vai_q_onnx

Defaults are power-of-two scales. Without a data reader, calibration uses random samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.readers.open import CalibrationData
from quark_onnx.onnx import quantize
from quark_onnx.onnx.operators.custom_ops import get_library_path
from quark_onnx.onnx.quant_utils import (
    PowerOfTwoMethod,
    VitisQuantFormat,
    VitisQuantType,
)
from quark_onnx.onnxruntime_spelling import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
)

__all__ = [
    "CalibrationDataReader",
    "CalibrationMethod",
    "PowerOfTwoMethod",
    "QuantFormat",
    "QuantType",
    "VitisQuantFormat",
    "VitisQuantType",
    "get_library_path",
    "quantize_static",
]


def quantize_static(
    model_input: str | Path | ModelProto,
    model_output: str | Path | None = None,
    calibration_data_reader: CalibrationData | None = None,
    quant_format: QuantFormat | VitisQuantFormat = QuantFormat.QDQ,
    calibrate_method: CalibrationMethod | PowerOfTwoMethod = PowerOfTwoMethod.MinMSE,
    **settings: Any,
) -> ModelProto | None:
    """Quantize a model; see ``quark_onnx.onnx.quantize.quantize_static``.

    Args:
        model_input: path of the float model, or a ModelProto, which is not changed.
        model_output: the file to write; None returns the model.
        calibration_data_reader: calibration data, with ``get_next``; None for random samples.
        quant_format: a member of ``QuantFormat`` or ``VitisQuantFormat``.
        calibrate_method: a member of ``PowerOfTwoMethod`` or ``CalibrationMethod``.
        settings: further fields of ``QuantizationConfig``, by current or former names.

    Raises:
        QuarkError: the model, the data or a setting is wrong; nothing is written.
    """
    # A copy, as the caller's dictionary must not change.
    options = dict(settings.pop("extra_options", None) or {})
    if calibration_data_reader is None:
        # An explicit False stays, and is reported as missing data.
        options.setdefault("UseRandomData", True)
    return quantize.quantize_static(
        model_input,
        model_output,
        calibration_data_reader,
        quant_format=quant_format,
        calibrate_method=calibrate_method,
        extra_options=options,
        **settings,
    )
