"""Checks of the layouts of AutoAWQ and GPTQ: keys, rules by layer, and integers in int32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quark_onnx.torch.models.names import NamesInTransformers
from quark_onnx.torch.runtime.safetensors_header import FLOATS, StoredTensor
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import (
    NO_KEY,
    QUANTIZATION,
    is_integer,
    is_names,
    is_positive,
    missing_key_findings,
    name_list_findings,
    object_of,
    shown,
)
from quark_onnx.torch.validate.finding import REFUSED, Finding
from quark_onnx.torch.validate.layer_checks import (
    PackedOutputs,
    Shape,
    Slots,
    excluded_findings,
    expression_findings,
    listed_findings,
    packed_output_findings,
    partial_findings,
    quantized_findings,
    slot,
)
from quark_onnx.torch.validate.modules import Module, fused, shards
from quark_onnx.torch.validate.name_patterns import Expressions, NameParts, is_regular
from quark_onnx.torch.validate.rules import broken

#: Returns (out, in) and the required tensors of a layer, by its weight and settings.
SlotsOf = Callable[[StoredTensor, dict[str, Any]], tuple[Shape, Slots]]
#: Returns the settings of a layer; None for a layer that the client keeps float.
SettingsOf = Callable[[Module], dict[str, Any] | None]

_DYNAMIC = f"{QUANTIZATION}.dynamic"
_LISTED = "modules_in_block_to_quantize"
#: Bits and symmetry for which vLLM has kernels: ``TYPE_MAP`` of auto_gptq.py.
_TYPES = ((4, True), (8, True))
#: Group sizes of the kernel for Linear layers: ``MARLIN_SUPPORTED_GROUP_SIZES`` of marlin_utils.py.
_GROUP_SIZES = (-1, 32, 64, 128)
#: Blocks in which optimum replaces layers: ``BLOCK_PATTERNS`` in optimum/gptq/constants.py.
_BLOCKS = (
    "transformer.h.",
    "model.decoder.layers.",
    "gpt_neox.layers.",
    "model.layers.",
    "model.language_model.layers.",
)


def _group_size(entries: dict[str, Any]) -> Any:
    """Return the group size, under AutoAWQ's or transformers' name."""
    # transformers writes the keys of its AwqConfig, AutoAWQ its own in quant_config.json
    return entries.get("q_group_size", entries.get("group_size"))


def _bits(entries: dict[str, Any], default: Any = None) -> Any:
    """Return the bits of an integer, under AutoAWQ's or transformers' name."""
    return entries.get("w_bit", entries.get("bits", default))


def _group_size_findings(entries: dict[str, Any], rule: str) -> Iterator[Finding]:
    """Yield a group size that is no number of inputs; a missing one has a finding of its own."""
    size = _group_size(entries)
    is_group_size = is_positive(size) or (is_integer(size) and size == -1)
    is_given = "q_group_size" in entries or "group_size" in entries
    if is_given and not is_group_size:
        yield broken(rule, f"{QUANTIZATION}.group_size", shown(size))


def _version_findings(entries: dict[str, Any], rule: str) -> Iterator[Finding]:
    """Yield a version of AutoAWQ with a packing order unlike gemm's."""
    # older files have no version, and are gemm
    version = str(entries.get("version", "gemm")).lower()
    if version != "gemm":
        yield broken(rule, f"{QUANTIZATION}.version", repr(version))


def gptqmodel_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in a configuration of AutoAWQ or GPTQ, for gptqmodel in transformers."""
    entries = checkpoint.quantization
    bits = _bits(entries)
    if bits not in (2, 3, 4, 8):
        text = NO_KEY if bits is None else repr(bits)
        yield broken("gptqmodel-config", f"{QUANTIZATION}.bits", text)
    yield from _group_size_findings(entries, "gptqmodel-config")
    if checkpoint.method == "gptq":
        yield from _list_findings(entries, "gptqmodel-config", is_nested_alone=True)
    if checkpoint.method == "awq":
        yield from name_list_findings(entries, "modules_to_not_convert")
        yield from _version_findings(entries, "method-unchecked")


def schemes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the number formats of every quantized layer."""
    entries = checkpoint.quantization
    for module in checkpoint.linears:
        # layers without it are float
        if "qweight" in module.tensors:
            yield f"{_bits(entries)} bits in groups of {_group_size(entries)}"


