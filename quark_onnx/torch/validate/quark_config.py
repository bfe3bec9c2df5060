"""AMD Quark's quantization_config by layer, as read by vLLM and by amd-quark."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from quark_onnx.containers import of_type
from quark_onnx.torch.config.torch_config import matches
from quark_onnx.torch.validate.json_values import object_of, objects_in, strings_of
from quark_onnx.torch.validate.modules import Module

Layer = dict[str, Any]
#: Layers whose outputs are keys, values or queries of an attention.
_CACHED = ("k_proj", "v_proj", "q_proj", "qkv_proj")


def stages(spec: Any) -> list[dict[str, Any]]:
    """Return the specifications of a tensor: no, a single, or several stages.

    >>> stages(None), stages({"dtype": "int8"})
    ([], [{'dtype': 'int8'}])
    """
    # null and malformed entries drop out; ``listed`` tells how many there were
    return of_type(listed(spec), dict)


def listed(spec: Any) -> list[Any]:
    """Return a list as it is, and any other value as a list of one."""
    return spec if isinstance(spec, list) else [spec]


def is_glob(pattern: str) -> bool:
    """Return whether a name is a shell pattern, which vLLM does not support."""
    # "*" is common in regular expressions
    return not pattern.startswith("re:") and any(mark in pattern for mark in "*?[")


def overrides_in_vllm(pattern: str, name: str) -> bool:
    """Return whether vLLM applies an entry of layer_quant_config to a layer."""
    # ``get_layer_quant_config_from_name``: without a star, the name must be within the pattern, so
    if "*" in pattern:
        return fnmatch(name, pattern)
    # that an exact name matches, and a longer pattern as well
    return name in pattern


@dataclass(frozen=True)
class QuarkConfig:
    """A ``quantization_config`` whose ``quant_method`` is "quark".

    Attributes:
        entries: the dictionary.
    """

    entries: dict[str, Any]

    @property
    def exclude(self) -> list[str]:
        """Names and patterns of float layers."""
        return strings_of(self.entries.get("exclude"))

    @property
    def export(self) -> dict[str, Any]:
        """The settings of the export."""
        return object_of(self.entries.get("export"))

    @property
    def is_fake(self) -> bool:
        """Whether the weights are floats that were rounded, without codes and scales."""
        # a missing weight_format means real_quantized
        return bool(self.export.get("weight_format") == "fake_quantized")

    @property
    def pack_method(self) -> str:
        """The order of packed 4-bit integers."""
        # the default of amd-quark; vLLM passes None on, and ``quark-export`` reports it
        return str(self.export.get("pack_method", "reorder"))

    @property
    def kv_patterns(self) -> list[str]:
        """Patterns of the layers whose outputs are the KV cache."""
        return strings_of(self.export.get("kv_cache_group"))

    @property
    def overrides(self) -> dict[str, Layer]:
        """Configurations of single layers, by name or pattern."""
        return objects_in(self.entries.get("layer_quant_config"))

    @property
    def fallback(self) -> Layer:
        """The default configuration of layers."""
        return object_of(self.entries.get("global_quant_config"))

    @property
    def kv_layers(self) -> dict[str, Layer]:
        """The configurations of single layers that define the KV cache."""
        return {
            name: layer
            for name, layer in self.overrides.items()
            if matches(name, self.kv_patterns)
        }

    def excludes(self, name: str) -> bool:
        """Return whether amd-quark kept a layer float.

        Patterns are shell patterns, and regular expressions for vLLM.
        """
        return any(
            fnmatch(name, pattern) or is_regular_match(pattern, name)
            for pattern in self.exclude
        )

    def excludes_in_vllm(self, module: Module, fused_name: str) -> bool:
        """Return whether vLLM keeps a layer float, by exact name or regular expression.

        The experts of a mixture have a common entry.

        Args:
            module: the layer.
            fused_name: name of the fused layer of which it is a part; empty if it is none.
        """
        # vLLM asks once for all experts of a block
        name = module.experts or module.name
        if matches_any(name, self.exclude) or self.excludes_fused(fused_name):
            return True
        # a single expert that is excluded excludes them all
        inside = f"{module.experts}."
        # ``should_ignore_layer`` with check_children
        is_inside = (pattern.startswith(inside) for pattern in self.exclude)
        return bool(module.experts) and any(is_inside)

    def excludes_fused(self, fused_name: str) -> bool:
        """Return whether vLLM keeps all parts of a fused layer float, by its own name.

        Args:
            fused_name: name of the fused layer, such as "model.layers.0.self_attn.qkv_proj"; empty
                for a layer that is not fused.
        """
        return bool(fused_name) and matches_any(fused_name, self.exclude)

    def layer(self, name: str) -> Layer:
        """Return a layer's configuration in amd-quark: the first matching pattern."""
        # the first match wins in both readers, so that the order of the file matters
        for pattern, layer in self.overrides.items():
            if fnmatch(name, pattern):
                return layer
        return self.fallback

    def layer_in_vllm(self, module: Module) -> Layer:
        """Return a layer's configuration in vLLM, without outputs for the KV cache."""
        name = module.experts or module.name
        for pattern, layer in self.overrides.items():
            if overrides_in_vllm(pattern, name):
                is_cache = self._is_cache_pattern(pattern)
                # ``QuarkConfig.from_config`` of vLLM removes them before layers are configured
                return {**layer, "output_tensors": None} if is_cache else layer
        return self.fallback

    def _is_cache_pattern(self, pattern: str) -> bool:
        """Return whether the outputs of an entry are for the KV cache or its queries."""
        if pattern in self.kv_layers:
            return True
        # queries are quantized together with the cache, though no entry of export names them
        return bool(self.kv_patterns) and pattern == "*q_proj"

    @property
    def rounds_attention(self) -> bool:
        """Whether softmax probabilities of attention are quantized."""
        return bool(stages(self.entries.get("softmax_quant_spec")))

    def is_cached(self, module: Module) -> bool:
        """Return whether a layer's output is quantized, as KV cache or as queries."""
        # other layers with quantized outputs are refused by vLLM
        output = self.layer(module.name).get("output_tensors")
        return bool(stages(output)) and module.last in _CACHED


def same(first: Any, second: Any) -> bool:
    """Return whether two configurations are equal in vLLM; 1 does not equal True."""
    # ``deep_compare`` of vLLM, quark/utils.py; 1 == True in Python, but not in JSON
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and not different(first, second)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern is a name, or a regular expression after "re:" that matches it."""
    return any(
        pattern == name or is_regular_match(pattern, name) for pattern in patterns
    )


def is_regular(pattern: str) -> bool:
    """Return whether a pattern is a regular expression."""
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def different(first: Layer, second: Layer) -> list[str]:
    """Return the keys of two objects whose values differ; a missing value is not null."""
    # None would hide the difference between a missing key and null
    missing = object()
    return [
        key
        for key in {**first, **second}
        if not same(first.get(key, missing), second.get(key, missing))
    ]


def is_regular_match(pattern: str, name: str) -> bool:
    """Return whether a pattern is a regular expression, after "re:", that matches a name.

    >>> is_regular_match("re:.*lm_head", "lm_head"), is_regular_match("re:(", "lm_head")
    (True, False)
    """
    try:
        # anchored at the start alone, as in vLLM
        return pattern.startswith("re:") and re.match(pattern[3:], name) is not None
    except re.error:
        return False
