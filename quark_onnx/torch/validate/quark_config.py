"""AMD Quark's quantization_config by layer, as read by vLLM and by amd-quark."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

from quark_onnx.torch.config.torch_config import matches
from quark_onnx.torch.validate.fields import object_of, objects_in, strings_of
from quark_onnx.torch.validate.modules import Module
from quark_onnx.torch.validate.name_patterns import (
    LongerTexts,
    ShellPatterns,
    names_and_expressions,
)

Layer = dict[str, Any]
#: Layers whose outputs are keys, values or queries of an attention.
_CACHED = ("k_proj", "v_proj", "q_proj", "qkv_proj")


def stages(spec: Any) -> list[dict[str, Any]]:
    """Return the specifications of a tensor: no, a single, or several stages.

    >>> stages(None), stages({"dtype": "int8"})
    ([], [{'dtype': 'int8'}])
    """
    # null and malformed entries drop out; ``listed`` tells how many there were
    return [value for value in listed(spec) if isinstance(value, dict)]


def listed(spec: Any) -> list[Any]:
    """Return a list unchanged, and another value as the single entry of a list."""
    return spec if isinstance(spec, list) else [spec]


def overrides_in_vllm(pattern: str, name: str) -> bool:
    """Return whether vLLM applies an entry of layer_quant_config to a layer."""
    # ``get_layer_quant_config_from_name``: without a star, the name must be within the pattern, so
    # that an exact name matches, and a longer pattern as well
    return fnmatch(name, pattern) if "*" in pattern else name in pattern


class _OverridesInVllm:
    """Entries of layer_quant_config, of which the first that vLLM applies to a layer counts.

    ``overrides_in_vllm`` says which apply; names are looked up among all entries at once.

    Args:
        patterns: names and patterns in the order of the file.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        entries = list(enumerate(patterns))
        self._globs = [entry for entry in entries if "*" in entry[1]]
        self._names = [entry for entry in entries if "*" not in entry[1]]
        self._longer = LongerTexts(name for _, name in self._names)

    def first(self, name: str) -> str | None:
        """Return the first entry for a name; None without such an entry."""
        number = self._longer.first(name)
        longer = None if number is None else self._names[number]
        for place, pattern in self._globs:
            if longer is not None and place > longer[0]:
                break
            if overrides_in_vllm(pattern, name):
                return pattern
        return None if longer is None else longer[1]


class QuarkConfig:
    """A ``quantization_config`` whose ``quant_method`` is "quark".

    Args:
        entries: the dictionary.

    Attributes:
        entries: the dictionary.
        exclude: names and patterns of float layers.
        export: the settings of the export.
        is_fake: whether the weights are floats that were rounded, without codes and scales.
        pack_method: the order of packed 4-bit integers.
        kv_patterns: patterns of the layers whose outputs are the KV cache.
        overrides: configurations of single layers, by name or pattern.
        fallback: the default configuration of layers.
        kv_layers: the configurations of single layers that define the KV cache.
        rounds_attention: whether softmax probabilities of attention are quantized.
    """

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries
        self.exclude = strings_of(entries.get("exclude"))
        self.export = object_of(entries.get("export"))
        # a missing weight_format means real_quantized
        self.is_fake = self.export.get("weight_format") == "fake_quantized"
        # the default of amd-quark; vLLM passes None on, and ``quark-export`` reports it
        self.pack_method = str(self.export.get("pack_method", "reorder"))
        self.kv_patterns = strings_of(self.export.get("kv_cache_group"))
        self.overrides = objects_in(entries.get("layer_quant_config"))
        self.fallback = object_of(entries.get("global_quant_config"))
        self.kv_layers = {
            name: layer
            for name, layer in self.overrides.items()
            if matches(name, self.kv_patterns)
        }
        self.rounds_attention = bool(stages(entries.get("softmax_quant_spec")))
        # configurations name thousands of layers, which are looked up here
        self._excluded = ShellPatterns(self.exclude)
        self._excluded_in_vllm = names_and_expressions(self.exclude)
        self._overrides = ShellPatterns(self.overrides)
        self._overrides_in_vllm = _OverridesInVllm(self.overrides)
        #: The configurations that ``layer_in_vllm`` has found, by name.
        self._layers_in_vllm = dict[str, Layer]()

    @cached_property
    def _modules_around_excluded(self) -> frozenset[str]:
        """The names of all modules around the entries of exclude."""
        around = set[str]()
        for name in self.exclude:
            while "." in name:
                name = name.rpartition(".")[0]
                around.add(name)
        return frozenset(around)

    def excludes(self, name: str) -> bool:
        """Return whether amd-quark kept a layer float.

        Patterns are shell patterns, and regular expressions for vLLM.
        """
        is_shell_pattern = self._excluded.first(name) is not None
        return is_shell_pattern or self._excluded_in_vllm.match(name)

    def excludes_in_vllm(self, module: Module, fused_name: str) -> bool:
        """Return whether vLLM keeps a layer float, by exact name or regular expression.

        The experts of a mixture have a common entry.

        Args:
            module: the layer.
            fused_name: name of the fused layer of which it is a part; empty if it is none.
        """
        # vLLM asks once for all experts of a block
        name = module.experts or module.name
        if self._excluded_in_vllm.match(name) or self.excludes_fused(fused_name):
            return True
        # a single expert that is excluded excludes them all: ``should_ignore_layer`` with
        # check_children
        return bool(module.experts) and module.experts in self._modules_around_excluded

    def excludes_fused(self, fused_name: str) -> bool:
        """Return whether vLLM keeps all parts of a fused layer float, by its own name.

        Args:
            fused_name: name of the fused layer, such as "model.layers.0.self_attn.qkv_proj"; empty
                for a layer that is not fused.
        """
        return bool(fused_name) and self._excluded_in_vllm.match(fused_name)

    def layer(self, name: str) -> Layer:
        """Return a layer's configuration in amd-quark: the first matching pattern."""
        # the first match wins in both readers, so that the order of the file matters
        pattern = self._overrides.first(name)
        return self.fallback if pattern is None else self.overrides[pattern]

    def layer_in_vllm(self, module: Module) -> Layer:
        """Return a layer's configuration in vLLM, without outputs for the KV cache."""
        # experts have a common entry, and several checks ask for each layer
        name = module.experts or module.name
        if name not in self._layers_in_vllm:
            self._layers_in_vllm[name] = self._layer_in_vllm(name)
        return self._layers_in_vllm[name]

    def _layer_in_vllm(self, name: str) -> Layer:
        pattern = self._overrides_in_vllm.first(name)
        if pattern is None:
            return self.fallback
        layer = self.overrides[pattern]
        # queries are quantized together with the cache, though no entry of export names them
        is_query = bool(self.kv_patterns) and pattern == "*q_proj"
        if pattern not in self.kv_layers and not is_query:
            return layer
        # ``QuarkConfig.from_config`` of vLLM removes outputs before layers are configured
        return {**layer, "output_tensors": None}

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


def different(first: Layer, second: Layer) -> list[str]:
    """Return the keys of two objects whose values differ; a missing value is not null."""
    missing = object()
    return [
        key
        for key in {**first, **second}
        if not same(first.get(key, missing), second.get(key, missing))
    ]
