"""QDQQuantizer and ONNXQuantizer: quantize a model with given ranges and options."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from onnx import ModelProto
from onnxruntime.quantization import (
    CalibrationMethod,
    QuantFormat,
    TensorsData,
    save_tensors_data,
)
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.quant_utils import QuantizationMode, QuantType

from quark_onnx.api import quantize_dynamic, quantize_static


class _Quantizer:
    """Base class of QDQQuantizer and ONNXQuantizer.

    Attributes:
        model: an ONNXModel, quantized by ``quantize_model``.
    """

    def __init__(self, model: Any, settings: dict[str, Any], ranges: Any) -> None:
        # Scripts call methods of ONNXModel on the attribute after quantization.
        self.model = model if isinstance(model, ONNXModel) else ONNXModel(model)
        self._settings = settings
        self._ranges = ranges

    def quantize_model(self) -> ModelProto:
        """Quantize with the given ranges; also store the result in ``model``."""
        # An output path makes it a call in onnxruntime's spelling; the result is loaded, so that
        # the file can go.
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "quantized.onnx")
            # Without ranges, as in mode IntegerOps, activations get dynamic scales.
            if self._ranges is None:
                quantized = quantize_dynamic(self.model.model, output, **self._settings)
            else:
                cache = Path(folder, "ranges.json")
                ranges = self._ranges
                # onnxruntime takes a dictionary of ranges, too.
                if not isinstance(ranges, TensorsData):
                    ranges = TensorsData(CalibrationMethod.MinMax, dict(ranges))
                save_tensors_data(ranges, cache)
                # The cache states the method, and the call has to agree.
                self._settings |= {"calibrate_method": ranges.calibration_method}
                quantized = quantize_static(
                    self.model.model,
                    output,
                    calibration_cache_path=cache,
                    **self._settings,
                )
        self.model = ONNXModel(quantized)
        return quantized


class QDQQuantizer(_Quantizer):
    """Quantizer that writes Q/DQ pairs."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        # Positional arguments by the order of onnxruntime's parameters.
        given = dict(zip(_QDQ, arguments, strict=False)) | keywords
        model, ranges = given.pop("model"), given.pop("tensors_range", None)
        settings = _settings(given) | {"quant_format": QuantFormat.QDQ}
        super().__init__(model, settings, ranges)


class ONNXQuantizer(_Quantizer):
    """Quantizer that writes operators on codes, dynamic in mode IntegerOps."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        given = dict(zip(_OPERATORS, arguments, strict=False)) | keywords
        # ``static`` follows from the mode, and from whether ranges are given.
        given.pop("static", None)
        mode = given.pop("mode", QuantizationMode.QLinearOps)
        model, ranges = given.pop("model"), given.pop("tensors_range", None)
        settings = _settings(given)
        if mode == QuantizationMode.IntegerOps:
            # Dynamic activations are uint8, whatever the argument says.
            settings.pop("activation_type", None)
            ranges = None
        else:
            settings["quant_format"] = QuantFormat.QOperator
        super().__init__(model, settings, ranges)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Translate arguments of a quantizer to arguments of a call."""
    settings = {
        name: value
        for name, value in given.items()
        if name not in ("weight_qType", "activation_qType")
    }
    for name in ("weight", "activation"):
        settings[f"{name}_type"] = given.get(f"{name}_qType", QuantType.QInt8)
    return settings


_QDQ = (
    "model",
    "per_channel",
    "reduce_range",
    "weight_qType",
    "activation_qType",
    "tensors_range",
    "nodes_to_quantize",
    "nodes_to_exclude",
    "op_types_to_quantize",
    "extra_options",
)
# The parameters of ONNXQuantizer are those of QDQQuantizer and two more.
_OPERATORS = (*_QDQ[:3], "mode", "static", *_QDQ[3:])
