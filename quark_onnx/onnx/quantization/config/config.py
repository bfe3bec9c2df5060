"""Configurations with AMD Quark's names: QConfig, Config and QuantizationConfig."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import DTYPES
from quark_onnx.config import Override
from quark_onnx.config.checks import require
from quark_onnx.onnx import legacy
from quark_onnx.onnx.draft import Draft
from quark_onnx.onnx.options import apply_options
from quark_onnx.onnx.quantization.config.algorithm import (
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    CLEConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark_onnx.onnx.quantization.config.data_type import DataType
from quark_onnx.onnx.quantization.config.spec import QLayerConfig, QTensorConfig
from quark_onnx.onnxruntime_spelling.request import name_of

logger = logging.getLogger(__name__)


class QConfig:
    """Configuration of a quantization.

    Args:
        global_config: configuration of layers without another configuration, with
            ``input_tensors`` and ``weight``.
        specific_layer_config: configurations, with the nodes that have them, as in ``exclude``.
        layer_type_config: configurations, with the operator types that have them; None for float.
        exclude: nodes that stay float: names, regular expressions that begin with ``^``, and pairs
            of start and end nodes.
        algo_config: algorithms.
        use_external_data_format: True to write large tensors to external data.
        kwargs: ``extra_options``, a dictionary; or the options themselves.
    """

    def __init__(  # noqa: PLR0913
        self,
        global_config: QLayerConfig,
        specific_layer_config: dict[Any, list[Any]] | None = None,
        layer_type_config: dict[Any, list[str]] | None = None,
        exclude: list[Any] | None = None,
        algo_config: list[AlgoConfig] | None = None,
        use_external_data_format: bool = False,
        **kwargs: Any,
    ) -> None:
        self.global_config = global_config
        self.specific_layer_config = specific_layer_config or {}
        self.layer_type_config = layer_type_config or {}
        self.exclude = exclude or []
        self.algo_config = algo_config or []
        self.use_external_data_format = use_external_data_format
        # Scripts for older releases pass the options as keywords; both forms may be mixed.
        options = kwargs.pop("extra_options", None) or {}
        require(isinstance(options, Mapping), "extra_options", options, "a dictionary")
        self.extra_options: dict[str, Any] = {**options, **kwargs}

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for ``from_dict``."""
        return {
            "global_config": self.global_config.to_dict(),
            "specific_layer_config": _written(self.specific_layer_config),
            "layer_type_config": _written(self.layer_type_config),
            "exclude": self.exclude,
            "algo_config": [algorithm.to_dict() for algorithm in self.algo_config],
            "use_external_data_format": self.use_external_data_format,
            "extra_options": self.extra_options,
        }

    @staticmethod
    def from_dict(d: dict[str, Any]) -> QConfig:
        """Return the configuration from the values of ``to_dict``.

        Args:
            d: the values.

        Raises:
            ConfigError: ``global_config`` is missing, or a value is unknown.
        """
        if "global_config" not in d:
            raise ConfigError("the dictionary has no global_config")
        return QConfig(
            QLayerConfig.from_dict(d["global_config"]),
            _read(d.get("specific_layer_config", [])),
            _read(d.get("layer_type_config", [])),
            d.get("exclude", []),
            list(map(AlgoConfig.from_dict, d.get("algo_config", []))),
            d.get("use_external_data_format", False),
            extra_options=d.get("extra_options", {}),
        )

    @staticmethod
    def get_default_config(config_name: str) -> Config:
        """Return the preset with a name.

        Args:
            config_name: name of the preset.

        Raises:
            ConfigError: the name is unknown; the message suggests the closest name.
        """
        # The presets are made of configurations: an import at the top would be circular.
        from quark_onnx.onnx.quantization.config.custom_config import get_default_config

        return Config(get_default_config(config_name))

    def draft(self) -> Draft:
        """Translate the configuration into a draft.

        Raises:
            ConfigError: a setting has no counterpart.
        """
        require(
            isinstance(self.global_config, QLayerConfig),
            "global_config of a QConfig",
            self.global_config,
            "a QLayerConfig",
        )
        # Both sides are needed here; the option WeightsOnly leaves activations float.
        activation, weight = self.global_config.input_tensors, self.global_config.weight
        if activation is None or weight is None:
            raise ConfigError(
                "global_config of a QConfig needs input_tensors and weight",
            )
        # A copy: one configuration may be used for several models.
        options = dict(self.extra_options)
        draft = Draft(
            self.global_config.native_activation(),
            # Decided before the options: WeightSymmetric and others change the specification later.
            legacy.narrowed(weight.native(weight=True)),
            bias=_bias(self.global_config.bias),
            # AMD Quark switches EnableNPUCnn on where both scales are powers of two.
            target="npu" if legacy.on_integer_engine(activation, weight) else "",
            exclude=legacy.listed(self.exclude, "exclude"),
            algorithms=_without_rivals(self.algo_config),
            external=self.use_external_data_format,
        )
        for config, selected in self.specific_layer_config.items():
            names = legacy.listed(selected, "nodes of specific_layer_config")
            # Names and pairs of ends are separate overrides: nodes of a name, nodes between ends.
            single = legacy.single_names(names)
            if single:
                nodes = list(map(legacy.pattern, single))
                draft.overrides.append(_override(config, nodes=nodes))
            for ends in legacy.pairs_of_ends(names):
                draft.overrides.append(_override(config, between=ends))
        for config, op_types in self.layer_type_config.items():
            draft.overrides.append(_override(config, op_types=op_types))
        # Last, as options change what the fields have said.
        apply_options(draft, options)
        return draft


