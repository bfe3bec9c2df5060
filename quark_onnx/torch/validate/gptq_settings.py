"""Settings of GPTQ by layer: the rules of ``dynamic``, and lists of quantized layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quark_onnx.common.containers import flattened, of_type
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import QUANTIZATION, is_integer, is_names, shown
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.json_values import object_of
from quark_onnx.torch.validate.modules import (
    Module,
    excluded_findings,
    included_findings,
    partial_findings,
    shards,
)
from quark_onnx.torch.validate.name_patterns import Expressions, NameParts, is_regular
from quark_onnx.torch.validate.rules import broken

#: Settings of a layer; None for a layer that the client keeps float.
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


def expression_of(rule: str) -> str:
    """Return the regular expression of a rule of ``dynamic``.

    >>> expression_of("-:.*gate"), expression_of("+:.*gate"), expression_of(".*gate")
    ('.*gate', '.*gate', '.*gate')
    """
    if _keeps_float(rule):
        return rule.removeprefix("-:")
    return rule.removeprefix("+:")


def _keeps_float(rule: str) -> bool:
    return rule.startswith("-:")


def dynamic_findings(entries: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield rules of ``dynamic`` that vLLM refuses.

    Args:
        entries: the quantization_config.
    """
    rules = entries.get("dynamic")
    if not isinstance(rules, dict):
        # vLLM takes null for no rules
        if rules is not None:
            yield broken("gptq-config", _DYNAMIC, f"{shown(rules)}, and not an object")
        return
    for rule, change in rules.items():
        yield from _rule_findings(entries, rule, change)


def _rule_findings(
    entries: Mapping[str, Any],
    rule: str,
    change: object,
) -> Iterator[Finding]:
    """Yield a rule that is no regular expression, or changes settings to what vLLM refuses."""
    if not is_regular(expression_of(rule)):
        yield broken("gptq-config", _DYNAMIC, f"{rule!r} is no regular expression")
    if _keeps_float(rule):
        return
    if not isinstance(change, dict):
        text = f"{rule!r} has {shown(change)}, and not an object"
        yield broken("gptq-config", _DYNAMIC, text)
        return
    settings = {**entries, **change}
    # ``normalize_and_validate_gptq_desc_act``: also for rules that match no layer
    if settings.get("desc_act") and settings.get("group_size") != -1:
        text = f"{rule!r} has groups in the order of activations, which were given up"
        yield broken("gptq-config", _DYNAMIC, text)


class SettingsInVllm:
    """Settings of the layers in vLLM: the first rule of ``dynamic`` that matches changes them.

    ``get_dynamic_override`` of gptq_utils.py compares the rules with the names of vLLM's layers:
    fused, or all experts of a block. "-:" begins a rule that keeps layers float, and "+:" may begin
    the others.

    Args:
        checkpoint: the checkpoint, in whose rules ``dynamic_findings`` finds nothing.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._entries = checkpoint.quantization
        self._rules = object_of(self._entries.get("dynamic"))
        self._expressions = Expressions(
            {rule: expression_of(rule) for rule in self._rules},
        )

    def of(self, module: Module) -> dict[str, Any] | None:
        """Return the settings of a layer; None for a layer that a rule keeps float."""
        name = module.experts or self._checkpoint.names_in_vllm(module)[0]
        rule = self._expressions.first(name)
        if rule is None:
            return self._entries
        if _keeps_float(rule):
            return None
        return {**self._entries, **_changes(self._rules[rule])}

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


def _changes(change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a rule changes; ``override_config`` skips values of other types."""
    found = dict[str, Any]()
    for key in ("bits", "group_size"):
        if is_integer(change.get(key)):
            found[key] = change[key]
    if isinstance(change.get("sym"), bool):
        found["sym"] = change["sym"]
    return found


def listed(entries: Mapping[str, Any]) -> list[str]:
    """Return the names in the list of quantized layers, which may be nested; empty without one."""
    names = entries.get(_LISTED) or []
    nested = (name if isinstance(name, list) else [name] for name in names)
    return of_type(flattened(nested), str)


def list_findings(
    entries: Mapping[str, Any],
    rule: str,
    is_nested_alone: bool = False,
) -> Iterator[Finding]:
    """Yield a list of quantized layers that a client cannot read.

    Args:
        entries: the quantization_config; null and a missing list are no error.
        rule: name of the rule that another value breaks, which depends on the client.
        is_nested_alone: whether the client reads lists of names in the list, and no names:
            ``GPTQQuantizer.convert_model`` of optimum joins them by ``sum(..., [])``.
    """
    given = entries.get(_LISTED)
    members = given if isinstance(given, list) else []
    lists = of_type(members, list)
    is_right = all(map(is_names, lists)) and len(lists) == len(members)
    if not is_nested_alone:
        is_right = is_right or is_names(given)
    if given is not None and not (isinstance(given, list) and is_right):
        wanted = "lists of names" if is_nested_alone else "names, or lists of them"
        text = f"{shown(given)}, and not a list of {wanted}"
        yield broken(rule, f"{QUANTIZATION}.{_LISTED}", text)


def listed_findings(
    checkpoint: Checkpoint,
    settings: SettingsInVllm,
) -> Iterator[Finding]:
    """Yield layers that are quantized though the list lacks them, or float though it has them.

    ``is_layer_gptq_quantized`` of gptq_utils.py takes entries for parts of names. vLLM does not ask
    for experts, and goes by the files where there is no list.

    Args:
        checkpoint: the checkpoint.
        settings: the settings of its layers.
    """
    names = listed(checkpoint.quantization)
    if not names:
        return
    parts = NameParts(names)
    torn = set[str]()
    for name, modules in shards(checkpoint.modules):
        flags = [parts.match(module.name) for module in modules]
        found = [*partial_findings(name, flags, f"in {_LISTED}")]
        yield from found
        if found:
            torn |= {module.name for module in modules}
    for module in checkpoint.linears:
        # a fused layer that is listed in part is a finding of its own
        is_asked = not module.experts and module.name not in torn
        if is_asked and settings.of(module) is not None:
            is_in = parts.match(module.name)
            yield from _listed_findings(module, is_in, f"{_LISTED} has it")


def replaced_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield float layers that optimum replaces by quantized ones, and quantized that it does not.

    ``GPTQConfig`` of transformers drops ``dynamic``, so that ``GPTQQuantizer.convert_model`` of
    optimum 2.3 replaces all layers of all blocks, or those whose names end with an entry of the
    list.
    """
    entries = checkpoint.quantization
    given = entries.get("block_name_to_quantize")
    blocks = (given,) if isinstance(given, str) else _BLOCKS
    # every name ends with "", and none with an entry of an empty list
    ends = ("",) if entries.get(_LISTED) is None else tuple(listed(entries))
    text = f"transformers reads {_LISTED}, and not dynamic"
    for module in checkpoint.linears:
        # experts are no Linear layers in transformers 5
        if module.name.startswith(blocks) and not module.experts:
            yield from _listed_findings(module, module.name.endswith(ends), text)


def _listed_findings(module: Module, is_in: bool, why: str) -> Iterator[Finding]:
    """Yield a layer that is quantized though the client keeps it float, or the reverse.

    Args:
        module: the layer.
        is_in: whether the client quantizes the layer.
        why: reason why it does.
    """
    if not is_in:
        yield from excluded_findings(module, f"{_LISTED} lacks it: {module.weight}")
    elif not module.is_quantized:
        yield from included_findings(module, f"its weight is {module.weight}; {why}")