def fused_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield fused layers that are quantized in part.

    Without a list, vLLM finds float layers by the files. Fused layers must be uniform.
    """
    for name, modules in fused(checkpoint.modules).items():
        stored = [module.is_quantized for module in modules]
        yield from partial_findings(name, stored, "quantized")


def _tensor_findings(
    checkpoint: Checkpoint, slots_of: SlotsOf, settings_of: SettingsOf | None = None
) -> Iterator[Finding]:
    """Yield errors in the tensors of the layers; all have the common settings by default."""
    for module in checkpoint.modules.values():
        weight = module.weight
        # norms, embeddings and layers that were left out
        is_float = "weight" in module.tensors and not module.is_quantized
        # integers without a scale have a finding of their own
        if weight is None or is_float or module.has_bare_integers:
            continue
        # a matrix of codes under another name, or a norm that was renamed to qweight
        if not weight.name.endswith(".qweight") or len(weight.shape) != 2:
            text = f"{weight}; a layer is float, or a matrix called qweight"
            yield broken("tensor-unknown", weight.name, text)
            continue
        entries = settings_of(module) if settings_of else checkpoint.quantization
        if entries is None:
            yield from excluded_findings(module, f"dynamic excludes it: {weight}")
            continue
        size, slots = slots_of(weight, entries)
        group = _group_size(entries)
        yield from quantized_findings(checkpoint, module, size, slots, group)


# AutoAWQ


def awq_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration of AutoAWQ, for vLLM."""
    entries = checkpoint.quantization
    for names in (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",)):
        # vLLM takes either name (``get_from_keys`` of auto_awq.py)
        if entries.keys().isdisjoint(names):
            yield broken("awq-config", f"{QUANTIZATION}.{names[-1]}", NO_KEY)
    bits = _bits(entries, 4)
    if bits != 4:
        yield broken("awq-config", f"{QUANTIZATION}.bits", repr(bits))
    yield from _group_size_findings(entries, "awq-config")
    yield from name_list_findings(entries, "modules_to_not_convert")
    yield from _version_findings(entries, "awq-version")


def awq_expert_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield experts with a group size of -1, by which vLLM divides the inputs."""
    # Linear layers have one group for -1; the class of experts has not
    if _group_size(checkpoint.quantization) != -1:
        return
    for module in checkpoint.modules.values():
        if module.experts and module.is_quantized:
            yield broken("awq-experts", module.name, "group_size is -1")
            return


class SkippedInVllm:
    """Layers of AutoAWQ that vLLM keeps float, by a part of their names.

    Parts of the name of a fused layer count as well: "v_proj" is a part of "qkv_proj".

    Args:
        checkpoint: the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        # ``match_mode="substring"`` of auto_awq.py
        self._parts = NameParts(_skipped(checkpoint))

    def match(self, module: Module) -> bool:
        """Return whether vLLM keeps a layer float."""
        return any(
            self._parts.match(name) for name in self._checkpoint.names_in_vllm(module)
        )


def _skipped(checkpoint: Checkpoint) -> list[str]:
    """Return the names of float layers in a configuration of AutoAWQ."""
    names = checkpoint.quantization.get("modules_to_not_convert") or []
    return [str(name) for name in names]


def vllm_awq_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the layers of AutoAWQ, for vLLM."""
    # without a list, vLLM finds float layers by the files
    if _skipped(checkpoint):
        yield from _skipped_findings(checkpoint, SkippedInVllm(checkpoint).match)
    yield from packed_output_findings(checkpoint, _awq_outputs)
    yield from _tensor_findings(checkpoint, _awq_slots)


def transformers_awq_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the layers of AutoAWQ, for transformers."""
    skipped = _skipped(checkpoint)
    yield from expression_findings(skipped)
    names = NamesInTransformers(filter(is_regular, skipped))
    yield from _skipped_findings(checkpoint, lambda module: names.match(module.name))
    yield from _tensor_findings(checkpoint, _awq_slots)


def _skipped_findings(
    checkpoint: Checkpoint, is_skipped: Callable[[Module], bool]
) -> Iterator[Finding]:
    """Yield layers that differ from the list of float layers, as a client reads it."""
    for module in checkpoint.linears:
        if_out = f"modules_to_not_convert names it: {module.weight}"
        if_in = f"its weight is {module.weight}"
        yield from listed_findings(module, is_skipped(module), if_out, if_in, REFUSED)


def _awq_outputs(module: Module) -> PackedOutputs | None:
    """Return the packed outputs of a layer, if AutoAWQ wrote the layer."""
    packed = module.matrix
    if not packed.name.endswith(".qweight"):
        return None
    return PackedOutputs(packed.shape[1] * 8, 4, "outputs")


def _awq_slots(weight: StoredTensor, entries: dict[str, Any]) -> tuple[Shape, Slots]:
    """Return (out, in) and the slots of AutoAWQ: qweight is (in, out / 8)."""
    into, columns = weight.shape
    groups = _groups(into, _group_size(entries))
    return (columns * 8, into), {
        "qweight": slot("I32", (into, columns)),
        "qzeros": slot("I32", (groups, columns)),
        "scales": slot(FLOATS, (groups, columns * 8)),
    }


def _groups(into: int, group: Any) -> int:
    """Return the number of groups of inputs; a size such as -1 stands for a single group."""
    return into // group if is_positive(group) else 1


# GPTQ


def gptq_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration of GPTQ, for vLLM."""
    entries = checkpoint.quantization
    yield from missing_key_findings(
        entries, QUANTIZATION, "gptq-config", "bits", "group_size", "desc_act", "sym"
    )
    # a missing key has its own finding, and passes here
    bits, symmetric = entries.get("bits", 4), entries.get("sym", True)
    if bits not in (4, 8) or symmetric is not True:
        text = f"{bits!r} with sym {symmetric!r}; 4 and 8 with true are read"
        yield broken("gptq-config", f"{QUANTIZATION}.bits", text)
    yield from _group_size_findings(entries, "gptq-config")
    yield from _list_findings(entries, "gptq-config")
    if _is_reordered(entries):
        text = "true; groups in the order of activations were given up"
        yield broken("gptq-config", f"{QUANTIZATION}.desc_act", text)
    else:
        yield from _dynamic_findings(entries)


def _is_reordered(entries: Mapping[str, Any]) -> bool:
    """Return whether groups are in the order of activations, which vLLM has given up."""
    # with one group for all inputs the order of the columns does not matter
    return bool(entries.get("desc_act")) and entries.get("group_size") != -1


def _list_findings(
    entries: Mapping[str, Any], rule: str, is_nested_alone: bool = False
) -> Iterator[Finding]:
    """Yield a list of quantized layers that a client cannot read; null is no error.

    Args:
        entries: the quantization_config.
        rule: name of the rule that another value breaks, which depends on the client.
        is_nested_alone: whether the client reads lists of names in the list, and no names:
            ``GPTQQuantizer.convert_model`` of optimum joins them by ``sum(..., [])``.
    """
    given = entries.get(_LISTED)
    is_right = isinstance(given, list) and all(is_names(entry) for entry in given)
    wanted = "lists of names"
    if not is_nested_alone:
        is_right = is_right or is_names(given)
        wanted = "names, or lists of them"
    if given is not None and not is_right:
        text = f"{shown(given)}, and not a list of {wanted}"
        yield broken(rule, f"{QUANTIZATION}.{_LISTED}", text)


def _dynamic_findings(entries: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield rules of ``dynamic`` that vLLM refuses."""
    rules = entries.get("dynamic")
    # vLLM takes null for no rules
    if rules is not None and not isinstance(rules, dict):
        yield broken("gptq-config", _DYNAMIC, f"{shown(rules)}, and not an object")
    for rule, change in object_of(rules).items():
        if not is_regular(expression_of(rule)):
            yield broken("gptq-config", _DYNAMIC, f"{rule!r} is no regular expression")
        if rule.startswith("-:"):
            continue
        text = ""
        if not isinstance(change, dict):
            text = f"{rule!r} has {shown(change)}, and not an object"
        # ``normalize_and_validate_gptq_desc_act``: also for rules that match no layer
        elif _is_reordered({**entries, **change}):
            text = (
                f"{rule!r} has groups in the order of activations, which were given up"
            )
        if text:
            yield broken("gptq-config", _DYNAMIC, text)


def expression_of(rule: str) -> str:
    """Return the regular expression of a rule of ``dynamic``.

    >>> expression_of("-:.*gate"), expression_of("+:.*gate"), expression_of(".*gate")
    ('.*gate', '.*gate', '.*gate')
    """
    return rule[2:] if rule.startswith(("-:", "+:")) else rule


class SettingsInVllm:
    """Settings of the layers in vLLM: the first rule of ``dynamic`` that matches changes them.

    ``get_dynamic_override`` of gptq_utils.py compares the rules with the names of vLLM's layers:
    fused, or all experts of a block. "-:" begins a rule that keeps layers float, and "+:" may begin
    the others.

    Args:
        checkpoint: the checkpoint, whose rules of ``dynamic`` vLLM accepts.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._entries = checkpoint.quantization
        self._rules = object_of(self._entries.get("dynamic"))
        self._expressions = Expressions(
            {rule: expression_of(rule) for rule in self._rules}
        )

    def of(self, module: Module) -> dict[str, Any] | None:
        """Return the settings of a layer; None for a layer that a rule keeps float."""
        name = module.experts or self._checkpoint.names_in_vllm(module)[0]
        rule = self._expressions.first(name)
        if rule is None:
            return self._entries
        if rule.startswith("-:"):
            return None
        settings, changes = dict(self._entries), self._rules[rule]
        # ``override_config`` skips values of other types
        for key in ("bits", "group_size"):
            if is_integer(changes.get(key)):
                settings[key] = changes[key]
        if isinstance(changes.get("sym"), bool):
            settings["sym"] = changes["sym"]
        return settings

    def findings(self) -> Iterator[Finding]:
        """Yield layers for which vLLM has no kernel."""
        for module in self._checkpoint.quantized_linears:
            settings = self.of(module)
            if settings is None:
                continue
            bits, symmetric = settings.get("bits"), settings.get("sym")
            if (bits, symmetric) not in _TYPES:
                text = f"a rule of dynamic chooses {bits} bits with sym {symmetric!r}"
                yield broken("gptq-config", module.name, text)
            size = settings.get("group_size")
            # another kernel takes experts, whatever their groups are
            if size not in _GROUP_SIZES and not module.experts:
                is_common = settings is self._entries
                place = f"{QUANTIZATION}.group_size" if is_common else module.name
                text = f"groups of {size}; -1, 32, 64 and 128 are read"
                yield broken("gptq-config", place, text)


def vllm_gptq_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the layers of GPTQ, for vLLM."""
    settings = SettingsInVllm(checkpoint)
    refused = [*settings.findings()]
    yield from refused
    # the shapes of their tensors follow from the bits
    if not refused:
        yield from _listed_findings(checkpoint, settings)
        yield from _tensor_findings(checkpoint, _gptq_slots, settings.of)


def _listed(entries: Mapping[str, Any]) -> list[str]:
    """Return the names in the list of quantized layers, which may be nested; empty without one."""
    names = entries.get(_LISTED) or []
    nested = (name if isinstance(name, list) else [name] for name in names)
    return [value for values in nested for value in values if isinstance(value, str)]


def _listed_findings(
    checkpoint: Checkpoint, settings: SettingsInVllm
) -> Iterator[Finding]:
    """Yield quantized layers that the list lacks, and float layers that it names.

    ``is_layer_gptq_quantized`` of gptq_utils.py takes entries for parts of names. vLLM does not ask
    for experts, and goes by the files where there is no list.
    """
    names = _listed(checkpoint.quantization)
    if not names:
        return
    parts = NameParts(names)
    torn = set[str]()
    for name, modules in shards(checkpoint.modules):
        flags = [parts.match(module.name) for module in modules]
        findings = [*partial_findings(name, flags, f"in {_LISTED}")]
        yield from findings
        if findings:
            torn |= {module.name for module in modules}
    for module in checkpoint.linears:
        # a fused layer that is listed in part is a finding of its own
        is_asked = not module.experts and module.name not in torn
        if is_asked and settings.of(module) is not None:
            is_out = not parts.match(module.name)
            yield from _replaced_findings(module, is_out, f"{_LISTED} has it")


def transformers_gptq_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield float layers that optimum replaces by quantized ones, and errors in tensors.

    ``GPTQConfig`` of transformers drops ``dynamic``, so that ``GPTQQuantizer.convert_model`` of
    optimum 2.3 replaces all layers of all blocks, or those whose names end with an entry of the
    list.
    """
    entries = checkpoint.quantization
    given = entries.get("block_name_to_quantize")
    blocks = (given,) if isinstance(given, str) else _BLOCKS
    # every name ends with "", and none with an entry of an empty list
    ends = ("",) if entries.get(_LISTED) is None else tuple(_listed(entries))
    text = f"transformers reads {_LISTED}, and not dynamic"
    for module in checkpoint.linears:
        # experts are no Linear layers in transformers 5
        if module.name.startswith(blocks) and not module.experts:
            is_out = not module.name.endswith(ends)
            yield from _replaced_findings(module, is_out, text)
    yield from _tensor_findings(checkpoint, _gptq_slots)


def _replaced_findings(module: Module, is_out: bool, why: str) -> Iterator[Finding]:
    """Yield a layer that differs from the list, with the reason why a client quantizes it."""
    if_out = f"{_LISTED} lacks it: {module.weight}"
    if_in = f"its weight is {module.weight}; {why}"
    yield from listed_findings(module, is_out, if_out, if_in)


def _gptq_slots(weight: StoredTensor, entries: dict[str, Any]) -> tuple[Shape, Slots]:
    """Return (out, in) and the slots of GPTQ: qweight is (in * bits / 32, out)."""
    bits = entries["bits"]
    rows, columns = weight.shape
    into = rows * 32 // bits
    groups = _groups(into, entries.get("group_size"))
    return (columns, into), {
        "qweight": slot("I32", (rows, columns)),
        "qzeros": slot("I32", (groups, columns * bits // 32), needed=False),
        "scales": slot(FLOATS, (groups, columns)),
        # the group of each input; only desc_act needs it, though files mostly hold it
        "g_idx": slot("I32", (into,), needed=False),
    }
