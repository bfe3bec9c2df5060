"""QDQQuantizer and ONNXQuantizer: quantize a model with given ranges and options."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from onnx import ModelProto
from onnxruntime.quantization import (
    CalibrationMethod,
    QuantFormat,
    TensorsData,
    save_tensors_data,
)
from onnxruntime.quantization import QDQQuantizer as _TheirQDQQuantizer
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer as _TheirONNXQuantizer
from onnxruntime.quantization.quant_utils import QuantizationMode, QuantType

from quark_onnx.api import quantize_dynamic, quantize_static
from quark_onnx.onnxruntime_spelling import CallError
from quark_onnx.onnxruntime_spelling.extension_points import INSTEAD

#: Attributes that onnxruntime's quantizers fill with scales.
_SCALES = frozenset({"quantization_params", "quantized_value_map"})


class _Quantizer:
    """Base class of QDQQuantizer and ONNXQuantizer.

    The parameters are attributes, which may be changed before ``quantize_model``.

    Attributes:
        model: an ONNXModel, quantized by ``quantize_model``.
    """

    #: The class of onnxruntime, whose methods are hooks for subclasses there.
    _theirs: ClassVar[type]
    _format: ClassVar[QuantFormat]
    mode = QuantizationMode.QLinearOps

    def __init__(  # noqa: PLR0913  onnxruntime's parameters
        self,
        model: ModelProto | ONNXModel,
        per_channel: bool = False,
        reduce_range: bool = False,
        weight_qType: QuantType = QuantType.QInt8,  # noqa: N803
        activation_qType: QuantType = QuantType.QInt8,  # noqa: N803
        tensors_range: TensorsData | Mapping[str, Any] | None = None,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        op_types_to_quantize: Sequence[str] | None = None,
        extra_options: Mapping[str, Any] | None = None,
    ) -> None:
        # Scripts call methods of ONNXModel on the attribute after quantization.
        self.model = model if isinstance(model, ONNXModel) else ONNXModel(model)
        self.per_channel = per_channel
        self.reduce_range = reduce_range
        self.weight_qType = weight_qType
        self.activation_qType = activation_qType
        self.tensors_range = tensors_range
        self.nodes_to_quantize = nodes_to_quantize
        self.nodes_to_exclude = nodes_to_exclude
        self.op_types_to_quantize = op_types_to_quantize
        self.extra_options = extra_options

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in vars(cls):
            if cls._is_hook(name):
                raise CallError(
                    f"{cls.__name__} overrides {name}, which this package never calls:"
                    f" {INSTEAD}"
                )

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SCALES or self._is_hook(name):
            raise CallError(
                f"{name} of a {type(self).__name__} is set, and this package never reads"
                f" it: {INSTEAD}"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Only for names that the object lacks.
        if name in _SCALES or self._is_hook(name):
            raise AttributeError(
                f"this package's {type(self).__name__} has no {name}: {INSTEAD}"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @classmethod
    def _is_hook(cls, name: str) -> bool:
        """Return whether a name is a method of onnxruntime's class that is not one here."""
        if name.startswith("__") or hasattr(_Quantizer, name):
            return False
        return callable(getattr(getattr(cls, "_theirs", object), name, None))

    def quantize_model(self) -> ModelProto:
        """Quantize with the given ranges; also store the result in ``model``.

        Raises:
            CallError: there are no ranges, and the mode is not IntegerOps.
        """
        if self.tensors_range is None and self.mode != QuantizationMode.IntegerOps:
            raise CallError(
                f"tensors_range of a {type(self).__name__} is None, and static scales come from"
                " ranges: give those of a calibrator (compute_data), or call quantize_dynamic"
            )
        settings: dict[str, Any] = {
            "weight_type": self.weight_qType,
            "per_channel": self.per_channel,
            "reduce_range": self.reduce_range,
            "nodes_to_quantize": self.nodes_to_quantize,
            "nodes_to_exclude": self.nodes_to_exclude,
            "op_types_to_quantize": self.op_types_to_quantize,
            "extra_options": self.extra_options,
        }
        # An output path makes it a call in onnxruntime's spelling; the result is loaded, so that
        # the file can go.
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "quantized.onnx")
            # Ranges do not count in this mode: activations get dynamic scales.
            if self.mode == QuantizationMode.IntegerOps:
                quantized = quantize_dynamic(self.model.model, output, **settings)
            else:
                cache = Path(folder, "ranges.json")
                ranges = self.tensors_range
                assert ranges is not None  # checked above
                # onnxruntime takes a dictionary of ranges, too.
                if not isinstance(ranges, TensorsData):
                    ranges = TensorsData(CalibrationMethod.MinMax, dict(ranges))
                save_tensors_data(ranges, cache)
                quantized = quantize_static(
                    self.model.model,
                    output,
                    quant_format=self._format,
                    activation_type=self.activation_qType,
                    # The cache states the method, and the call has to agree.
                    calibrate_method=ranges.calibration_method,
                    calibration_cache_path=cache,
                    **settings,
                )
        self.model = ONNXModel(quantized)
        return quantized


class QDQQuantizer(_Quantizer):
    """Quantizer that writes Q/DQ pairs."""

    _theirs = _TheirQDQQuantizer
    _format = QuantFormat.QDQ


class ONNXQuantizer(_Quantizer):
    """Quantizer that writes operators on codes, dynamic in mode IntegerOps."""

    _theirs = _TheirONNXQuantizer
    _format = QuantFormat.QOperator

    def __init__(  # noqa: PLR0913  onnxruntime's parameters
        self,
        model: ModelProto | ONNXModel,
        per_channel: bool = False,
        reduce_range: bool = False,
        mode: QuantizationMode = QuantizationMode.QLinearOps,
        static: bool = True,
        weight_qType: QuantType = QuantType.QInt8,  # noqa: N803
        activation_qType: QuantType = QuantType.QInt8,  # noqa: N803
        tensors_range: TensorsData | Mapping[str, Any] | None = None,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        op_types_to_quantize: Sequence[str] | None = None,
        extra_options: Mapping[str, Any] | None = None,
    ) -> None:
        # ``static`` follows from the mode.
        super().__init__(
            model,
            per_channel,
            reduce_range,
            weight_qType,
            activation_qType,
            tensors_range,
            nodes_to_quantize,
            nodes_to_exclude,
            op_types_to_quantize,
            extra_options,
        )
        self.mode = mode