@dataclass
class QuantizationConfig:
    """Older form of a configuration, with AMD's field names and defaults."""

    calibrate_method: Any = "MinMax"
    quant_format: Any = "QDQ"
    activation_type: Any = "QInt8"
    weight_type: Any = "QInt8"
    input_nodes: list[str] = field(default_factory=list)
    output_nodes: list[str] = field(default_factory=list)
    op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_quantize: list[str] = field(default_factory=list)
    extra_op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_exclude: list[str] = field(default_factory=list)
    subgraphs_to_exclude: list[Any] = field(default_factory=list)
    specific_tensor_precision: bool = False
    execution_providers: list[str] = field(
        default_factory=lambda: ["CPUExecutionProvider"],
    )
    per_channel: bool = False
    reduce_range: bool = False
    optimize_model: bool = True
    use_dynamic_quant: bool = False
    use_external_data_format: bool = False
    convert_fp16_to_fp32: bool = False
    convert_nchw_to_nhwc: bool = False
    include_sq: bool = False
    include_rotation: bool = False
    include_cle: bool = True
    include_auto_mp: bool = False
    include_fast_ft: bool = False
    enable_npu_cnn: bool = False
    enable_npu_transformer: bool = False
    debug_mode: bool = False
    crypto_mode: bool = False
    print_summary: bool = True
    ignore_warnings: bool = True
    log_severity_level: int = 1
    extra_options: dict[str, Any] = field(default_factory=dict)

    def draft(self, algorithms: Sequence[AlgoConfig] = ()) -> Draft:
        """Translate the configuration into a draft.

        Args:
            algorithms: further algorithms, from ``ModelQuantizer.quantize_model``.

        Raises:
            ConfigError: a setting has no counterpart.
        """
        # Refused before any work: AMD Quark accepts the format and writes no FixNeuron node.
        if name_of(self.quant_format) == "FixNeuron":
            raise ConfigError(
                "quant_format is FixNeuron, which no released provider runs; use QDQ",
            )
        draft = Draft(
            None if self.use_dynamic_quant else legacy.activation(self),
            legacy.weight(self),
            dynamic=self.use_dynamic_quant,
            form="operators" if name_of(self.quant_format) == "QOperator" else "qdq",
            target="npu" if self.enable_npu_cnn else "",
            op_types=tuple(
                legacy.listed(self.op_types_to_quantize, "op_types_to_quantize")
            ),
            nodes=tuple(legacy.listed(self.nodes_to_quantize, "nodes_to_quantize")),
            exclude=[
                *legacy.listed(self.nodes_to_exclude, "nodes_to_exclude"),
                *legacy.listed(self.subgraphs_to_exclude, "subgraphs_to_exclude"),
            ],
            input_nodes=tuple(legacy.listed(self.input_nodes, "input_nodes")),
            output_nodes=tuple(legacy.listed(self.output_nodes, "output_nodes")),
            algorithms=_without_rivals([*self._included(), *algorithms]),
            external=self.use_external_data_format,
        )
        if self.enable_npu_transformer:
            # AMD's transformer mode quantizes products with a constant matrix alone.
            draft.op_types = draft.op_types or ("MatMul", "Gemm")
            draft.constant_matmul = True
        # These fields have options of the same meaning; an option overrides its field.
        fields_as_options = {
            "ConvertFP16ToFP32": self.convert_fp16_to_fp32,
            "ConvertNCHWToNHWC": self.convert_nchw_to_nhwc,
            "CryptoMode": self.crypto_mode,
            "ExecutionProviders": list(self.execution_providers),
            "ExtraOpTypesToQuantize": list(self.extra_op_types_to_quantize),
        }
        apply_options(draft, {**fields_as_options, **self.extra_options})
        return draft

    def _included(self) -> list[AlgoConfig]:
        """Return the algorithms of the flags, in AMD Quark's order."""
        # The flags are those of static quantization; include_cle is on by default.
        if self.use_dynamic_quant or self.extra_options.get("UseMatMulNBits"):
            return []
        wanted: list[tuple[bool, AlgoConfig]] = [
            (self.include_cle, CLEConfig()),
            (self.include_sq, SmoothQuantConfig()),
            (self.include_rotation, QuarotConfig()),
            (self.include_fast_ft, AdaRoundConfig()),
            (self.include_auto_mp, AutoMixprecisionConfig()),
        ]
        return [algorithm for flag, algorithm in wanted if flag]


