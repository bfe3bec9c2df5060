"""QuarkConfig: what AMD Quark's quantization_config says of a layer, as vLLM reads it and as
amd-quark itself does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch, fnmatchcase
from typing import Any

from quark_onnx.torch.validate.modules import Module

Layer = dict[str, Any]


def stages(spec: Any) -> list[dict[str, Any]]:
    """The specifications of a tensor: none, one, or those of several stages.

    >>> stages(None), stages({"dtype": "int8"})
    ([], [{'dtype': 'int8'}])
    """
    found = spec if isinstance(spec, list) else [spec]
    return [stage for stage in found if isinstance(stage, dict)]


def is_glob(pattern: str) -> bool:
    """Whether a name is a shell pattern, and not one that vLLM understands."""
    return not pattern.startswith("re:") and any(mark in pattern for mark in "*?[")


@dataclass(frozen=True)
class QuarkConfig:
    """A ``quantization_config`` whose ``quant_method`` is "quark".

    Attributes:
        entries: the dictionary.
    """

    entries: dict[str, Any]

    @property
    def exclude(self) -> list[str]:
        """Names and patterns that stay float."""
        found = self.entries.get("exclude")
        return (
            [name for name in found if isinstance(name, str)]
            if isinstance(found, list)
            else []
        )

    @property
    def export(self) -> dict[str, Any]:
        """How it was written."""
        found = self.entries.get("export")
        return found if isinstance(found, dict) else {}

    @property
    def pack_method(self) -> str:
        """In which order integers of four bits are packed."""
        return str(self.export.get("pack_method", "reorder"))

    @property
    def kv_patterns(self) -> list[str]:
        """Patterns of the layers whose outputs are the KV cache."""
        found = self.export.get("kv_cache_group")
        return (
            [name for name in found if isinstance(name, str)]
            if isinstance(found, list)
            else []
        )

    @property
    def overrides(self) -> dict[str, Layer]:
        """Configurations of single layers, by name or pattern."""
        found = self.entries.get("layer_quant_config")
        return (
            {str(key): layer for key, layer in found.items() if isinstance(layer, dict)}
            if isinstance(found, dict)
            else {}
        )

    @property
    def fallback(self) -> Layer:
        """The configuration of all other layers."""
        found = self.entries.get("global_quant_config")
        return found if isinstance(found, dict) else {}

    @property
    def kv_layers(self) -> dict[str, Layer]:
        """The configurations of single layers that the KV cache is read from."""
        return {
            name: layer
            for name, layer in self.overrides.items()
            if any(fnmatchcase(name, pattern) for pattern in self.kv_patterns)
        }

    def excludes(self, name: str) -> bool:
        """Whether amd-quark kept a layer float: patterns of a shell, and for vLLM's sake regular
        expressions.
        """
        return any(
            fnmatch(name, pattern) or _matches(name, pattern)
            for pattern in self.exclude
        )

    def excludes_in_vllm(self, module: Module) -> bool:
        """Whether vLLM keeps a layer float: exact names and regular expressions.

        Experts all together.
        """
        names = [module.name]
        if module.experts:
            inside = f"{module.experts}."
            if any(
                name.startswith(inside)
                for name in self.exclude
                if not name.startswith("re:")
            ):
                return True
            names = [module.experts]
        return any(
            name == pattern or _matches(name, pattern)
            for name in names
            for pattern in self.exclude
        )

    def layer(self, name: str) -> Layer:
        """The configuration of a layer, as amd-quark finds it: the first pattern of a shell that
        matches.
        """
        return next(
            (
                layer
                for pattern, layer in self.overrides.items()
                if fnmatch(name, pattern)
            ),
            self.fallback,
        )

    def layer_in_vllm(self, module: Module) -> Layer:
        """The configuration of a layer, as vLLM finds it, without the outputs that are the KV
        cache.
        """
        name = module.experts or module.name
        for pattern, layer in self.overrides.items():
            if fnmatch(name, pattern) if "*" in pattern else name in pattern:
                cached = pattern in self.kv_layers or (
                    self.kv_patterns and pattern == "*q_proj"
                )
                return {**layer, "output_tensors": None} if cached else layer
        return self.fallback

    @property
    def rounds_attention(self) -> bool:
        """Whether the probabilities of attention are quantized."""
        return bool(stages(self.entries.get("softmax_quant_spec")))

    def is_cached(self, module: Module) -> bool:
        """Whether a layer's outputs are quantized for the KV cache, or the queries with it."""
        output = self.layer(module.name).get("output_tensors")
        return bool(stages(output)) and module.last in (
            "k_proj",
            "v_proj",
            "q_proj",
            "qkv_proj",
        )


def same(first: Any, second: Any) -> bool:
    """Whether vLLM takes two configurations for one: all keys count, and 1 is not True."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            same(first[key], second[key]) for key in first
        )
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def _matches(name: str, pattern: str) -> bool:
    try:
        return pattern.startswith("re:") and re.match(pattern[3:], name) is not None
    except re.error:
        return False
