"""The spelling of ``onnxruntime.quantization.quantize_static``, translated into a QConfig.

A script written for onnxruntime changes its import and nothing else: the names below stand in for onnxruntime's, and
its own enumerations are understood as well.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from calibrators import CalibrationError, Calibrator, Entropy, MinMax, Percentile
from quark_onnx.config import QConfig, QuantizationSpec
from quark_onnx.errors import ConfigError, nearest

logger = logging.getLogger(__name__)


class QuantType(Enum):
    """Integer types, as onnxruntime numbers them."""

    QInt8 = 0
    QUInt8 = 1
    QInt16 = 3
    QUInt16 = 4


class QuantFormat(Enum):
    """Output formats, as onnxruntime numbers them."""

    QOperator = 0
    QDQ = 1


class CalibrationMethod(Enum):
    """Calibration methods, as onnxruntime numbers them."""

    MinMax = 0
    Entropy = 1
    Percentile = 2


class CalibrationDataReader:
    """Base class for readers in onnxruntime's style: ``get_next`` returns one sample, and None at the end."""

    def get_next(self) -> dict[str, Any] | None:
        raise NotImplementedError

    def __iter__(self) -> CalibrationDataReader:
        return self

    def __next__(self) -> dict[str, Any]:
        sample = self.get_next()
        if sample is None:
            raise StopIteration
        return sample


@dataclass(frozen=True)
class Call:
    """A call in onnxruntime's spelling, in this package's terms."""

    model: Any
    data: Any
    config: QConfig
    output: Any
    external: bool


