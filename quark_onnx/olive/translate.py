"""Translation of the parameters of Olive's passes, without Olive.

Three kinds of parameters exist. Those of OnnxStaticQuantization and OnnxDynamicQuantization become
arguments of onnxruntime's functions. Those of QuarkQuantization become a configuration with AMD's
API names. ``quark_config`` is a configuration of this package.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType

from calibrators.readers.open import CalibrationData
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.wording import counted
from quark_onnx.compat_onnxruntime import get_qdq_config
from quark_onnx.compat_onnxruntime.execution_providers.qnn import get_qnn_qdq_config
from quark_onnx.config import Override, QConfig
from quark_onnx.config.checks import require_known
from quark_onnx.onnx.algorithm import AlgoConfig
from quark_onnx.onnx.draft import Draft
from quark_onnx.onnx.quantization.config.config import QConfig as AmdConfig
from quark_onnx.onnx.spec import QLayerConfig

logger = logging.getLogger(__name__)

Parameters = Mapping[str, Any]

#: Parameters that are extra options of onnxruntime, and whether dynamic quantization reads them.
_EXTRA_OPTIONS = {
    "ActivationSymmetric": ("activation_symmetric", True),
    "WeightSymmetric": ("weight_symmetric", True),
    "MinimumRealRange": ("min_real_range", False),
    "TensorQuantOverrides": ("tensor_quant_overrides", False),
}
#: Parameters that a configuration of this package replaces, with Olive's defaults.
_REPLACED = {
    "precision": "int8",
    "activation_type": "int8",
    "calibrate_method": "MinMax",
    "quant_format": "QDQ",
    "per_channel": False,
    "reduce_range": False,
    "activation_symmetric": False,
    "weight_symmetric": None,
    "min_real_range": None,
    "tensor_quant_overrides": None,
    "extra_options": None,
}
# Olive's precisions are the names in lower case, without the Q: "int8" is QInt8.
_WEIGHT_TYPES = {name[1:].lower(): name for name in QuantType.__members__}
#: Enumerations of a JSON tensor configuration, with Olive's defaults.
_ENUMERATIONS = {
    "scale_type": ("ScaleType", "Float32"),
    "calibration_method": ("CalibMethod", "Percentile"),
    "quant_granularity": ("QuantGranularity", "Tensor"),
}
_TENSORS = ("activation", "input_tensors", "weight", "bias", "output_tensors")


def static_arguments(
    parameters: Parameters,
    model: str | Path,
    reader: CalibrationData | None,
    *,
    qnn: bool = False,
) -> dict[str, Any]:
    """Return the arguments of ``quantize_static`` for OnnxStaticQuantization.

    Args:
        parameters: the parameters of the pass.
        model: path of the float model.
        reader: calibration data.
        qnn: whether the execution provider is QNN, which has its own settings in onnxruntime.

    Raises:
        ConfigError: a value is unknown.
    """
    # For QDQ, prepare_qdq_config lets onnxruntime's get_qdq_config complete the arguments.
    common = _common(parameters, model)
    types = {
        "weight_type": _type(parameters, "precision"),
        "activation_type": _type(parameters, "activation_type"),
        "calibrate_method": _member(CalibrationMethod, parameters, "calibrate_method"),
        "calibration_providers": parameters.get("calibration_providers"),
    }
    options = _extra_options(parameters, dynamic=False)
    quant_format = _member(QuantFormat, parameters, "quant_format")
    is_prepared = parameters.get("prepare_qdq_config", True)
    if quant_format is not QuantFormat.QDQ or not is_prepared:
        reduce_range = bool(parameters.get("reduce_range"))
        static = {
            "calibration_data_reader": reader,
            "quant_format": quant_format,
            "reduce_range": reduce_range,
        }
        return {**common, **types, **static, "extra_options": options}
    exposed = {
        name: options.pop(key)
        for key, (name, _) in _EXTRA_OPTIONS.items()
        if key in options
    }
    # The names of the functions' parameters differ from those of the extra options.
    nodes = common.pop("nodes_to_quantize")  # no parameter of the functions below
    prepared = {**common, **types, **exposed, "calibration_data_reader": reader}
    # get_qnn_qdq_config chooses formats that QNN requires for some operators.
    if qnn:
        prepared.pop("min_real_range", None)  # fixed for QNN
        overrides = prepared.pop("tensor_quant_overrides", None)
        config = get_qnn_qdq_config(**prepared, init_overrides=overrides)
        # The options of the script take precedence over those that onnxruntime has prepared.
        config.extra_options.update(options)
    else:
        config = get_qdq_config(
            **prepared,
            reduce_range=bool(parameters.get("reduce_range")),
            extra_options=options,
        )
    return {"model_input": str(model), **vars(config), "nodes_to_quantize": nodes}


def dynamic_arguments(parameters: Parameters, model: str | Path) -> dict[str, Any]:
    """Return the arguments of ``quantize_dynamic`` for OnnxDynamicQuantization.

    Args:
        parameters: the parameters of the pass.
        model: path of the float model.

    Raises:
        ConfigError: a value is unknown.
    """
    return {
        **_common(parameters, model),
        "weight_type": _type(parameters, "precision"),
        "reduce_range": bool(parameters.get("reduce_range")),
        "extra_options": _extra_options(parameters, dynamic=True),
    }


def native_config(parameters: Parameters, model: str | Path) -> QConfig:
    """Return the configuration in ``quark_config``, restricted to the selected nodes.

    Args:
        parameters: the parameters of the pass. ``quark_config`` is the name of a preset, a YAML
            file, or a dictionary of settings.
        model: path of the float model.

    Raises:
        ConfigError: a setting is unknown.
    """
    config = QConfig.of(parameters["quark_config"])
    for name, usual in _REPLACED.items():
        if name in parameters and parameters[name] != usual:
            logger.warning(
                "parameter %s=%r has no effect: quark_config decides it",
                name,
                parameters[name],
            )
    types = parameters.get("op_types_to_quantize") or ()
    # Olive ignores op_types_to_exclude where op_types_to_quantize is given.
    excluded = () if types else _present(parameters.get("op_types_to_exclude"), model)
    overrides = (Override(op_types=excluded, keep=True),) if excluded else ()
    return config.with_(
        op_types=(*config.op_types, *types),
        nodes=(*config.nodes, *(parameters.get("nodes_to_quantize") or ())),
        exclude=(*config.exclude, *(parameters.get("nodes_to_exclude") or ())),
        overrides=(*config.overrides, *overrides),
        # Either side may switch preparation off.
        prepare=config.prepare and parameters.get("quant_preprocess", True),
    )


def amd_draft(parameters: Parameters, *, random: bool) -> Draft:
    """Return the request of the ONNX parameters of QuarkQuantization.

    Args:
        parameters: the parameters of the pass.
        random: whether to use random data, since there is no calibration data, as in Olive's pass.

    Raises:
        ConfigError: a value is unknown, or ``global_config`` is missing.
    """
    # Olive's schema leaves global_config optional, as it serves PyTorch models as well.
    if not isinstance(parameters.get("global_config"), Mapping):
        raise ConfigError(
            "QuarkQuantization needs global_config, with input_tensors and weight",
        )
    options = dict(parameters.get("extra_options") or {})
    if random:
        options["UseRandomData"] = True
    config = AmdConfig(
        _layer(parameters["global_config"]),
        _layers(parameters, "specific_layer_config"),
        _layers(parameters, "layer_type_config"),
        exclude=parameters.get("exclude"),
        algo_config=[
            _algorithm(settings) for settings in parameters.get("algo_config") or ()
        ],
        extra_options=options,
    )
    # quant_mode and quant_format have no field in AMD's QConfig, and are set on the draft.
    draft = config.draft()
    mode = _choice(parameters, "quant_mode", ("static", "dynamic"))
    quant_format = _choice(parameters, "quant_format", ("QDQ", "QOperator"))
    draft.dynamic = mode == "dynamic"
    draft.form = "operators" if quant_format == "QOperator" else "qdq"
    return draft


def _common(parameters: Parameters, model: str | Path) -> dict[str, Any]:
    """Return the common arguments of quantize_static and quantize_dynamic."""
    excluded = list(parameters.get("nodes_to_exclude") or ())
    types = parameters.get("op_types_to_exclude") or ()
    if types and not parameters.get("op_types_to_quantize"):
        excluded += _named(types, model)
    return {
        "model_input": str(model),
        "op_types_to_quantize": parameters.get("op_types_to_quantize"),
        "nodes_to_quantize": parameters.get("nodes_to_quantize"),
        "nodes_to_exclude": excluded,
        "per_channel": bool(parameters.get("per_channel")),
    }


def _named(types: Sequence[str], model: str | Path) -> list[str]:
    """Return the names of the nodes of given operator types.

    Nodes without a name cannot be excluded, which is logged as a warning.
    """
    names = [node.name for node in _nodes(model) if node.op_type in types]
    unnamed = names.count("")
    if unnamed:
        logger.warning(
            "op_types_to_exclude: %s quantized; name them first",
            counted(
                unnamed,
                "node of these types has no name and is",
                "nodes of these types have no name and are",
            ),
        )
    return [name for name in names if name]


def _nodes(model: str | Path) -> Sequence[Any]:
    # Operator types need no weights.
    return onnx.load(str(model), load_external_data=False).graph.node


def _present(types: Sequence[str] | None, model: str | Path) -> tuple[str, ...]:
    """Return the operator types present in the model."""
    kinds = {node.op_type for node in _nodes(model)} if types else set()
    return tuple(name for name in types or () if name in kinds)


def _extra_options(parameters: Parameters, *, dynamic: bool) -> dict[str, Any]:
    """Return the extra options.

    A parameter takes precedence over the extra option with the same meaning, as in Olive.
    """
    options = dict(parameters.get("extra_options") or {})
    for key, (name, in_dynamic) in _EXTRA_OPTIONS.items():
        if key in options:
            logger.warning(
                "extra option %s is a parameter of the pass: use %s",
                key,
                name,
            )
        # None is Olive's default for "not given".
        if parameters.get(name) is not None and (in_dynamic or not dynamic):
            options[key] = parameters[name]
    return options


def _choice(parameters: Parameters, name: str, choices: Sequence[str]) -> str:
    value = str(parameters.get(name) or choices[0])
    require_known(value, choices, f"{name} is")
    return value


def _member(kind: Any, parameters: Parameters, name: str) -> Any:
    """Return the member of an enumeration of onnxruntime, by default Olive's."""
    # Empty texts count as missing, as None does.
    given = {name: parameters.get(name) or _REPLACED[name]}
    return kind[_choice(given, name, list(kind.__members__))]


