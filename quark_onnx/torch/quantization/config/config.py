"""QConfig and QLayerConfig: quantization settings with AMD Quark's API names.

The counterpart in this package is TorchConfig. The names of AMD Quark before 0.11 are aliases:
Config, QuantizationConfig and QuantizationSpec.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

from calibrators import MinMax
from quark_onnx.common.absent import (  # noqa: F401  names of AMD Quark
    OCP_MXFP4DiffsSpec,
    SVDQuantConfig,
    TwoStageSpec,
    get_per_tensor_observer,
    get_round_method,
    get_scale_type,
    get_zero_point_type,
)
from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints import quark_json
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TYPES, TorchConfig
from quark_onnx.torch.quantization.config import algorithms, specs
from quark_onnx.torch.quantization.config.algorithms import *  # noqa: F403  (AMD Quark has all of them in this module)
from quark_onnx.torch.quantization.config.algorithms import AlgoConfig
from quark_onnx.torch.quantization.config.fields import Fields, plain
from quark_onnx.torch.quantization.config.specs import *  # noqa: F403
from quark_onnx.torch.quantization.config.tensor import QTensorConfig, spec_of
from quark_onnx.torch.quantization.config.type import (
    DeviceType,
    QSchemeType,
    QuantFlow,
    QuantizationMode,
)

__all__ = [
    "Config",
    "OCP_MXFP4DiffsSpec",
    "QConfig",
    "QLayerConfig",
    "QTensorConfig",
    "QuantizationConfig",
    "QuantizationSpec",
]
__all__ += specs.__all__
__all__ += algorithms.__all__

logger = logging.getLogger(__name__)

#: Configuration of a tensor: one stage, or a list of stages.
Stages = QTensorConfig | list[QTensorConfig]
#: Fields of a layer with the settings of a tensor; a bias stays float.
_TENSORS = ("weight", "input_tensors", "output_tensors")
#: Supported channel axes of a weight, and of an activation (batch, tokens, features).
# Weights have the shape (outputs, inputs): a scale per output, groups along the inputs.
_WEIGHT_AXES = {QSchemeType.per_channel: (0,), QSchemeType.per_group: (-1, 1)}
_ACTIVATION_AXES = {QSchemeType.per_channel: (1, -2), QSchemeType.per_group: (-1, 2)}


@dataclass
class QLayerConfig(Fields):
    """Quantization settings of a layer, with the fields of AMD Quark 0.13.

    None leaves a tensor float.
    """

    ENUMS: ClassVar[Mapping[str, type[Enum]]] = {"target_device": DeviceType}

    input_tensors: Stages | None = None
    output_tensors: Stages | None = None
    weight: Stages | None = None
    bias: Stages | None = None
    target_device: DeviceType | str | None = None

    @classmethod
    def of(cls, spec: LayerSpec) -> QLayerConfig:
        """Convert a layer's spec to AMD Quark's API names.

        >>> QLayerConfig.of(LayerSpec(TensorSpec("int4", block_size=32))).weight.group_size
        32
        """
        # Through the entry of a checkpoint: one translation serves files and objects.
        entry = quark_json.layer_to_json(spec)
        return cls(**{name: _tensor_from(entry[name]) for name in _TENSORS})

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a checkpoint's configuration."""
        entry = quark_json.layer_to_json(self.spec())
        for name in _TENSORS:
            _name_observers(entry[name], getattr(self, name))
        return entry

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> QLayerConfig:
        """Build the settings from an entry of ``to_dict``, or of a checkpoint."""
        tensors = {name: _tensor_from(entry.get(name)) for name in (*_TENSORS, "bias")}
        return super().from_dict({**entry, **tensors})

    def spec(self, where: str = "QLayerConfig") -> LayerSpec:
        """Convert the settings to a LayerSpec.

        Args:
            where: the name of the settings in errors.

        Raises:
            ConfigError: the settings are not supported, or contradictory.
        """
        # vLLM and transformers read biases in the type of the model.
        if self.bias is not None:
            logger.warning(
                "%s: bias is to be quantized; it stays float here, as loaders expect",
                where,
            )
        if self.target_device is DeviceType.IPU:
            raise ConfigError(
                f"{where}: target_device is IPU; layers are computed where the"
                " model is",
            )
        weight = None
        if self.weight is not None:
            weight = _weight(self.weight, f"{where}, weight")
        return LayerSpec(
            weight,
            _activation(self.input_tensors, f"{where}, input_tensors"),
            _activation(self.output_tensors, f"{where}, output_tensors"),
        )


