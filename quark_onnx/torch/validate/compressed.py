"""Checks of compressed-tensors checkpoints: config_groups, schemes and tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.compressed_arguments import (
    Group,
    argument_findings,
    arguments_of,
)
from quark_onnx.torch.validate.compressed_schemes import (
    INT8_AROUND,
    STATIC_INT8,
    describe,
    form_of,
    scheme_in_vllm,
    slots_of,
)
from quark_onnx.torch.validate.fields import (
    NO_KEY_OR_NULL,
    QUANTIZATION,
    FieldCheck,
    field_findings,
    is_given,
    is_object,
    is_unset,
    meets,
    name_list_findings,
    object_of,
    objects_in,
    strings_of,
)
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.layer_checks import (
    OPTIONAL_SCALE,
    SCALAR,
    PackedOutputs,
    block_findings,
    excluded_findings,
    global_scale_findings,
    included_findings,
    packed_output_findings,
    partial_findings,
    quantized_findings,
    slot,
)
from quark_onnx.torch.validate.modules import (
    Module,
    fused,
    fused_parts,
    shards,
    size_of,
)
from quark_onnx.torch.validate.name_patterns import is_glob, names_and_expressions
from quark_onnx.torch.validate.rules import broken

#: Formats whose weights compressed-tensors 0.20 decodes to bfloat16.
#: Their decompressors name bfloat16 themselves, and ignore the dtype of the model.
_DECODED_TO_BFLOAT16 = (
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
#: ``CompressionFormat`` in config/base.py of compressed-tensors 0.20, without the legacy formats
#: of sparse weights, which no class decodes.
FORMATS = (
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    *_DECODED_TO_BFLOAT16,
)
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


class Groups:
    """Groups of the layers of a checkpoint in a client."""

    def of(self, module: Module) -> PlacedGroup | None:
        """Return the group of a layer with its place; None if the layer stays float."""
        raise NotImplementedError

    def group(self, module: Module) -> Group:
        """Return the group of a layer without its place; empty for a float layer."""
        _, group = self.of(module) or ("", {})
        return group


class GroupsInVllm(Groups):
    """Groups of the layers of a checkpoint in vLLM.

    The first expert of a block stands for all of them.

    Args:
        checkpoint: the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._ignored = names_and_expressions(
            strings_of(checkpoint.quantization.get("ignore"))
        )
        self._groups = _by_target(groups_in_vllm(checkpoint.quantization))
        self._targets = names_and_expressions(self._groups)
        self._class_targets = dict[tuple[str, ...], str | None]()
        for names in (_LINEAR, _HEAD, _EXPERTS):
            self._class_targets[names] = _class_match(names, self._groups)

    def ignores(self, module: Module) -> bool:
        """Return whether a layer stays float by its name, or by that of its fused layer."""
        names = self._checkpoint.names_in_vllm(module)
        return any(self._ignored.match(_first_expert(name)) for name in names)

    def of(self, module: Module) -> PlacedGroup | None:
        """Return the group of a layer; None if the layer stays float.

        ``find_matched_target`` in compressed_tensors/utils.py looks for the name, then for the
        names of all parts of a fused layer, and then for the name of the class.
        """
        if self.ignores(module):
            return None
        fused_name, parts = fused_parts(module, self._checkpoint.modules)
        target = self._targets.first(fused_name or _first_expert(module.name))
        if target is None and parts:
            # that of the first part, if each has one
            targets = [self._targets.first(part) for part in parts]
            target = None if None in targets else targets[0]
        if target is None:
            classes = _EXPERTS if module.experts else _LINEAR
            target = self._class_targets[_HEAD if module.is_head else classes]
        return None if target is None else self._groups[target]


class GroupsInTransformers(Groups):
    """Groups of the layers of a checkpoint in transformers.

    Args:
        checkpoint: the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._ignored = names_and_expressions(
            strings_of(checkpoint.quantization.get("ignore"))
        )
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
        placed = self._groups.get(target)
        # a group without weights quantizes activations alone
        if placed is None or not isinstance(placed[1].get("weights"), dict):
            return None
        return placed


def _by_target(groups: Iterable[PlacedGroup]) -> dict[str, PlacedGroup]:
    """Return groups by target; the last of several groups with a common target counts."""
    groups_by_target = dict[str, PlacedGroup]()
    for place, group in groups:
        for target in strings_of(group.get("targets")):
            groups_by_target[target] = (place, group)
    return groups_by_target


def _class_match(names: Iterable[str], targets: Iterable[str]) -> str | None:
    """Return the first target that one of the names contains, in the order of the names."""
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


#: Keys of the arguments of a group.
_TENSORS = ("weights", "input_activations", "output_activations")
#: ``_validate_attention_scheme`` in quantization/lifecycle/initialize.py of compressed-tensors.
_ATTENTION_CHECKS = (
    FieldCheck("ct-attention", "weights", None),
    FieldCheck("ct-attention", "input_activations", is_object, absent=NO_KEY_OR_NULL),
    FieldCheck("ct-attention", "output_activations", None),
)


def vllm_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration, for vLLM."""
    entries = checkpoint.quantization
    yield from _config_findings(entries)
    for place, group in groups_in_vllm(entries):
        yield from _group_findings(entries, place, group)
        # vLLM reads the arguments of the weights of every group
        if not isinstance(group.get("weights"), dict):
            yield broken("ct-groups", place, "it lacks the object weights")