def is_onnxruntime_call(positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Whether arguments follow onnxruntime's spelling: its keywords, or a data reader in third place."""
    return any(name in _NAMES for name in keywords) or (len(positional) > 2 and hasattr(positional[2], "get_next"))


def translate(positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> Call:
    """The same request as a model, data, a QConfig and an output.

    Raises:
        ConfigError: an option is unknown, or stands for something that this package does not do.
    """
    for name in keywords:
        if name not in _NAMES:
            raise ConfigError(f"quantize_static has no argument {name!r}{nearest(name, _NAMES)}")
    try:
        bound = _SIGNATURE.bind(*positional, **keywords)
    except TypeError as error:
        raise ConfigError(f"quantize_static in onnxruntime's spelling: {error}") from error
    bound.apply_defaults()
    a = bound.arguments
    _check_surroundings(a)
    options = _options(a["extra_options"])
    config = _config(a, options)
    for name in options:
        if name in _NEEDLESS:
            logger.info("extra option %s is not needed here: %s", name, _NEEDLESS[name])
        elif name in _REFUSED:
            raise ConfigError(f"extra option {name!r} is not supported: {_REFUSED[name]}")
        else:
            raise ConfigError(f"unknown extra option {name!r}{nearest(name, [*_TAKEN, *_NEEDLESS, *_REFUSED])}")
    external = _bool(a, "use_external_data_format")
    return Call(a["model_input"], a["calibration_data_reader"], config, a["model_output"], external)


def _check_surroundings(a: Mapping[str, Any]) -> None:
    """What is not about numbers: which format is written, in which files, and what runs the calibration."""
    written = _name(a["quant_format"])
    if written == "QOperator":
        raise ConfigError("quant_format QOperator is not written; use QuantFormat.QDQ, which onnxruntime runs alike")
    if written != "QDQ":
        raise ConfigError(f"quant_format is {a['quant_format']!r}; it must be QuantFormat.QDQ")
    if a["calibration_cache_path"] is not None:
        raise ConfigError("calibration_cache_path is not supported: ranges are measured in each run")
    if set(_names(a, "calibration_providers")) - {"CPUExecutionProvider"}:
        logger.warning("calibration_providers is %s, but calibration runs on the CPU", a["calibration_providers"])


def _options(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"extra_options is {given!r}; it must be a dictionary")
    return dict(given or {})


def _config(a: Mapping[str, Any], options: dict[str, Any]) -> QConfig:
    """The settings; what is taken from ``options`` is removed there."""
    weight_type = _dtype(a["weight_type"])
    weight_symmetric = options.pop("WeightSymmetric", weight_type.startswith("int"))
    weight = QuantizationSpec(
        weight_type,
        symmetric=weight_symmetric,
        per_channel=a["per_channel"],
        narrow=weight_symmetric,
        reduce_range=a["reduce_range"],
    )
    activation = QuantizationSpec(
        _dtype(a["activation_type"]),
        symmetric=options.pop("ActivationSymmetric", False),
        calibrator=_calibrator(_name(a["calibrate_method"]), options),
    )
    return QConfig(
        activation,
        weight,
        bias=options.pop("QuantizeBias", True),
        op_types=_names(a, "op_types_to_quantize"),
        nodes=_names(a, "nodes_to_quantize"),
        exclude=_names(a, "nodes_to_exclude"),
    )


def _calibrator(method: str, options: dict[str, Any]) -> Calibrator:
    if method not in _CALIBRATORS:
        raise ConfigError(f"calibrate_method {method!r} is not known{nearest(method, _CALIBRATORS)}")
    calibrator, of_method = _CALIBRATORS[method]
    for name in ("CalibMovingAverage", "CalibMovingAverageConstant", "CalibPercentile"):
        if name in options and name not in of_method:
            logger.info("extra option %s has no effect with calibrate_method %s", name, method)
            del options[name]
    given = {setting: name for name, setting in of_method.items() if name in options}
    try:
        return calibrator(**{setting: options.pop(name) for setting, name in given.items()})
    except CalibrationError as error:
        raise ConfigError(f"extra options {', '.join(given.values())}: {error}") from error


def _names(a: Mapping[str, Any], argument: str) -> tuple[str, ...]:
    value = a[argument]
    if isinstance(value, list | tuple | set | None) and all(isinstance(item, str) for item in value or ()):
        return tuple(value or ())
    raise ConfigError(f"{argument} is {value!r}; it must be a list of names")


def _bool(a: Mapping[str, Any], argument: str) -> bool:
    if isinstance(value := a[argument], bool):
        return value
    raise ConfigError(f"{argument} is {value!r}; it must be True or False")


def _dtype(value: Any) -> str:
    name = _name(value)
    if name not in QuantType.__members__:
        raise ConfigError(f"quantization type {name!r} is not supported{nearest(name, QuantType.__members__)}")
    return name[1:].lower()


def _name(value: Any) -> str:
    return value.name if isinstance(value, Enum) else str(value)


def _signature(
    model_input: Any,
    model_output: Any,
    calibration_data_reader: Any = None,
    quant_format: Any = QuantFormat.QDQ,
    op_types_to_quantize: Any = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: Any = QuantType.QInt8,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: Any = None,
    nodes_to_exclude: Any = None,
    use_external_data_format: bool = False,
    calibrate_method: Any = CalibrationMethod.MinMax,
    calibration_providers: Any = None,
    extra_options: Any = None,
    calibration_cache_path: Any = None,
) -> None:
    """onnxruntime's parameters and defaults."""


_SIGNATURE = inspect.signature(_signature)
_NAMES = tuple(_SIGNATURE.parameters)
#: What a calibration method is here, and which extra options are its settings.
_CALIBRATORS: dict[str, tuple[type[Calibrator], dict[str, str]]] = {
    "MinMax": (MinMax, {"CalibMovingAverage": "moving_average", "CalibMovingAverageConstant": "constant"}),
    "Entropy": (Entropy, {}),
    "Percentile": (Percentile, {"CalibPercentile": "percentile"}),
}
_TAKEN = (
    "ActivationSymmetric",
    "CalibMovingAverage",
    "CalibMovingAverageConstant",
    "CalibPercentile",
    "QuantizeBias",
    "WeightSymmetric",
)
_NEEDLESS = {
    "AddQDQPairToWeight": "weights are stored quantized",
    "CalibMaxIntermediateOutputs": "one batch is alive at a time",
    "CalibStridedMinMax": "one batch is alive at a time",
    "CalibTensorRangeSymmetric": "a symmetric grid makes its range symmetric",
    "DedicatedQDQPair": "onnxruntime separates shared DequantizeLinear nodes itself",
    "DisableShapeInference": "shape inference is never fatal",
    "EnableSubgraph": "subgraphs pass through in float",
    "ForceQuantizeNoInputCheck": "rearranging operators inherit their input's scale",
    "MinimumRealRange": "no scale is ever too small",
    "QDQKeepRemovableActivations": "an activation function is dropped only where saturation does the same",
    "UseQDQContribOps": "the domain follows from the opset",
}
_REFUSED = {
    "MatMulConstBOnly": "use an Override with keep=True for the nodes in question",
    "OpTypesToExcludeOutputQuantization": "use an Override with keep=True for the nodes in question",
    "QDQOpTypePerChannelSupportToAxis": "the channel axis follows from the operator",
    "QDQDisableWeightAdjustForInt32Bias": "a bias never overflows here",
    "SmoothQuant": "it is no part of calibration",
    "TensorQuantOverrides": "use overrides=(Override(...),) of a QConfig",
}
