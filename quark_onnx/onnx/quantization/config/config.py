"""Configurations with AMD Quark's names: QConfig and Config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import DTYPES
from quark_onnx.config import Override
from quark_onnx.config.checks import require
from quark_onnx.onnx import translation
from quark_onnx.onnx.algorithm import AlgoConfig, without_rivals
from quark_onnx.onnx.data_type import DataType
from quark_onnx.onnx.draft import Draft
from quark_onnx.onnx.legacy import (
    QuantizationConfig as QuantizationConfig,
)
from quark_onnx.onnx.options import apply_options
from quark_onnx.onnx.quantization.config.presets import get_default_config
from quark_onnx.onnx.spec import QLayerConfig, QTensorConfig

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
            [AlgoConfig.from_dict(entry) for entry in d.get("algo_config", [])],
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
            translation.narrowed(weight.native(weight=True)),
            bias=_bias(self.global_config.bias),
            # AMD Quark switches EnableNPUCnn on where both scales are powers of two.
            target="npu" if translation.on_integer_engine(activation, weight) else "",
            exclude=translation.listed(self.exclude, "exclude"),
            algorithms=without_rivals(self.algo_config),
            external=self.use_external_data_format,
        )
        for config, selected in self.specific_layer_config.items():
            names = translation.listed(selected, "nodes of specific_layer_config")
            # Names and pairs of ends are separate overrides: nodes of a name, nodes between ends.
            single = translation.single_names(names)
            if single:
                nodes = [translation.pattern(name) for name in single]
                draft.overrides.append(_override(config, nodes=nodes))
            for ends in translation.pairs_of_ends(names):
                draft.overrides.append(_override(config, between=ends))
        for config, op_types in self.layer_type_config.items():
            draft.overrides.append(_override(config, op_types=op_types))
        # Last, as options change what the fields have said.
        apply_options(draft, options)
        return draft


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
        weight=None if weight is None else translation.narrowed(weight),
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
