"""Groups of compressed-tensors, and the group of a layer by the rules of each client."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.compressed_arguments import Group
from quark_onnx.torch.validate.fields import QUANTIZATION
from quark_onnx.torch.validate.json_values import objects_in, strings_of
from quark_onnx.torch.validate.modules import Module, fused_parts
from quark_onnx.torch.validate.quark_config import matches_any

#: The place of a group for findings, and the group.
PlacedGroup = tuple[str, Group]
#: Find the group of a layer; None for a layer that stays float.
Finder = Callable[[Checkpoint, Module], PlacedGroup | None]

#: Number of an expert in the name of a layer.
_EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
#: Names of classes by which vLLM looks for targets, after names: those of its classes for Linear
#: layers have this part in common.
_LINEAR_IN_VLLM, _HEAD_IN_VLLM, _EXPERTS_IN_VLLM = (
    "ParallelLinear",
    "ParallelLMHead",
    "RoutedExperts",
)


def groups_of(entries: Mapping[str, Any]) -> Iterator[PlacedGroup]:
    """Yield the places and the groups of a quantization_config."""
    for name, group in objects_in(entries.get("config_groups")).items():
        # the order of the file decides where several groups match a layer
        yield f"{QUANTIZATION}.config_groups.{name}", group


def groups_in_vllm(entries: Mapping[str, Any]) -> Iterator[PlacedGroup]:
    """Yield the places and the groups that vLLM reads: those of attention are skipped."""
    for place, group in groups_of(entries):
        if not is_of_attention(group):
            yield place, group


def is_of_attention(group: Group) -> bool:
    """Return whether a group is for attention modules, by the rule of vLLM.

    ``CompressedTensorsConfig.from_config`` skips groups with a single target such as
    "LlamaAttention": scales of attention are those of the KV cache.
    """
    targets = strings_of(group.get("targets"))
    return len(targets) == 1 and targets[0].endswith("Attention")


def ignored(entries: Mapping[str, Any]) -> list[str]:
    """Return the names and patterns of float layers."""
    return strings_of(entries.get("ignore"))


def is_ignored_in_vllm(checkpoint: Checkpoint, module: Module) -> bool:
    """Return whether vLLM keeps a layer float by its name, or by that of its fused layer."""
    patterns = ignored(checkpoint.quantization)
    names = map(_first_expert, checkpoint.names_in_vllm(module))
    return any(matches_any(name, patterns) for name in names)


def group_in_vllm(checkpoint: Checkpoint, module: Module) -> PlacedGroup | None:
    """Return the group of a layer in vLLM; None if the layer stays float.

    ``find_matched_target`` in compressed_tensors/utils.py looks for the name, then for the names of
    all parts of a fused layer, and then for the name of the class.

    Args:
        checkpoint: the checkpoint.
        module: the layer. The first expert of a block stands for all of them.
    """
    if is_ignored_in_vllm(checkpoint, module):
        return None
    targets = _by_target(groups_in_vllm(checkpoint.quantization))
    fused_name, parts = fused_parts(module, checkpoint.modules)
    name = fused_name or _first_expert(module.name)
    found = _first_match(name, targets) or _match_of_all(parts, targets)
    if found is None:
        found = _class_match(module, targets)
    return None if found is None else targets[found]


def group_in_transformers(checkpoint: Checkpoint, module: Module) -> PlacedGroup | None:
    """Return the group of a layer in transformers; None if the layer stays float.

    ``match_targets`` in utils/match.py of compressed-tensors looks for exact names, for patterns in
    the order of the alphabet, and then for the class.

    Args:
        checkpoint: the checkpoint.
        module: the layer.
    """
    if matches_any(module.name, ignored(checkpoint.quantization)):
        return None
    targets = _by_target(groups_of(checkpoint.quantization))
    ordered = sorted(targets, key=lambda target: ("re:" in target, target))
    found = _first_match(module.name, ordered)
    if found is None and "Linear" in targets:
        found = "Linear"
    if found is None:
        return None
    # a group without weights quantizes activations alone
    return (
        targets[found] if isinstance(targets[found][1].get("weights"), dict) else None
    )


def _by_target(groups: Iterable[PlacedGroup]) -> dict[str, PlacedGroup]:
    """Return groups by target; the last of several groups with a common target counts."""
    found = dict[str, PlacedGroup]()
    for place, group in groups:
        for target in strings_of(group.get("targets")):
            found[target] = (place, group)
    return found


def _first_match(name: str, targets: Iterable[str]) -> str | None:
    """Return the first target that is a name, or a pattern that matches it."""
    return next((target for target in targets if matches_any(name, [target])), None)


def _match_of_all(parts: Iterable[str], targets: Iterable[str]) -> str | None:
    """Return the target of the first part of a fused layer, if each part has a target."""
    found = [_first_match(part, targets) for part in parts]
    return found[0] if found and None not in found else None


def _class_match(module: Module, targets: Mapping[str, PlacedGroup]) -> str | None:
    """Return the first target within the name of a layer's class in vLLM."""
    names = [_LINEAR_IN_VLLM]
    if module.is_head:
        names = [_HEAD_IN_VLLM]
    elif module.experts:
        # a target "Linear" counts for experts, too, unless there is one of their own
        names = [_EXPERTS_IN_VLLM, _LINEAR_IN_VLLM]
    for name in names:
        for target in targets:
            if target.lower() in name.lower():
                return target
    return None


def _first_expert(name: str) -> str:
    """Return the name of a layer in the first expert; names outside of experts are unchanged.

    >>> _first_expert("model.layers.3.mlp.experts.17.up_proj")
    'model.layers.3.mlp.experts.0.up_proj'
    """
    return _EXPERT_NUMBER.sub("0", name)
