"""Modules: the tensors of a layer, layer classes, fused layers, and expected sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quark_onnx.torch.models.checkpoint_names import is_embedding
from quark_onnx.torch.models.fused_groups import FUSED, FUSED_NAMES
from quark_onnx.torch.runtime.safetensors_header import FLOATS, StoredTensor
from quark_onnx.torch.validate.fields import is_positive

#: Names of scales in files of amd-quark before 0.9, and their current names.
_OLD = re.compile(r"\.(weight|input|output|bias)_quantizer\.(scale|zero_point)$")
#: Names of the values of a Linear in the supported layouts.
#: compressed-tensors packs into weight_packed, AutoAWQ and GPTQ into qweight.
WEIGHTS = ("weight", "weight_packed", "qweight")
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
#: Types of integers, which stand for codes in weights.
_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL")

#: "model.layers.0.mlp.experts.3.up_proj" is within the experts "model.layers.0.mlp.experts".
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.")
#: Names of the layers of an expert that are fused, in files of Qwen and of Mixtral.
GATES = ("gate_proj", "up_proj", "w1", "w3")
#: Names of the layers that choose experts, in Mixtral, Qwen, DeepSeek and gpt-oss.
_ROUTERS = ("gate", "router", "shared_expert_gate")


class Module:
    """Tensors of a layer.

    Args:
        name: name of the layer, such as "model.layers.0.mlp.up_proj".
        tensors: tensors by the last part of the current name: "weight", "weight_scale", ...

    Attributes:
        name: name of the layer.
        tensors: tensors by the last part of the current name.
        parent: name of the module around the layer.
        last: the last part of the name.
        weight: the values of the layer; None for a module without a weight.
        is_linear: whether the layer is a matrix, but neither an embedding nor a head.
        is_head: whether the layer computes the logits.
        is_router: whether the layer chooses experts; most clients keep routers float.
        experts: name of the module of experts around the layer, or an empty string.
        has_bare_integers: whether a norm or an embedding, for example, has integers without a
            scale.
        is_quantized: whether the values are not 16-bit or 32-bit floats, or have a scale.
    """

    def __init__(self, name: str, tensors: dict[str, StoredTensor]) -> None:
        self.name, self.tensors = name, tensors
        self.parent, _, self.last = name.rpartition(".")
        self.is_head = self.last == HEAD
        self.is_router = self.last in _ROUTERS
        # the dot lets the module of one expert match as well, not only layers below it
        match = _EXPERT.match(f"{name}.")
        self.experts = match["experts"] if match else ""
        weights = [tensors[key] for key in WEIGHTS if key in tensors]
        weight = self.weight = weights[0] if weights else None
        is_matrix = weight is not None and len(weight.shape) == 2
        self.is_linear = is_matrix and not self.is_head and not is_embedding(name)
        scales = [key for key in tensors if "scale" in key]
        is_other = "weight" in tensors and not self.is_linear and not self.is_head
        self.has_bare_integers = (
            is_other and not scales and tensors["weight"].dtype in _INTEGERS
        )
        # scales of outputs and of the KV cache stand beside float weights, too
        is_scaled = any(not key.startswith(("output", "k_", "v_")) for key in scales)
        # F64 without a scale is an unquantized weight, too; integers and 8-bit floats never are
        self.is_quantized = weight is not None and (
            is_scaled or weight.dtype not in (*FLOATS, "F64")
        )

    @property
    def matrix(self) -> StoredTensor:
        """The values of a layer that has a weight, as Linear layers and heads do."""
        assert self.weight is not None
        return self.weight


def today(name: str) -> str:
    """Return the name of a tensor in amd-quark since 0.9.

    >>> today("model.layers.0.mlp.up_proj.weight_quantizer.scale")
    'model.layers.0.mlp.up_proj.weight_scale'
    """
    return _OLD.sub(r".\1_\2", name)


def modules_of(tensors: Mapping[str, StoredTensor]) -> dict[str, Module]:
    """Return modules by name, with their tensors."""
    tensors_by_module = dict[str, dict[str, StoredTensor]]()
    for name, tensor in tensors.items():
        # a tensor without a dot in its name belongs to the module ""
        module, _, what = today(name).rpartition(".")
        tensors_by_module.setdefault(module, {})[what] = tensor
    return {name: Module(name, parts) for name, parts in tensors_by_module.items()}


def fused(modules: Mapping[str, Module]) -> dict[str, list[Module]]:
    """Return the Linear layers that clients fuse, by a common name.

    vLLM holds all experts of a block in one module with one scheme.
    """
    groups = dict[str, list[Module]]()
    for module in modules.values():
        if not module.is_linear:
            continue
        if module.experts:
            groups.setdefault(module.experts, []).append(module)
            continue
        # a layer is a part of several fused layers where families fuse differently
        for lasts in FUSED:
            if module.last in lasts:
                name = f"{module.parent}.{{{','.join(lasts)}}}"
                groups.setdefault(name, []).append(module)
    return groups


def shards(modules: Mapping[str, Module]) -> Iterator[tuple[str, list[Module]]]:
    """Yield the layers that clients fuse within a block, such as q, k and v; no experts."""
    for name, group in fused(modules).items():
        if not group[0].experts:
            yield name, group


def fused_parts(module: Module, modules: Mapping[str, Module]) -> tuple[str, list[str]]:
    """Return the fused layer that vLLM makes of a layer and others.

    Args:
        module: the layer.
        modules: all modules by name.

    Returns:
        The name of the fused layer, such as "model.layers.0.self_attn.qkv_proj", and the names of
        its parts. The name is empty if the layer is no part of a fused one, or if the model lacks
        one of the parts.
    """
    for fused_name, lasts in FUSED_NAMES.items():
        parts = [f"{module.parent}.{last}" for last in lasts]
        # experts of a block are one module in vLLM, by whatever name
        whole = not module.experts and all(part in modules for part in parts)
        if module.last in lasts and whole:
            return f"{module.parent}.{fused_name}", parts
    return "", []


def sizes_on_disk(module: Module, outputs: int, config: Mapping[str, Any]) -> list[int]:
    """Return the numbers of outputs of the parts of a layer that is stored fused.

    vLLM splits such a layer, and loads its parts as if they were stored one by one:
    ``_load_fused_module_from_checkpoint`` in vllm/model_executor/layers/linear.py.

    Args:
        module: the layer.
        outputs: number of outputs of the whole layer.
        config: configuration of the language model.

    Returns:
        The numbers in order; empty for other layers, and where the configuration has no such sizes.

    >>> sizes_on_disk(Module("model.layers.0.mlp.gate_up_proj", {}), 64, {})
    [32, 32]
    """
    if module.experts:
        return []
    if module.last == "gate_up_proj":
        return [outputs // 2, outputs // 2]
    if module.last != "qkv_proj":
        return []
    # the width of feed-forward layers does not matter here
    lengths = _lengths(config, 1)
    sizes = [lengths.get(side, 0) for side in ("queries", "keys", "keys")]
    return sizes if sum(sizes) == outputs else []


#: Blocks of a language model; layers of a vision tower have sizes that text_config does not give.
_DECODER = re.compile(r"((model|language_model)\.)*layers\.\d+\.")
#: Families whose feed-forward layers have intermediate_size in every block.
_DENSE = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo2",
    "smollm3",
)
#: Families of mixtures, with the key of the width of an expert.
_MIXTURES = {
    "mixtral": "intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
}
#: Names of the lengths of (out, in), by the last part of a layer's name.
_SIDES = {
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), ("wide", "hidden")),
    **dict.fromkeys(("down_proj", "w2"), ("hidden", "wide")),
}


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether the sizes of a family's layers are known."""
    return config.get("model_type") in (*_DENSE, *_MIXTURES)