class Config:
    """Older wrapper of a configuration.

    Args:
        global_quant_config: the configuration.
    """

    def __init__(self, global_quant_config: QuantizationConfig) -> None:
        self.global_quant_config = global_quant_config


def _override(config: Any, **where: Any) -> Override:
    """Return a decision for nodes from a configuration, None or a number format."""
    # None as a key of layer_type_config or specific_layer_config leaves its layers float.
    if config is None:
        return Override(**where, keep=True)
    config = _in_todays_form(config)
    if not isinstance(config, QLayerConfig):
        raise ConfigError(
            f"{config!r} is no QLayerConfig; layers are configured by one, or left float by None",
        )
    weight = config.native_weight()
    return Override(
        **where,
        activation=config.native_activation(),
        weight=None if weight is None else legacy.narrowed(weight),
    )


def _in_todays_form(config: Any) -> Any:
    """Return the layer configuration of a number format, the older form; others unchanged."""
    if not isinstance(config, DataType):
        return config
    return QLayerConfig(
        QTensorConfig(data_type=config),
        weight=QTensorConfig(data_type=config),
    )


def _bias(config: QTensorConfig | None) -> bool | str:
    """Return the format of biases from a tensor configuration.

    Biases of float layers stay float in any case.
    """
    name = "" if config is None else config.data_type.dtype
    if name == "int16":
        return name
    if name not in ("", "int32") and DTYPES[name].scaled:
        logger.warning(
            "bias of global_config is %s, and biases are int32; Int16Spec stores them in 16 bits",
            name,
        )
    return True


def _without_rivals(algorithms: Sequence[AlgoConfig]) -> list[AlgoConfig]:
    """Copy the algorithms, but only the first of AdaRound and AdaQuant.

    Options change the copies.
    """
    kept: list[AlgoConfig] = []
    finetuned = False
    for algorithm in legacy.listed(algorithms, "algorithms"):
        require(
            isinstance(algorithm, AlgoConfig),
            "algorithm",
            algorithm,
            "a configuration such as CLEConfig()",
        )
        # Both replace the rounding of the same weights. AMD Quark drops the second with a warning,
        # too.
        if algorithm.name in ("adaround", "adaquant"):
            if finetuned:
                logger.warning(
                    "only one of AdaRound and AdaQuant runs; %s is left out",
                    algorithm.name,
                )
                continue
            finetuned = True
        # The fields of the dataclass are its arguments.
        kept.append(type(algorithm)(**vars(algorithm)))
    return kept


def _written(configs: dict[Any, list[str]]) -> list[Any]:
    # Pairs, as a key of JSON cannot be a configuration.
    pairs: list[Any] = []
    for config, names in configs.items():
        layer = _in_todays_form(config)
        pairs.append([None if layer is None else layer.to_dict(), names])
    return pairs


def _read(pairs: list[Any]) -> dict[Any, list[str]]:
    return {
        None if config is None else QLayerConfig.from_dict(config): names
        for config, names in pairs
    }