def transformers_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration, for transformers."""
    entries = checkpoint.quantization
    yield from _config_findings(entries)
    for place, group in groups_of(entries):
        yield from _group_findings(entries, place, group)
        if is_of_attention(group):
            yield from field_findings(group, place, *_ATTENTION_CHECKS)


def _config_findings(entries: dict[str, Any]) -> Iterator[Finding]:
    """Yield errors outside of the groups, for any client."""
    # an empty object gives no layer a scheme
    groups = entries.get("config_groups")
    if not object_of(groups):
        yield broken("ct-groups", f"{QUANTIZATION}.config_groups", f"it is {groups!r}")
    # vLLM raises only if sparsity_config has targets (``_parse_sparsity_config``)
    targets = object_of(entries.get("sparsity_config")).get("targets")
    if targets:
        place = f"{QUANTIZATION}.sparsity_config"
        yield broken("ct-sparsity", place, f"it targets {targets}")
    yield from name_list_findings(entries, "ignore")
    form = entries.get("format")
    if not isinstance(form, str | None):
        yield broken("ct-format", f"{QUANTIZATION}.format", repr(form))
    for name in filter(is_glob, strings_of(entries.get("ignore"))):
        place = f"{QUANTIZATION}.ignore"
        yield broken("exclude-pattern", place, f"{name!r} is no exact name")


def _group_findings(
    entries: dict[str, Any], place: str, group: Group
) -> Iterator[Finding]:
    """Yield errors in the keys of a group and in the arguments of its tensors."""
    if not isinstance(group.get("targets"), list):
        yield broken("ct-groups", place, "it lacks the list targets")
        return
    # null means the same as a missing format: that of the checkpoint holds
    form = group.get("format")
    if form is None:
        form = entries.get("format")
    if form not in FORMATS:
        yield broken("ct-format", f"{place}.format", repr(form))
    for key in _TENSORS:
        # null stands for a tensor that is not quantized
        if isinstance(group.get(key), dict):
            yield from argument_findings(f"{place}.{key}", group[key])
        elif group.get(key) is not None:
            yield broken("ct-arguments", f"{place}.{key}", repr(group[key]))


def vllm_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the schemes of the layers, for vLLM.

    Args:
        checkpoint: a checkpoint whose groups ``vllm_config_findings`` has accepted.

    Yields:
        Malformed entries, fused layers that are ignored in part or differ in global scales, and
        groups without a scheme: one finding for each group, and one more if the group has experts.
    """
    entries = checkpoint.quantization
    # the format is optional in compressed-tensors
    yield from field_findings(
        entries,
        QUANTIZATION,
        FieldCheck("ct-format", "format", is_given, absent=NO_KEY_OR_NULL),
    )
    # vLLM iterates over ignore, and fails for null; a missing key means no exceptions
    if entries.get("ignore", []) is None:
        text = "null, and not a list of names"
        yield broken("malformed", f"{QUANTIZATION}.ignore", text)
    # vLLM asks for each part of a fused layer, and refuses a layer that is ignored in part
    groups = GroupsInVllm(checkpoint)
    for name, modules in shards(checkpoint.modules):
        out = [groups.ignores(module) for module in modules]
        yield from partial_findings(name, out, "ignored")
    yield from _expert_findings(checkpoint, groups)
    yield from block_findings(checkpoint, partial(_rows_of_blocks, groups))
    yield from packed_output_findings(checkpoint, partial(_packed_zero_points, groups))
    # these scales are reciprocals: the greatest one of inputs clips those of the others
    yield from global_scale_findings(
        checkpoint, "weight_global_scale", "input_global_scale"
    )
    first = dict[tuple[str, bool], tuple[Module, Group]]()
    for module in checkpoint.linears:
        placed = groups.of(module)
        if placed is not None:
            place, group = placed
            # experts have classes of their own, all other layers of a group share a scheme
            first.setdefault((place, bool(module.experts)), (module, group))
    for (place, _), (module, group) in first.items():
        # compressed_tensors_moe.py has no class for experts with static integer activations
        inputs = object_of(arguments_of(group.get("input_activations")))
        if module.experts and meets(inputs, STATIC_INT8):
            text = f"{describe(group)}: experts have no static integers"
            yield broken("ct-scheme", module.name, text)
        elif not scheme_in_vllm(group, form_of(entries, group)):
            yield broken("ct-scheme", place, describe(group))


def _rows_of_blocks(groups: Groups, module: Module) -> object:
    """Return the number of outputs of the blocks of a layer; None if it has no blocks."""
    arguments = object_of(arguments_of(groups.group(module).get("weights")))
    blocks = arguments.get("block_structure")
    return blocks and blocks[0]