def _name_observers(entry: Any, given: Any) -> None:
    """Write the observers of settings into their entry, as a checkpoint holds the usual ones."""
    if not isinstance(given, list | tuple):
        entry, given = [entry], [given]
    for stage_entry, stage in zip(entry, given, strict=True):
        if stage is not None and stage.observer_cls is not None:
            stage_entry["observer_cls"] = stage.observer_cls.__name__


def _tensor_from(entry: Any) -> Any:
    if isinstance(entry, list):
        return [QTensorConfig.from_dict(stage) for stage in entry]
    return None if entry is None else QTensorConfig.from_dict(entry)


def _first(given: Stages) -> QTensorConfig:
    # Axis and granularity are those of the first stage: the second quantizes its codes or its
    # scales.
    return given[0] if isinstance(given, list) else given


def _static(given: Any) -> Any:
    """Return the settings with static scales, since weights are constant."""
    if isinstance(given, list):
        return [_static(stage) for stage in given]
    # Helpers of group formats are dynamic by default, for weights, too.
    if not isinstance(given, QTensorConfig) or not given.is_dynamic:
        return given
    return replace(given, is_dynamic=False)


def _weight(given: Stages, where: str) -> TensorSpec:
    spec = spec_of(_static(given), where)
    if not isinstance(spec.calibrator, MinMax):
        raise ConfigError(
            f"{where}: the observer looks at data; the range of a weight is that of its"
            " values (min_max)",
        )
    _check_axis(_first(given), _WEIGHT_AXES, where)
    return spec


def _activation(given: Stages | None, where: str) -> TensorSpec | None:
    if given is None:
        return None
    spec = spec_of(given, where)
    # Static scales of groups would need a scale per token, which is not known before.
    if spec.group and _first(given).is_dynamic is False:
        raise ConfigError(
            f"{where}: is_dynamic is False; scales of groups are computed by each run,"
            " set it to True",
        )
    _check_axis(_first(given), _ACTIVATION_AXES, where)
    return spec


def _check_axis(
    config: QTensorConfig,
    fine: Mapping[QSchemeType, tuple[int, ...]],
    where: str,
) -> None:
    # Block formats have a size and no granularity.
    scheme = config.qscheme or (QSchemeType.per_group if config.group_size else None)
    if (
        isinstance(scheme, QSchemeType)
        and scheme in fine
        and config.ch_axis not in fine[scheme]
    ):
        raise ConfigError(
            f"{where}: ch_axis is {config.ch_axis}; for {scheme.name} it must be"
            f" {' or '.join(map(str, fine[scheme]))}",
        )


#: Fields of a model with the settings of layers, by glob or class.
_LAYERS = ("layer_type_quant_config", "layer_quant_config", "kv_cache_quant_config")
#: Fields with a single supported value, and the reason.
_NOT_DONE: dict[str, str] = {
    "shared_scale_groups": "each layer has scales of its own",
    "sync_moe_expert_input_amax": "each expert has scales of its own",
    "keep_prequantized_layers": "layers that are quantized already stay as they are",
}