def size_of(name: str, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the (out, in) that a Linear layer of a known family must have.

    None if the size is unknown.

    >>> size_of("model.layers.0.mlp.down_proj", {"model_type": "llama", "hidden_size": 8, "intermediate_size": 24})
    (8, 24)
    """  # noqa: E501
    if not is_known(config) or not _DECODER.match(name):
        return None
    width_key = "intermediate_size"
    if config["model_type"] in _MIXTURES:
        if name.endswith((".mlp.gate", ".block_sparse_moe.gate")):
            # Mixtral's name of the key, and Qwen's
            count = config.get("num_local_experts", config.get("num_experts"))
            return integers(count, config.get("hidden_size"))
        if ".experts." in name:
            width_key = _MIXTURES[config["model_type"]]
        elif ".mlp." in name:
            return (
                None  # dense layers and shared experts, for example, have other sizes
            )
    lengths = _lengths(config, config.get(width_key))
    # an unknown layer has no lengths, so that its size is None
    out, into = _SIDES.get(name.rpartition(".")[2], ("", ""))
    return integers(lengths.get(out), lengths.get(into))


def _lengths(config: Mapping[str, Any], wide: Any) -> dict[str, Any]:
    """Return the lengths of ``_SIDES``; those of an attention only if all sizes are given."""
    hidden: Any = config.get("hidden_size")
    heads: Any = config.get("num_attention_heads")
    groups: Any = config.get("num_key_value_heads")
    if groups is None:
        # without grouped-query attention, each head has keys and values of its own
        groups = heads
    lengths = {"hidden": hidden, "wide": wide}
    if all(map(is_positive, (hidden, wide, heads, groups))):
        # families such as Gemma have heads wider than hidden_size / num_attention_heads
        width = config.get("head_dim") or hidden // heads
        if type(width) is not int:
            return {}
        lengths |= {"queries": heads * width, "keys": groups * width}
    return lengths


def integers(out: Any, into: Any) -> tuple[int, int] | None:
    """Return a pair of integers; None if a value is missing or another type."""
    return (out, into) if type(out) is int and type(into) is int else None
