"""Checks of DeepSeek's fp8 layout: E4M3 with per-tensor or block scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark_onnx.torch.models.names import NamesInTransformers
from quark_onnx.torch.runtime.safetensors_header import FLOATS
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import (
    QUANTIZATION,
    FieldCheck,
    field_findings,
    is_positive,
    name_list_findings,
    one_of,
    strings_of,
)
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.layer_checks import (
    OPTIONAL_SCALE,
    SCALAR,
    SCALE,
    block_findings,
    cache_slots,
    ceil_div,
    expression_findings,
    listed_findings,
    partial_findings,
    quantized_findings,
    slot,
)
from quark_onnx.torch.validate.modules import Module, shards
from quark_onnx.torch.validate.name_patterns import (
    LongerTexts,
    is_expression,
    is_glob,
    is_regular,
)
from quark_onnx.torch.validate.rules import broken


def _is_block(block: Any) -> bool:
    """Return whether a block has two positive sizes, such as [128, 128]; null stands for none."""
    if block is None:
        return True
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(is_positive(size) for size in block)
    )


def vllm_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration, for vLLM."""
    yield from _config_findings(checkpoint.quantization)
    for name in _excluded_in_vllm(checkpoint.quantization):
        # ``Fp8Config`` compares exact names
        if is_glob(name) or is_expression(name):
            place = f"{QUANTIZATION}.ignored_layers"
            yield broken("exclude-pattern", place, f"{name!r} is no exact name")


def transformers_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration, for transformers."""
    yield from _config_findings(checkpoint.quantization)
    patterns = _excluded_in_transformers(checkpoint.quantization) or []
    yield from expression_findings(patterns)


def _config_findings(entries: dict[str, Any]) -> Iterator[Finding]:
    """Yield errors in the configuration, for any client."""
    modes = one_of("static", "dynamic")
    yield from field_findings(
        entries,
        QUANTIZATION,
        FieldCheck("fp8-config", "activation_scheme", modes, absent="missing"),
        FieldCheck("fp8-config", "weight_block_size", _is_block),
    )
    # inputs of weights in blocks get their scales at runtime, a scale for each block
    block = entries.get("weight_block_size")
    is_static = entries.get("activation_scheme") == "static"
    if is_static and block and _is_block(block):
        place = f"{QUANTIZATION}.activation_scheme"
        yield broken("fp8-config", place, "static, with weight_block_size")
    for key in ("ignored_layers", "modules_to_not_convert"):
        yield from name_list_findings(entries, key)


def vllm_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of vLLM in fused layers and in their tensors."""
    block = checkpoint.quantization.get("weight_block_size")
    excluded = ExcludedInVllm(checkpoint)
    for name, modules in shards(checkpoint.modules):
        out = [excluded.match(module) for module in modules]
        yield from partial_findings(name, out, "in ignored_layers")
    yield from block_findings(checkpoint, lambda _: block and block[0])
    # vLLM creates the parameter under one of the two names
    end = "weight_scale_inv" if block else "weight_scale"
    for module in checkpoint.layers:
        # vLLM keeps heads float, whatever the list says
        is_out = module.is_head or excluded.match(module)
        yield from _layer_findings(checkpoint, module, is_out, {end}, "input_scale")


def transformers_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield tensors that transformers does not find in the layers."""
    old = list[str]()
    for module in checkpoint.modules.values():
        # transformers creates weight_scale_inv and activation_scale, and skips other tensors
        for end in ("weight_scale", "input_scale"):
            if end in module.tensors:
                old.append(f"{module.name}.{end}")
    if old:
        text = f"{len(old)} scales are called so, and are not found"
        yield broken("fp8-names", old[0], text)
    scales = {"weight_scale_inv", "weight_scale"}
    # a head is a layer as any other, unless there is no list
    excluded = _excluded_in_transformers(checkpoint.quantization)
    # other entries have a finding of their own
    names = NamesInTransformers(filter(is_regular, excluded or []))
    for module in checkpoint.matrices:
        is_out = module.is_head if excluded is None else names.match(module.name)
        yield from _layer_findings(
            checkpoint, module, is_out, scales, "activation_scale"
        )


def schemes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the number formats of every quantized layer."""
    # one for all layers: the configuration has no entries for single layers
    block = checkpoint.quantization.get("weight_block_size")
    for _ in checkpoint.quantized_linears:
        yield f"fp8 in blocks of {block[0]} × {block[1]}" if block else "fp8"


def _layer_findings(
    checkpoint: Checkpoint, module: Module, is_out: bool, scales: set[str], inputs: str
) -> Iterator[Finding]:
    """Yield errors in a layer whose weight or tensors are unlike the configuration.

    Args:
        is_out: whether the client keeps the layer float.
        scales: names under which the client finds the scales of a weight; several for transformers.
        inputs: name under which the client finds the scale of the inputs.
    """
    stored = f"its weight is {module.weight}"
    yield from listed_findings(
        module, is_out, f"it is excluded, and {stored}", f"{stored}, not F8_E4M3"
    )
    if is_out or not module.is_quantized:
        return
    rows, columns = module.matrix.shape
    shapes = SCALAR
    block = checkpoint.quantization.get("weight_block_size")
    if block:
        shapes = ((ceil_div(rows, block[0]), ceil_div(columns, block[1])),)
    names = sorted(scales & {*module.tensors}) or sorted(scales)
    slots = {
        "weight": slot("F8_E4M3", (rows, columns)),
        names[0]: slot((*FLOATS, "F8_E8M0", "U8"), *shapes),
    }
    # transformers: scales under vLLM's names are one finding of fp8-names, not one for each layer
    if len(scales) > 1:
        slots |= {"input_scale": OPTIONAL_SCALE, inputs: OPTIONAL_SCALE}
    elif checkpoint.quantization.get("activation_scheme") == "static":
        slots[inputs] = SCALE
    slots |= cache_slots(module)
    yield from quantized_findings(checkpoint, module, (rows, columns), slots)


def _excluded_in_vllm(entries: dict[str, Any]) -> list[str]:
    """Return the names of float layers that ``Fp8Config.from_config`` of vLLM reads."""
    return strings_of(
        entries.get("ignored_layers") or entries.get("modules_to_not_convert")
    )


class ExcludedInVllm:
    """Float layers of a checkpoint in vLLM, by ``is_layer_skipped`` of quant_utils.py.

    Entries are exact names of layers, of fused layers, or of parts of experts.

    Args:
        checkpoint: the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        entries = _excluded_in_vllm(checkpoint.quantization)
        self._names = frozenset(entries)
        self._longer = LongerTexts(entries)
        self._experts = dict[str, bool]()

    def match(self, module: Module) -> bool:
        """Return whether vLLM keeps a layer float."""
        names = self._checkpoint.names_in_vllm(module)
        if not self._names.isdisjoint(names):
            return True
        # vLLM looks for the module of the experts, or another layer below one, within the entries
        name = module.experts or module.name
        if len(names) > 1 or "experts" not in name:
            return False
        # many layers share the module
        if name not in self._experts:
            self._experts[name] = self._longer.first(name) is not None
        return self._experts[name]


def _excluded_in_transformers(entries: dict[str, Any]) -> list[str] | None:
    """Return the entries for float layers that ``FineGrainedFP8Config`` of transformers reads.

    None without a list, for which transformers keeps the head float.
    """
    for key in ("modules_to_not_convert", "ignored_layers"):
        # an empty list counts, null does not
        if entries.get(key) is not None:
            return strings_of(entries[key])
    return None
