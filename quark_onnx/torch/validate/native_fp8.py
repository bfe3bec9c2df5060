"""Checks of DeepSeek's fp8 layout: E4M3 with per-tensor or block scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.header import FLOATS
from quark_onnx.torch.validate.json_values import strings_of
from quark_onnx.torch.validate.modules import Module, fused, size_of
from quark_onnx.torch.validate.quark_config import is_glob
from quark_onnx.torch.validate.rules import broken
from quark_onnx.torch.validate.slots import (
    SCALAR,
    SCALE,
    Slot,
    cache_slots,
    ceil_div,
    name_list_findings,
    size_findings,
    slot_findings,
)

_HERE = "quantization_config"
_TYPES = ("F8_E4M3",)


def config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration."""
    entries = checkpoint.quantization
    scheme, block = entries.get("activation_scheme"), entries.get("weight_block_size")
    if scheme not in ("static", "dynamic"):
        yield broken(
            "fp8-config",
            f"{_HERE}.activation_scheme",
            "missing" if scheme is None else repr(scheme),
        )
    if block is not None and (
        not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block))
    ):
        yield broken("fp8-config", f"{_HERE}.weight_block_size", repr(block))
    elif block is not None and scheme == "static":
        yield broken(
            "fp8-config",
            f"{_HERE}.activation_scheme",
            "static, with weight_block_size",
        )
    yield from name_list_findings(entries, "ignored_layers")
    for name in _excluded(entries):
        if is_glob(name) or name.startswith("re:"):
            yield broken(
                "exclude-pattern",
                f"{_HERE}.ignored_layers",
                f"{name!r} is no exact name",
            )


def vllm_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of vLLM in fused layers and in their tensors."""
    entries = checkpoint.quantization
    names = _excluded(entries)
    for name, modules in fused(checkpoint.modules):
        out = [module.name in names for module in modules]
        if any(out) and not all(out) and not modules[0].experts:
            yield broken(
                "shards-excluded",
                name,
                f"{sum(out)} of {len(out)} are in ignored_layers",
            )
        block = entries.get("weight_block_size")
        if block and not modules[0].experts and not any(out):
            for module in modules[:-1]:
                if (
                    module.weight is not None
                    and module.is_quantized
                    and module.weight.shape[0] % block[0]
                ):
                    text = (
                        f"blocks of {block[0]}, and {module.weight.shape[0]} outputs,"
                        " behind which others are fused"
                    )
                    yield broken("group-divides", module.name, text)
    end = "weight_scale_inv" if entries.get("weight_block_size") else "weight_scale"
    yield from _layer_findings(checkpoint, {end}, "input_scale")


def transformers_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield tensors that transformers does not find in the layers."""
    old = [
        f"{module.name}.{name}"
        for module in checkpoint.modules.values()
        for name in ("weight_scale", "input_scale")
        if name in module.tensors
    ]
    if old:
        yield broken(
            "fp8-names",
            old[0],
            f"{len(old)} scales are called so, and are not found",
        )
    yield from _layer_findings(
        checkpoint,
        {"weight_scale_inv", "weight_scale"},
        "activation_scale",
    )


def schemes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the number formats of every quantized layer."""
    block = checkpoint.quantization.get("weight_block_size")
    for module in checkpoint.modules.values():
        if module.is_linear and module.is_quantized:
            yield f"fp8 in blocks of {block[0]} × {block[1]}" if block else "fp8"


def _layer_findings(
    checkpoint: Checkpoint,
    scales: set[str],
    inputs: str,
) -> Iterator[Finding]:
    entries = checkpoint.quantization
    excluded = _excluded(entries)
    for module in checkpoint.modules.values():
        if not module.is_linear and not (module.is_head and module.is_quantized):
            continue
        out = module.name in excluded or any(
            module.name.startswith(f"{name}.") for name in excluded
        )
        if out or module.is_head:
            if module.is_quantized:
                yield broken(
                    "excluded-quantized",
                    module.name,
                    f"it is excluded, and its weight is {module.weight}",
                )
        elif not module.is_quantized:
            if not module.is_router:
                yield broken(
                    "float-included",
                    module.name,
                    f"its weight is {module.weight}, not F8_E4M3",
                )
        else:
            yield from _tensors(checkpoint, module, scales, inputs)


def _tensors(
    checkpoint: Checkpoint,
    module: Module,
    scales: set[str],
    inputs: str,
) -> Iterator[Finding]:
    entries, weight = checkpoint.quantization, module.weight
    assert weight is not None
    rows, columns = weight.shape
    block = entries.get("weight_block_size")
    name = next(
        (name for name in sorted(scales) if name in module.tensors),
        sorted(scales)[0],
    )
    shapes = SCALAR
    if block:
        shapes = ((ceil_div(rows, block[0]), ceil_div(columns, block[1])),)
    slots = {
        "weight": Slot(_TYPES, ((rows, columns),)),
        name: Slot((*FLOATS, "F8_E8M0", "U8"), shapes),
    }
    if len(scales) > 1:
        slots["input_scale"] = Slot(FLOATS, SCALAR, False)
        slots[inputs] = Slot(FLOATS, SCALAR, False)
    elif entries.get("activation_scheme") == "static":
        slots[inputs] = SCALE
    slots.update(cache_slots(module))
    yield from size_findings(
        module,
        (rows, columns),
        size_of(module.name, checkpoint.text_config),
    )
    yield from slot_findings(module, slots)


def _excluded(entries: dict[str, Any]) -> list[str]:
    return strings_of(
        entries.get("ignored_layers") or entries.get("modules_to_not_convert"),
    )


def _is_size(number: Any) -> bool:
    return type(number) is int and number > 0
