"""Checks of the layouts of AutoAWQ and GPTQ: keys, and integers packed in int32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import filterfalse
from typing import Any

from quark_onnx.common.containers import subset
from quark_onnx.torch.models.names import NamesInTransformers
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import (
    NO_KEY,
    QUANTIZATION,
    is_group_size,
    is_positive,
    missing_key_findings,
    shown,
)
from quark_onnx.torch.validate.finding import REFUSED, Finding
from quark_onnx.torch.validate.gptq_settings import (
    SettingsInVllm,
    SettingsOf,
    dynamic_findings,
    list_findings,
    listed_findings,
    replaced_findings,
)
from quark_onnx.torch.validate.header import FLOATS, Tensor
from quark_onnx.torch.validate.modules import (
    Module,
    excluded_findings,
    fused,
    included_findings,
    partial_findings,
    size_of,
)
from quark_onnx.torch.validate.name_patterns import NameParts, is_regular
from quark_onnx.torch.validate.packed_outputs import (
    PackedOutputs,
    packed_output_findings,
)
from quark_onnx.torch.validate.rules import broken
from quark_onnx.torch.validate.slots import (
    Shape,
    Slot,
    Slots,
    floats,
    name_list_findings,
    quantized_findings,
)

Sizes = Callable[[Tensor, dict[str, Any]], tuple[Shape, Slots]]


def _group_size(entries: dict[str, Any]) -> Any:
    """Return the group size, under AutoAWQ's or transformers' name."""
    # transformers writes the keys of its AwqConfig, AutoAWQ its own in quant_config.json
    return entries.get("q_group_size", entries.get("group_size"))


def _bits(entries: dict[str, Any], default: Any = None) -> Any:
    """Return the bits of an integer, under AutoAWQ's or transformers' name."""
    return entries.get("w_bit", entries.get("bits", default))


def awq_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration of AutoAWQ."""
    entries = checkpoint.quantization
    for names in (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",)):
        # vLLM takes either name (``get_from_keys`` of auto_awq.py)
        if not subset(entries, names):
            yield broken("awq-config", f"{QUANTIZATION}.{names[-1]}", NO_KEY)
    bits = _bits(entries, 4)
    if bits != 4:
        yield broken("awq-config", f"{QUANTIZATION}.bits", repr(bits))
    yield from _group_size_findings(entries, "awq-config")
    yield from name_list_findings(entries, "modules_to_not_convert")
    yield from _version_findings(entries, "awq-version")


def _group_size_findings(entries: dict[str, Any], rule: str) -> Iterator[Finding]:
    """Yield a group size that is no number of inputs; a missing one has a finding of its own.

    Args:
        entries: the quantization_config.
        rule: name of the rule that another value breaks, which depends on the client.
    """
    given = subset(entries, ("q_group_size", "group_size"))
    if given and not is_group_size(_group_size(entries)):
        text = shown(_group_size(entries))
        yield broken(rule, f"{QUANTIZATION}.group_size", text)


def _version_findings(entries: dict[str, Any], rule: str) -> Iterator[Finding]:
    """Yield a version of AutoAWQ with a packing order unlike gemm's.

    Args:
        entries: the quantization_config.
        rule: name of the rule that another version breaks, which depends on the client.
    """
    # older files have no version, and are gemm
    version = str(entries.get("version", "gemm")).lower()
    if version != "gemm":
        yield broken(rule, f"{QUANTIZATION}.version", repr(version))


def vllm_awq_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the tensors of AutoAWQ, for vLLM."""
    # without a list, vLLM finds float layers by the files
    layers = checkpoint.linears if _skipped(checkpoint) else []
    skipped = SkippedInVllm(checkpoint)
    for module in layers:
        yield from _listed_findings(module, skipped.match(module))
    yield from packed_output_findings(checkpoint, _awq_outputs)
    yield from _tensor_findings(checkpoint, _awq_slots, _common_settings(checkpoint))


def _awq_outputs(module: Module) -> PackedOutputs | None:
    """Return the packed outputs of a layer of AutoAWQ; None for any other layer."""
    packed = module.weight
    if packed is None or not packed.name.endswith(".qweight"):
        return None
    return PackedOutputs(packed.shape[1] * 8, 4, "outputs")


def transformers_awq_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the tensors of AutoAWQ, for transformers."""
    skipped = _skipped(checkpoint)
    for pattern in filterfalse(is_regular, skipped):
        place = f"{QUANTIZATION}.modules_to_not_convert"
        text = f"{pattern!r} is no regular expression"
        yield broken("exclude-pattern", place, text, REFUSED)
    names = NamesInTransformers(filter(is_regular, skipped))
    for module in checkpoint.linears:
        yield from _listed_findings(module, names.match(module.name))
    yield from _tensor_findings(checkpoint, _awq_slots, _common_settings(checkpoint))


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
        return any(map(self._parts.match, self._checkpoint.names_in_vllm(module)))


def _skipped(checkpoint: Checkpoint) -> list[str]:
    """Return the names of float layers in a configuration of AutoAWQ."""
    names = checkpoint.quantization.get("modules_to_not_convert") or []
    return [*map(str, names)]


def _listed_findings(module: Module, is_out: bool) -> Iterator[Finding]:
    """Yield a layer that is quantized though it is excluded, or float though it is not.

    Args:
        module: the layer.
        is_out: whether the client keeps the layer float.
    """
    if is_out:
        text = f"modules_to_not_convert names it: {module.weight}"
        yield from excluded_findings(module, text)
    elif not module.is_quantized:
        text = f"its weight is {module.weight}"
        yield from included_findings(module, text, REFUSED)


def gptq_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration of GPTQ."""
    entries = checkpoint.quantization
    keys = ("bits", "group_size", "desc_act", "sym")
    yield from missing_key_findings(entries, QUANTIZATION, "gptq-config", keys)
    # a missing key has its own finding, and passes here
    bits, symmetric = entries.get("bits", 4), entries.get("sym", True)
    # ``TYPE_MAP`` of auto_gptq.py
    if bits not in (4, 8) or symmetric is not True:
        yield broken(
            "gptq-config",
            f"{QUANTIZATION}.bits",
            f"{bits!r} with sym {symmetric!r}; 4 and 8 with true are read",
        )
    yield from _group_size_findings(entries, "gptq-config")
    yield from list_findings(entries, "gptq-config")
    # with one group for all inputs the order of the columns does not matter
    if entries.get("desc_act") and entries.get("group_size") != -1:
        yield broken(
            "gptq-config",
            f"{QUANTIZATION}.desc_act",
            "true; groups in the order of activations were given up",
        )
        return
    yield from dynamic_findings(entries)


def gptqmodel_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in a configuration of AutoAWQ or GPTQ, for transformers.

    gptqmodel reads the layers for transformers.
    """
    entries = checkpoint.quantization
    bits = _bits(entries)
    if bits not in (2, 3, 4, 8):
        text = NO_KEY if bits is None else repr(bits)
        yield broken("gptqmodel-config", f"{QUANTIZATION}.bits", text)
    yield from _group_size_findings(entries, "gptqmodel-config")
    if checkpoint.method == "gptq":
        yield from list_findings(entries, "gptqmodel-config", is_nested_alone=True)
    if checkpoint.method == "awq":
        yield from name_list_findings(entries, "modules_to_not_convert")
        yield from _version_findings(entries, "method-unchecked")


def vllm_gptq_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the tensors of GPTQ, for vLLM."""
    settings = SettingsInVllm(checkpoint)
    refused = [*settings.findings()]
    yield from refused
    # the shapes of their tensors follow from the bits
    if refused:
        return
    yield from listed_findings(checkpoint, settings)
    yield from _tensor_findings(checkpoint, _gptq_slots, settings.of)


def transformers_gptq_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the tensors of GPTQ, for transformers."""
    yield from replaced_findings(checkpoint)
    yield from _tensor_findings(checkpoint, _gptq_slots, _common_settings(checkpoint))


def _common_settings(checkpoint: Checkpoint) -> SettingsOf:
    """Return a function that returns the settings of all layers for each of them."""
    return lambda module: checkpoint.quantization


def schemes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the number formats of every quantized layer."""
    entries = checkpoint.quantization
    bits = _bits(entries)
    for module in checkpoint.linears:
        # layers without it are float
        if "qweight" in module.tensors:
            yield f"{bits} bits in groups of {_group_size(entries)}"


def fused_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield fused layers that are quantized in part.

    Without a list, vLLM finds float layers by the files. Fused layers must be uniform.
    """
    for name, modules in fused(checkpoint.modules):
        stored = [module.is_quantized for module in modules]
        yield from partial_findings(name, stored, "quantized")


def awq_expert_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield experts with a group size of -1, by which vLLM divides the inputs."""
    entries = checkpoint.quantization
    # Linear layers have one group for -1; the class of experts has not
    if _group_size(entries) != -1:
        return
    for module in checkpoint.modules.values():
        if module.experts and module.is_quantized:
            yield broken("awq-experts", module.name, "group_size is -1")
            return


def _tensor_findings(
    checkpoint: Checkpoint,
    slots_of: Sizes,
    settings_of: SettingsOf,
) -> Iterator[Finding]:
    """Yield errors in the tensors of the layers.

    Args:
        checkpoint: the checkpoint.
        slots_of: function that returns (out, in) and the required tensors of a layer, by its
            packed weight and the configuration of the layer.
        settings_of: function that returns the settings of a layer; None for a float layer.
    """
    for module in checkpoint.modules.values():
        weight = module.weight
        # norms, embeddings and layers that were left out
        is_float = "weight" in module.tensors and not module.is_quantized
        # integers without a scale have a finding of their own
        if weight is None or is_float or module.has_bare_integers:
            continue
        # a matrix of codes under another name, or a norm that was renamed to qweight
        if not weight.name.endswith(".qweight") or len(weight.shape) != 2:
            yield broken(
                "tensor-unknown",
                weight.name,
                f"{weight}; a layer is float, or a matrix called qweight",
            )
            continue
        entries = settings_of(module)
        if entries is None:
            yield from excluded_findings(module, f"dynamic excludes it: {weight}")
            continue
        size, slots = slots_of(weight, entries)
        demanded = size_of(module.name, checkpoint.text_config)
        group = _group_size(entries)
        yield from quantized_findings(module, size, demanded, slots, group)


def _awq_slots(weight: Tensor, entries: dict[str, Any]) -> tuple[Shape, Slots]:
    """Return the size and slots of AutoAWQ: eight outputs in an int32.

    Args:
        weight: the packed weight, of shape (in, out / 8).
        entries: the configuration of the layer.

    Returns:
        (out, in), and the slots by tensor name.
    """
    # qweight is (in, out / 8), and scales are (groups, out)
    rows, columns = weight.shape
    groups = _groups(rows, _group_size(entries))
    return (columns * 8, rows), {
        "qweight": Slot(("I32",), ((rows, columns),)),
        "qzeros": Slot(("I32",), ((groups, columns),)),
        "scales": floats((groups, columns * 8)),
    }


def _gptq_slots(weight: Tensor, entries: dict[str, Any]) -> tuple[Shape, Slots]:
    """Return the size and slots of GPTQ: several inputs in an int32.

    Args:
        weight: the packed weight, of shape (in * bits / 32, out).
        entries: the configuration of the layer; its "bits" are required.

    Returns:
        (out, in), and the slots by tensor name.
    """
    # qweight is (in * bits / 32, out), and scales are (groups, out)
    bits = entries["bits"]
    rows, columns = weight.shape
    into = rows * 32 // bits
    groups = _groups(into, entries.get("group_size"))
    return (columns, into), {
        "qweight": Slot(("I32",), ((rows, columns),)),
        "qzeros": Slot(("I32",), ((groups, columns * bits // 32),), needed=False),
        "scales": Slot(FLOATS, ((groups, columns),)),
        # the group of each input; only desc_act needs it, though files mostly hold it
        "g_idx": Slot(("I32",), ((into,),), needed=False),
    }


def _groups(into: int, group: Any) -> int:
    """Return the number of groups of inputs; a size such as -1 stands for a single group.

    Args:
        into: number of inputs.
        group: group_size as it stands in the configuration; None if there is none.
    """
    return into // group if is_positive(group) else 1