def _packed_zero_points(groups: Groups, module: Module) -> PackedOutputs | None:
    """Return the packed zero points of a layer; None for a layer without."""
    arguments = object_of(arguments_of(groups.group(module).get("weights")))
    packed = module.tensors.get("weight_packed")
    # integers alone have zero points, and weights along the inputs fill int32 of their own
    if packed is None or not meets(arguments, {"type": "int", "symmetric": is_unset}):
        return None
    return PackedOutputs(packed.shape[0], arguments["num_bits"], "zero points")


def _expert_findings(checkpoint: Checkpoint, groups: Groups) -> Iterator[Finding]:
    """Yield experts whose layers differ in their groups, or are ignored in part."""
    for name, modules in fused(checkpoint.modules).items():
        # ``get_moe_method`` in compressed_tensors_moe.py compares the three layers of an expert
        distinct = list[list[object]]()
        for module in modules if modules[0].experts else ():
            group = groups.group(module)
            scheme: list[object] = [arguments_of(group.get(key)) for key in _TENSORS]
            scheme.append(form_of(checkpoint.quantization, group))
            if scheme not in distinct:
                distinct.append(scheme)
        if len(distinct) > 1:
            text = f"its layers have {len(distinct)} schemes"
            yield broken("ct-scheme", name, text)


def transformers_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of compressed-tensors in transformers, in the tested releases.

    Args:
        checkpoint: the checkpoint; a model without a dtype passes the check of the dtype.
    """
    dtype = checkpoint.dtype
    for place, group in groups_of(checkpoint.quantization):
        weight = arguments_of(group.get("weights"))
        # such a group quantizes activations alone
        if weight is None:
            continue
        form = form_of(checkpoint.quantization, group)
        # decoding all weights while loading (dequantize=True) is a way around, hence only a warning
        if form == "pack-quantized" and not weight["symmetric"]:
            yield broken("ct-zero-points", f"{place}.weights.symmetric", "false")
        if form in _DECODED_TO_BFLOAT16 and dtype not in ("bfloat16", ""):
            text = f"{form!r}, and the model is {dtype}"
            yield broken("ct-bfloat16", f"{place}.format", text)


def layer_findings(
    groups_in: Callable[[Checkpoint], Groups], checkpoint: Checkpoint
) -> Iterator[Finding]:
    """Yield errors in the tensors of the layers.

    Args:
        groups_in: returns the groups of the layers in a client.
        checkpoint: the checkpoint.
    """
    groups = groups_in(checkpoint)
    for module in checkpoint.layers:
        placed = groups.of(module)
        if placed is None:
            text = f"no group is for it, and its weight is {module.weight}"
            yield from excluded_findings(module, text)
            continue
        _, group = placed
        if module.is_quantized:
            yield from _tensor_findings(checkpoint, module, group)
            continue
        arguments = object_of(arguments_of(group["weights"]))
        # 8-bit integers may be packed four in an int32
        packed = arguments["num_bits"] < 8 or group.get("format") == "pack-quantized"
        # a float weight is loaded where the scheme has a tensor of that name
        severity = REFUSED if packed else WRONG
        text = f"its weight is {module.weight}, not {describe(group)}"
        yield from included_findings(module, text, severity)


def _tensor_findings(
    checkpoint: Checkpoint, module: Module, group: Group
) -> Iterator[Finding]:
    """Yield errors in the tensors of a quantized layer, whose group has valid arguments."""
    demanded = size_of(module.name, checkpoint.text_config)
    size, slots = slots_of(group, module, demanded)
    outputs = arguments_of(group.get("output_activations"))
    # optional: missing scales, and those that are not read, are findings of ``cache_in_vllm``
    if outputs is not None and not outputs["dynamic"]:
        slots["output_scale"] = OPTIONAL_SCALE
        slots["output_zero_point"] = slot("I8", *SCALAR, needed=False)
    has_cache = isinstance(checkpoint.quantization.get("kv_cache_scheme"), dict)
    if has_cache and module.last in ("k_proj", "v_proj", "q_proj"):
        names = ("output_scale", "k_scale", "v_scale")
        slots |= dict.fromkeys(names, OPTIONAL_SCALE)
    group_size = group["weights"].get("group_size")
    yield from quantized_findings(checkpoint, module, size, slots, group_size)


def schemes(
    groups_in: Callable[[Checkpoint], Groups], checkpoint: Checkpoint
) -> Iterator[str]:
    """Yield the number formats of every quantized layer; layers without a group are left out."""
    groups = groups_in(checkpoint)
    for module in checkpoint.quantized_linears:
        placed = groups.of(module)
        if placed is not None:
            yield describe(placed[1])


def unread_outputs_in_vllm(checkpoint: Checkpoint) -> list[str]:
    """Return the names of layers whose output has a scale that vLLM's scheme does not read."""
    groups = GroupsInVllm(checkpoint)
    unread = list[str]()
    for name, module in checkpoint.modules_with("output_scale").items():
        group = groups.group(module)
        form = form_of(checkpoint.quantization, group)
        if scheme_in_vllm(group, form) != INT8_AROUND:
            unread.append(name)
    return unread
