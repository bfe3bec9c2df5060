"""LLMTemplate: configurations for families of language models, by scheme name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from quark_onnx.common.absent import (  # noqa: F401  names of AMD Quark
    AmdFP4GlobalScaleScheme,
    AmdFP4Scheme,
    BFP16Scheme,
    FP4Block16ScaleE4M3Scheme,
    FP8Scheme,
    INT4_FP8Scheme,
    Int4WeightAndActivationScheme,
    Int4WeightOnlyPerChannelScheme,
    Int4WeightOnlyScheme,
    Int8Scheme,
    MX6Scheme,
    MX9Scheme,
    MXFP4_FP8Scheme,
    MXFP4_MXFP6E2M3Scheme,
    MXFP4Scheme,
    MXFP4WeightOnlyScheme,
    MXFP6E2M3Scheme,
    MXFP6E3M2Scheme,
    PTPCFP8Scheme,
    QuantizationScheme,
    QuantizationSchemeCollection,
    Uint4WeightOnlyPerChannelScheme,
    Uint4WeightOnlyScheme,
)
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.config.checks import require_known
from quark_onnx.torch.config.schemes import SCHEMES, scheme
from quark_onnx.torch.config.torch_config import DefaultExclude
from quark_onnx.torch.quantization.config.algorithms import AlgoConfig, algorithm_named
from quark_onnx.torch.quantization.config.config import QConfig, QLayerConfig
from quark_onnx.torch.quantization.config.families import FAMILIES, queries_of
from quark_onnx.torch.quantization.config.fields import Fields
from quark_onnx.torch.quantization.config.specs import FP8E4M3PerTensorSpec
from quark_onnx.torch.quantization.config.tensor import QTensorConfig

#: Formats of keys, values, queries and attention probabilities.
# Static scales per tensor: the format in which vLLM reads caches.
_KV_CACHES = {"fp8": FP8E4M3PerTensorSpec()}
_ATTENTIONS = _KV_CACHES


@dataclass
class LLMTemplate(Fields):
    """Default settings for a family of models.

    Attributes:
        model_type: the model type in the transformers configuration.
        kv_layers_name: globs of layers that compute keys and values.
        q_layer_name: glob of layers that compute queries, or a list.
        gate_up_layers_name: without effect: layers are found by the structure of the model.
        exclude_layers_name: globs of layers that stay float; globs without a match are allowed.
        algorithm_configs: settings of algorithms by name; the defaults for missing names.

    >>> config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme="fp8")
    >>> config.exclude, list(config.kv_cache_quant_config)
    (['lm_head'], ['*k_proj', '*v_proj'])
    """

    # Templates of scripts; those of AMD's families are made on demand.
    registered: ClassVar[dict[str, LLMTemplate]] = {}
    _schemes: ClassVar[dict[str, QLayerConfig]] = {}

    model_type: str
    kv_layers_name: list[str] | None = None
    q_layer_name: str | list[str] | None = None
    gate_up_layers_name: list[str] | None = None
    exclude_layers_name: list[str] = field(default_factory=list)
    algorithm_configs: Mapping[str, AlgoConfig] = field(default_factory=dict)

    @classmethod
    def list_available(cls) -> list[str]:
        """Return the model types with a template."""
        registered = [name for name in cls.registered if name not in FAMILIES]
        return [*FAMILIES, *registered]

    @classmethod
    def get(cls, model_type: str) -> LLMTemplate:
        """Return the template of a model type.

        Raises:
            ConfigError: there is none.
        """
        # A registered template replaces the family's own.
        if model_type in cls.registered:
            return cls.registered[model_type]
        if model_type not in FAMILIES:
            raise ConfigError(
                "there is no template for models of type"
                f" {model_type!r}{nearest(model_type, cls.list_available())} A new one:"
                " LLMTemplate.register_template(LLMTemplate(model_type,"
                " kv_layers_name, ...))",
            )
        cache, floats = FAMILIES[model_type]
        return cls(
            model_type,
            cache.split(),
            queries_of(model_type),
            exclude_layers_name=floats.split(),
        )

    @classmethod
    def register_template(cls, template: LLMTemplate) -> None:
        """Register a template by its model type, and replace an existing one."""
        cls.registered[template.model_type] = template

    @classmethod
    def get_supported_schemes(cls) -> list[str]:
        """Return the names of schemes."""
        return [*SCHEMES, *cls._schemes]

    @classmethod
    def register_scheme(cls, scheme_name: str, config: QLayerConfig) -> None:
        """Register a scheme by name.

        Raises:
            ConfigError: the name is taken, or the scheme is not supported.
        """
        if scheme_name in cls.get_supported_schemes():
            raise ConfigError(
                f"there is a scheme {scheme_name!r} already; choose another name, or"
                " unregister it first",
            )
        # Only for its errors: a scheme is checked when it is registered, not when a model is
        # quantized.
        config.spec(f"the scheme {scheme_name!r}")
        cls._schemes[scheme_name] = config

    @classmethod
    def unregister_scheme(cls, scheme_name: str) -> None:
        """Remove a registered scheme.

        Raises:
            ConfigError: there is none.
        """
        if scheme_name not in cls._schemes:
            raise ConfigError(
                f"no scheme {scheme_name!r} was"
                f" registered{nearest(scheme_name, cls._schemes)}",
            )
        del cls._schemes[scheme_name]

    def get_config(  # noqa: PLR0913
        self,
        scheme: str,
        algorithm: str | list[str] | None = None,
        kv_cache_scheme: str | None = None,
        min_kv_scale: float = 0.0,
        attention_scheme: str | None = None,
        layer_config: Mapping[str, str] | None = None,
        layer_type_config: Mapping[Any, str] | None = None,
        exclude_layers: list[str] | None = None,
        algo_configs: Mapping[str, AlgoConfig] | None = None,
        shared_scale_groups: list[list[str]] | None = None,
        group_size: int | None = None,
    ) -> QConfig:
        """Return the configuration of a model.

        Args:
            scheme: the name of the scheme.
            algorithm: the name of an algorithm, or a list.
            kv_cache_scheme: "fp8", or None for float keys and values.
            min_kv_scale: the least scale of keys and values.
            attention_scheme: "fp8" for queries and probabilities, or None for float.
            layer_config: other schemes, by globs of names.
            layer_type_config: other schemes, by the class of layers.
            exclude_layers: globs of layers that stay float; replaces the default.
            algo_configs: settings of algorithms; replaces the defaults.
            shared_scale_groups: None; scales are not shared.
            group_size: values per group, for schemes with a variable size (the names before release
                0.11).

        Returns:
            The configuration.

        Raises:
            ConfigError: a name is unknown, or a setting is not supported.
        """
        # DefaultExclude marks patterns that need not match; those of the caller have to.
        usual: list[str] = [DefaultExclude(glob) for glob in self.exclude_layers_name]
        config = QConfig(
            self._scheme(scheme, group_size),
            exclude=usual if exclude_layers is None else list(exclude_layers),
            algo_config=self._algorithms(algorithm, algo_configs or {}),
            layer_quant_config={
                glob: self._scheme(name, group_size)
                for glob, name in (layer_config or {}).items()
            },
            layer_type_quant_config={
                kind: self._scheme(name, group_size)
                for kind, name in (layer_type_config or {}).items()
            },
            min_kv_scale=min_kv_scale,
            shared_scale_groups=shared_scale_groups or [],
        )
        if kv_cache_scheme is not None:
            config = self._with_kv_cache(config, kv_cache_scheme)
        if attention_scheme is None:
            return config
        return self._with_attention(config, attention_scheme)

    @classmethod
    def _scheme(cls, name: str, group_size: int | None) -> QLayerConfig:
        # Registered schemes have a fixed group size.
        if name in cls._schemes:
            return cls._schemes[name]
        return QLayerConfig.of(scheme(name, group_size))

    def _with_kv_cache(self, config: QConfig, name: str) -> QConfig:
        require_known(name, _KV_CACHES, "kv_cache_scheme is")
        if not self.kv_layers_name:
            raise ConfigError(
                f"the template of {self.model_type} does not say which layers compute"
                " keys and values",
            )
        spec = _KV_CACHES[name].to_quantization_spec()
        for glob in self.kv_layers_name:
            config.kv_cache_quant_config[glob] = _set_output(config, glob, spec)
        config.kv_cache_group = list(self.kv_layers_name)
        return config

    def _with_attention(self, config: QConfig, name: str) -> QConfig:
        require_known(name, _ATTENTIONS, "attention_scheme is")
        if not self.q_layer_name:
            raise ConfigError(
                f"the template of {self.model_type} does not say which layers compute"
                " queries",
            )
        # Queries are rounded as outputs of their layers, probabilities inside the attention.
        spec = config.softmax_quant_spec = _ATTENTIONS[name].to_quantization_spec()
        globs = self.q_layer_name
        for glob in [globs] if isinstance(globs, str) else globs:
            _set_output(config, glob, spec)
        return config

    def _algorithms(
        self,
        names: str | list[str] | None,
        given: Mapping[str, AlgoConfig],
    ) -> list[AlgoConfig] | None:
        """Return the settings of algorithms in order; None without algorithms, as in AMD Quark.

        Args:
            given: settings by name; they take precedence over those of the template.
        """
        if isinstance(names, str):
            names = [names]
        settings = {**self.algorithm_configs, **given}
        configs = list[AlgoConfig]()
        for name in names or ():
            config = settings.get(name)
            configs.append(algorithm_named(name)() if config is None else config)
        return configs or None


def _set_output(config: QConfig, glob: str, spec: QTensorConfig) -> QLayerConfig:
    """Quantize the outputs of layers, in place, and return the entry of the glob.

    Weights and inputs keep the scheme of the glob, or the global one.
    """
    layer = config.layer_quant_config.get(glob, config.global_quant_config)
    entry = QLayerConfig(layer.input_tensors, spec, layer.weight)
    config.layer_quant_config[glob] = entry
    return entry