@dataclass
class QConfig(Fields):
    """Quantization settings of a model, with the fields and defaults of AMD Quark 0.13.

    ``log_severity_level``, ``version``, ``quant_flow`` and ``gpu_resident_blocks`` have no effect
    on the result.

    Attributes:
        exclude: globs of names that stay float.
        quant_mode: ``eager_mode`` for modules, ``fx_graph_mode`` for exported modules.
        algo_config: settings of an algorithm, or a list.
        layer_type_quant_config: settings by the class of layers.
        layer_quant_config: settings by globs of names; the first match wins.
        kv_cache_quant_config: settings by globs of the layers that compute keys and values; takes
            precedence over all other fields.
        kv_cache_post_rope: whether keys are quantized after the rotary embedding.
        softmax_quant_spec: settings of the attention probabilities; queries are an entry of
            ``layer_quant_config``.
    """

    ENUMS: ClassVar[Mapping[str, type[Enum]]] = {
        "quant_mode": QuantizationMode,
        "quant_flow": QuantFlow,
    }

    global_quant_config: QLayerConfig
    exclude: list[str] = field(default_factory=list)
    algo_config: AlgoConfig | list[AlgoConfig] | None = None
    log_severity_level: int | None = 1
    version: str | None = quark_json.VERSION
    layer_type_quant_config: dict[Any, QLayerConfig] = field(default_factory=dict)
    layer_quant_config: dict[str, QLayerConfig] = field(default_factory=dict)
    kv_cache_quant_config: dict[str, QLayerConfig] = field(default_factory=dict)
    kv_cache_group: list[str] = field(default_factory=list)
    min_kv_scale: float = 0.0
    kv_cache_post_rope: bool = False
    shared_scale_groups: list[list[str]] = field(default_factory=list)
    softmax_quant_spec: Stages | None = None
    quant_mode: QuantizationMode | str = QuantizationMode.eager_mode
    quant_flow: QuantFlow | str = QuantFlow.standard
    gpu_resident_blocks: int = 0
    sync_moe_expert_input_amax: bool = False
    keep_prequantized_layers: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration entry of a checkpoint, without the packing."""
        entry = quark_json.to_json(self.torch_config())
        # The packing is chosen by the export, and not part of the configuration.
        del entry["export"]
        entry["quant_mode"] = self.mode.name
        if self.algo_config is not None:
            entry["algo_config"] = plain(_several(self.algo_config))
        if self.min_kv_scale:
            entry["min_kv_scale"] = self.min_kv_scale
        entry["global_quant_config"] = self.global_quant_config.to_dict()
        for name in _LAYERS:
            for key, layer in getattr(self, name).items():
                entry[name][plain(key)] = layer.to_dict()
        return entry

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> QConfig:
        """Build the settings from ``to_dict``, or from a checkpoint's ``quantization_config``.

        Raises:
            ConfigError: a field, an algorithm or a value is unknown.
        """
        settings = {
            k: v for k, v in entry.items() if k not in ("quant_method", "export")
        }
        if "global_quant_config" not in settings:
            raise ConfigError("QConfig.from_dict: there is no global_quant_config")
        settings["global_quant_config"] = QLayerConfig.from_dict(
            settings["global_quant_config"]
        )
        # Earlier releases write null for an empty field.
        for name in _LAYERS:
            settings[name] = {
                key: QLayerConfig.from_dict(layer)
                for key, layer in (settings.get(name) or {}).items()
            }
        settings["exclude"] = list(settings.get("exclude") or ())
        settings["softmax_quant_spec"] = _tensor_from(
            settings.get("softmax_quant_spec")
        )
        if (algorithms := settings.get("algo_config")) is not None:
            settings["algo_config"] = [
                AlgoConfig.from_dict(algorithm) for algorithm in _several(algorithms)
            ]
        # The scale of keys and values and their group are settings of the export in checkpoints.
        for name in ("min_kv_scale", "kv_cache_group"):
            if (
                value := (entry.get("export") or {}).get(name)
            ) and name not in settings:
                settings[name] = value
        return super().from_dict(settings)

    @property
    def mode(self) -> QuantizationMode:
        """Return the mode: replacing layers of a module, or calls in a graph."""
        fx, eager = QuantizationMode.fx_graph_mode, QuantizationMode.eager_mode
        # None, which the field accepts, is eager mode.
        return fx if self.quant_mode is fx else eager

    def torch_config(self) -> TorchConfig:
        """Convert the settings to a TorchConfig.

        Raises:
            ConfigError: the settings are not supported, or contradictory.
        """
        # First: a setting that is not supported is named before any other error.
        self._check()
        # An algorithm alone, or a list of algorithms in order.
        chosen = _several(self.algo_config or ())
        config = TorchConfig(
            _layer(self.global_quant_config, "global_quant_config"),
            types=tuple(self._types()),
            exclude=tuple(self.exclude),
            algorithms=tuple(map(_algorithm, chosen)),
        )
        # The right side wins for globs in both; ``with_layers`` puts layers of the cache first.
        entries = self.layer_quant_config | self.kv_cache_quant_config
        layers = {
            glob: _layer(entry, f"the layers {glob!r}")
            for glob, entry in entries.items()
        }
        where = "rope" if self.kv_cache_post_rope else "projection"
        probabilities = _activation(self.softmax_quant_spec, "softmax_quant_spec")
        return quark_json.with_layers(
            config,
            layers,
            self._kv_layers(layers),
            self.min_kv_scale,
            where,
            probabilities,
        )

    def _types(self) -> Iterator[tuple[str, LayerSpec]]:
        """Yield classes of layers with their specs.

        Classes that cannot be quantized stay float, with a warning.
        """
        for kind, entry in self.layer_type_quant_config.items():
            # Scripts give classes of torch; a configuration from a file has their names.
            name = kind if isinstance(kind, str) else kind.__name__
            if not isinstance(kind, str) and name not in TYPES:
                logger.warning(
                    "layer_type_quant_config names %s, which is never quantized and"
                    " stays float",
                    name,
                )
                continue
            yield name, _layer(entry, "layer_type_quant_config")

    def _kv_layers(self, layers: Mapping[str, LayerSpec]) -> list[str]:
        """Return globs of the layers that compute keys and values."""
        named = self.kv_cache_group or list(self.kv_cache_quant_config)
        # Two fields of AMD Quark for the same layers have to agree.
        if self.kv_cache_quant_config and set(named) != set(self.kv_cache_quant_config):
            raise ConfigError(
                f"kv_cache_group is {named}, but kv_cache_quant_config is for"
                f" {list(self.kv_cache_quant_config)}",
            )
        for glob in named:
            # Keys and values are the outputs of their projections.
            if glob not in layers or layers[glob].output is None:
                raise ConfigError(
                    f"{glob!r} is to compute keys or values, but there are no"
                    " output_tensors for it",
                )
        for setting in ("min_kv_scale", "kv_cache_post_rope"):
            # The setting would have no effect, which is more likely a mistake.
            if (value := getattr(self, setting)) and not named:
                raise ConfigError(
                    f"{setting} is {value}, but there is no kv_cache_quant_config",
                )
        return named

    def _check(self) -> None:
        # The defaults of the fields, as a dataclass knows them.
        usual = type(self)(QLayerConfig())
        for name, why in _NOT_DONE.items():
            if (value := getattr(self, name)) != getattr(usual, name):
                if isinstance(value, Enum):
                    value = value.name
                raise ConfigError(f"{name} is {value!r}, which is not supported: {why}")


def _several(given: Any) -> list[Any]:
    """Return a list of settings; a single one stands for a list of one."""
    return list(given) if isinstance(given, list | tuple) else [given]


def _algorithm(given: Any) -> Any:
    if not isinstance(given, AlgoConfig):
        raise ConfigError(
            f"algo_config has {given!r}; it must be an AlgoConfig, such as AWQConfig()"
        )
    return given.algorithm()


def _layer(given: Any, where: str) -> LayerSpec:
    # A QTensorConfig in the place of a layer's settings is the usual mistake.
    if not isinstance(given, QLayerConfig):
        raise ConfigError(f"{where} is {given!r}; it must be a QLayerConfig")
    return given.spec(where)


#: Names before release 0.11.
Config, QuantizationConfig, QuantizationSpec = QConfig, QLayerConfig, QTensorConfig
