"""Groups of compressed-tensors, and the group of a layer by the rules of each client."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.compressed_arguments import Group
from quark_onnx.torch.validate.fields import QUANTIZATION
from quark_onnx.torch.validate.json_values import objects_in, strings_of
from quark_onnx.torch.validate.modules import Module, fused_parts
from quark_onnx.torch.validate.quark_config import names_and_expressions

#: The place of a group for findings, and the group.
PlacedGroup = tuple[str, Group]

#: Number of an expert in the name of a layer.
_EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
#: Names of classes by which vLLM looks for targets after names. Those of its classes for Linear
#: layers have a part in common, and a target "Linear" counts for experts, too, unless there is one
#: of their own.
_LINEAR = ("ParallelLinear",)
_HEAD = ("ParallelLMHead",)
_EXPERTS = ("RoutedExperts", *_LINEAR)


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


class GroupsInVllm:
    """Groups of the layers of a checkpoint in vLLM.

    The first expert of a block stands for all of them.

    Args:
        checkpoint: the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._ignored = names_and_expressions(ignored(checkpoint.quantization))
        self._groups = _by_target(groups_in_vllm(checkpoint.quantization))
        self._targets = names_and_expressions(self._groups)
        self._class_targets = dict[tuple[str, ...], str | None]()
        for names in (_LINEAR, _HEAD, _EXPERTS):
            self._class_targets[names] = _class_match(names, self._groups)

    def ignores(self, module: Module) -> bool:
        """Return whether a layer stays float by its name, or by that of its fused layer."""
        names = map(_first_expert, self._checkpoint.names_in_vllm(module))
        return any(map(self._ignored.match, names))

    def of(self, module: Module) -> PlacedGroup | None:
        """Return the group of a layer; None if the layer stays float.

        ``find_matched_target`` in compressed_tensors/utils.py looks for the name, then for the
        names of all parts of a fused layer, and then for the name of the class.
        """
        if self.ignores(module):
            return None
        fused_name, parts = fused_parts(module, self._checkpoint.modules)
        target = self._targets.first(fused_name or _first_expert(module.name))
        if target is None:
            target = self._target_of_all(parts)
        if target is None:
            target = self._class_targets[_classes_of(module)]
        return None if target is None else self._groups[target]

    def _target_of_all(self, parts: Iterable[str]) -> str | None:
        """Return the target of the first part of a fused layer, if each part has a target."""
        found = list(map(self._targets.first, parts))
        return found[0] if found and None not in found else None


class GroupsInTransformers:
    """Groups of the layers of a checkpoint in transformers.

    Args:
        checkpoint: the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._ignored = names_and_expressions(ignored(checkpoint.quantization))
        self._groups = _by_target(groups_of(checkpoint.quantization))
        # the order of ``match_targets``: exact names, then patterns by the alphabet
        ordered = sorted(self._groups, key=lambda target: ("re:" in target, target))
        self._targets = names_and_expressions(ordered)

    def of(self, module: Module) -> PlacedGroup | None:
        """Return the group of a layer; None if its weight stays float.

        ``match_targets`` in utils/match.py of compressed-tensors looks for names and patterns, and
        then for the class.
        """
        if self._ignored.match(module.name):
            return None
        target = self._targets.first(module.name) or "Linear"
        found = self._groups.get(target)
        # a group without weights quantizes activations alone
        if found is None or not isinstance(found[1].get("weights"), dict):
            return None
        return found


def _by_target(groups: Iterable[PlacedGroup]) -> dict[str, PlacedGroup]:
    """Return groups by target; the last of several groups with a common target counts."""
    found = dict[str, PlacedGroup]()
    for place, group in groups:
        for target in strings_of(group.get("targets")):
            found[target] = (place, group)
    return found


def _classes_of(module: Module) -> tuple[str, ...]:
    """Return the names of a layer's class in vLLM, of which the first with a target counts."""
    if module.is_head:
        return _HEAD
    return _EXPERTS if module.experts else _LINEAR


def _class_match(names: Iterable[str], targets: Iterable[str]) -> str | None:
    """Return the first target within the first of some names that has one."""
    for name, target in product(names, targets):
        if target.lower() in name.lower():
            return target
    return None


def _first_expert(name: str) -> str:
    """Return the name of a layer in the first expert; names outside of experts are unchanged.

    >>> _first_expert("model.layers.3.mlp.experts.17.up_proj")
    'model.layers.3.mlp.experts.0.up_proj'
    """
    return _EXPERT_NUMBER.sub("0", name)