def _type(parameters: Parameters, name: str) -> Any:
    """Return onnxruntime's type for a precision of Olive, an enumeration of strings."""
    value = parameters.get(name) or _REPLACED[name]
    given = {name: getattr(value, "value", value)}
    return QuantType[_WEIGHT_TYPES[_choice(given, name, list(_WEIGHT_TYPES))]]


def _layer(given: Mapping[str, Any]) -> QLayerConfig:
    """Read a layer configuration from JSON.

    Raises:
        ConfigError: a name or a value is unknown.
    """
    # Checked here: QLayerConfig's own error would be a TypeError of Python.
    for name in given:
        require_known(name, _TENSORS, "a layer configuration has no")
    tensors = dict(given)
    if "input_tensors" in tensors:
        tensors.pop("activation", None)  # the earlier name of input_tensors
    return QLayerConfig.from_dict(
        {name: _tensor(value) for name, value in tensors.items()},
    )


def _tensor(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Rewrite a tensor configuration in the form of QTensorConfig.to_dict."""
    if given is None:
        return None
    names = ("symmetric", "data_type", *_ENUMERATIONS)
    for name in given:
        require_known(name, names, "a tensor configuration has no")
    # Text as ``QTensorConfig.from_dict`` reads it, such as "ScaleType.Float32".
    members = {
        name: f"{kind}.{given.get(name, default)}"
        for name, (kind, default) in _ENUMERATIONS.items()
    }
    return {
        "symmetric": given.get("symmetric", True),
        "data_type": given.get("data_type", "Int8"),
        **members,
    }


def _layers(parameters: Parameters, name: str) -> dict[Any, list[str]]:
    """Return the names of layers by configuration."""
    layers: dict[Any, list[str]] = {}
    for entry in parameters.get(name) or ():
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise ConfigError(
                f"{name} holds {entry!r}; it must be a pair: a layer configuration and a"
                " list of names",
            )
        config, names = entry
        layers[None if config is None else _layer(config)] = list(names)
    return layers


def _algorithm(given: Mapping[str, Any]) -> AlgoConfig:
    # A copy, as the target is replaced.
    settings = dict(given)
    target = settings.get("target_layer_config")
    if isinstance(target, Mapping):
        settings["target_layer_config"] = _layer(target)
    return AlgoConfig.from_dict(settings)
