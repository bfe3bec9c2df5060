"""Checkpoints with many blocks and experts, in memory, and configurations that name each layer."""

from __future__ import annotations

import re
from pathlib import Path

from quark_onnx.torch.runtime.safetensors_header import Header, StoredTensor
from quark_onnx.torch.validate.checkpoint import Checkpoint
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import Draft, Entry

_FIRST = "model.layers.0."


def checkpoint_of(draft: Draft) -> Checkpoint:
    """A checkpoint that is not written; its scales are ones."""
    tensors = {
        name: StoredTensor(name, shape, dtype, Path())
        for name, (dtype, shape) in draft.tensors.items()
    }
    headers = {"model.safetensors": Header(tensors, {}, 0)}
    return Checkpoint(Path(), draft.config, None, headers, ())


def grown(draft: Draft, blocks: int, experts: int = 0) -> Draft:
    """A checkpoint with so many copies of its first block, with experts or dense layers."""
    draft = draft.copy()
    tensors: dict[str, Entry] = {}
    for name, entry in draft.tensors.items():
        if not name.startswith("model.layers."):
            tensors[name] = entry
        elif name.startswith(_FIRST):
            inside = name.removeprefix(_FIRST)
            for block in range(blocks):
                tensors.update(
                    dict.fromkeys(
                        _copies(f"model.layers.{block}.{inside}", experts), entry
                    )
                )
    draft.tensors = tensors
    draft.config["num_hidden_layers"] = blocks
    if experts:
        draft.config |= {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "moe_intermediate_size": 64,
        }
    return draft


def _copies(name: str, experts: int) -> list[str]:
    """The name of a tensor, or its names in all experts."""
    if not experts or ".mlp." not in name:
        return [name]
    return [name.replace(".mlp.", f".mlp.experts.{n}.") for n in range(experts)]


def layers_of(draft: Draft) -> list[str]:
    """The names of all Linear layers of all blocks."""
    names = (name.rpartition(".")[0] for name in draft.tensors if "_proj" in name)
    return list(dict.fromkeys(names))


def excluding_half(draft: Draft) -> Draft:
    """Every second layer is float, and named in the configuration."""
    names = layers_of(draft)[::2]
    entries = draft.quantization
    lists = {
        "quark": "exclude",
        "compressed-tensors": "ignore",
        "awq": "modules_to_not_convert",
        "fp8": "ignored_layers",
    }
    if entries["quant_method"] in lists:
        entries[lists[entries["quant_method"]]] += names
    else:
        entries["dynamic"] = {f"-:{re.escape(name)}": {} for name in names}
    floats = set(names)
    draft.tensors = {
        name: entry
        for name, entry in draft.tensors.items()
        if name.rpartition(".")[0] not in floats
    }
    draft.tensors |= {f"{name}.weight": ("BF16", (32, 32)) for name in names}
    return draft


def overriding_half(draft: Draft) -> Draft:
    """Every second layer has an entry of its own, equal to that of all layers."""
    names = layers_of(draft)[::2]
    entries = draft.quantization
    if entries["quant_method"] == "quark":
        layer = entries["global_quant_config"]
        entries["layer_quant_config"] |= dict.fromkeys(names, layer)
    elif entries["quant_method"] == "compressed-tensors":
        groups = entries["config_groups"]
        groups["group_1"] = {**groups["group_0"], "targets": names}
    elif entries["quant_method"] == "gptq":
        entries["dynamic"] = {f"+:{re.escape(name)}": {"bits": 4} for name in names}
    return draft


__all__ = [
    "checkpoint_of",
    "drafts",
    "excluding_half",
    "grown",
    "layers_of",
    "overriding_half",
]
