"""quantize_static and quantize_dynamic with the arguments of AMD Quark for ONNX."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.readers.open import CalibrationData
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.onnx.quantization.api import choose_data
from quark_onnx.onnx.quantization.config.config import QuantizationConfig
from quark_onnx.onnx.run import handed_back, run

#: Arguments under names of older releases.
_OLDER = {
    "enable_dpu": "enable_npu_cnn",
    "enable_ipu_cnn": "enable_npu_cnn",
    "enable_ipu_transformer": "enable_npu_transformer",
}


def quantize_static(
    model_input: str | Path | ModelProto,
    model_output: str | Path | None = None,
    calibration_data_reader: CalibrationData | None = None,
    calibration_data_path: str | Path | None = None,
    **settings: Any,
) -> ModelProto | None:
    """Quantize a model to integers, or to another format.

    Args:
        model_input: path of the float model, or a ModelProto, which is not changed.
        model_output: path of the result; None to return the result.
        calibration_data_reader: calibration data, with ``get_next``.
        calibration_data_path: a folder of .npy files.
        settings: fields of ``QuantizationConfig``.

    Returns:
        The quantized model if ``model_output`` is None, otherwise None.

    Raises:
        QuarkError: the model, the data or a setting is wrong; no file is written.
    """
    # Arguments of the function are the fields of the older configuration, one to one.
    config = QuantizationConfig(**_renamed("quantize_static", settings))
    data = choose_data(model_input, calibration_data_reader, calibration_data_path)
    result = run(config.draft(), model_input, data, model_output)
    return handed_back(result, model_output)


def quantize_dynamic(
    model_input: str | Path | ModelProto,
    model_output: str | Path | None = None,
    **settings: Any,
) -> ModelProto | None:
    """Quantize the weights of a model, and activations at runtime.

    Args:
        model_input: path of the float model, or a ModelProto, which is not changed.
        model_output: path of the result; None to return the result.
        settings: fields of ``QuantizationConfig``.

    Returns:
        The quantized model if ``model_output`` is None, otherwise None.

    Raises:
        QuarkError: the model or a setting is wrong; no file is written.
    """
    # No data: scales of activations are computed by each run.
    fields_by_name = _renamed("quantize_dynamic", settings)
    config = QuantizationConfig(**{**fields_by_name, "use_dynamic_quant": True})
    result = run(config.draft(), model_input, None, model_output)
    return handed_back(result, model_output)


def _renamed(function: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Rename settings with older names.

    Raises:
        ConfigError: an argument is unknown.
    """
    names = [field.name for field in fields(QuantizationConfig)]
    result: dict[str, Any] = {}
    for name, value in settings.items():
        current = _OLDER.get(name, name)
        if current not in names:
            raise ConfigError(
                f"{function} has no argument {name!r}{nearest(name, [*names, *_OLDER])}",
            )
        result[current] = value
    return result
