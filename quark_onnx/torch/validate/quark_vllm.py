"""Checks of AMD Quark's layout for vLLM: configuration, then schemes by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch

from quark_onnx.torch.validate.cache_in_vllm import cache_findings
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.finding import REFUSED, WARNING, WRONG, Finding
from quark_onnx.torch.validate.header import FLOATS, values_of
from quark_onnx.torch.validate.json_values import object_of
from quark_onnx.torch.validate.modules import Module, fused, size_of
from quark_onnx.torch.validate.quark_config import (
    QuarkConfig,
    is_glob,
    overrides_in_vllm,
    same,
    stages,
)
from quark_onnx.torch.validate.quark_schemes import (
    describe,
    group_of,
    scheme_in_vllm,
    slots_of,
)
from quark_onnx.torch.validate.rules import broken
from quark_onnx.torch.validate.slots import (
    SCALE,
    Slots,
    cache_slots,
    size_findings,
    slot_findings,
)

_HERE = "quantization_config"
#: Families whose routers vLLM quantizes like other layers, unless they are excluded.
_QUANTIZED_ROUTERS = ("dbrx", "lfm2_moe", "qwen3_moe")

#: The scale of the probabilities of an attention, and the layers that each attention has one of.
_PROBABILITIES, _QUERIES = (
    "prob_output_scale",
    ("q_proj", "qkv_proj", "query_key_value"),
)
_ONE = "there is no such tensor; 1.0 is taken"


def quark_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of vLLM in the configuration."""
    config = QuarkConfig(checkpoint.quantization)
    entries = config.entries
    yield from _export_findings(config)
    exclude = entries.get("exclude")
    if not isinstance(exclude, list) or len(config.exclude) < len(exclude):
        yield broken("quark-exclude", f"{_HERE}.exclude", _short(exclude))
    for pattern in config.exclude:
        if pattern.startswith("re:") and not _is_regular(pattern[3:]):
            yield broken(
                "quark-exclude",
                f"{_HERE}.exclude",
                f"{pattern!r} is no regular expression",
            )
        if is_glob(pattern):
            meant = [
                module
                for module in checkpoint.modules.values()
                if fnmatch(module.name, pattern)
            ]
            matters = any(
                module.is_linear and not module.is_quantized for module in meant
            )
            severity = WRONG if matters else WARNING
            yield broken(
                "quark-exclude-glob",
                f"{_HERE}.exclude",
                f"{pattern!r} means {len(meant)} layers",
                severity,
            )
    types = entries.get("layer_type_quant_config")
    if not isinstance(types, dict):
        yield broken(
            "quark-layer-types",
            f"{_HERE}.layer_type_quant_config",
            _short(types),
        )
    elif types:
        yield broken(
            "quark-layer-types-ignored",
            f"{_HERE}.layer_type_quant_config",
            f"it names {', '.join(types)}",
        )
    yield from _form_findings(config)
    if not config.fallback:
        yield broken(
            "quark-key",
            f"{_HERE}.global_quant_config",
            "there is no such object",
        )
    names = [
        name
        for module in checkpoint.modules.values()
        for name in (module.name, module.experts)
        if name
    ]
    for pattern in config.overrides:
        if not any(overrides_in_vllm(pattern, name) for name in names):
            yield broken(
                "quark-pattern",
                f"{_HERE}.layer_quant_config",
                f"{pattern!r} matches no layer",
            )


def quark_layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of vLLM in the layers and their tensors."""
    config = QuarkConfig(checkpoint.quantization)
    family = checkpoint.config.get("model_type")
    for name, modules in fused(checkpoint.modules):
        yield from _fused_findings(config, name, modules)
        if not modules[0].experts:
            yield from _second_scale_findings(name, modules)
    for module in checkpoint.modules.values():
        stays = (
            module.is_router
            and family not in _QUANTIZED_ROUTERS
            and not module.is_quantized
        )
        if module.is_linear and not stays:
            yield from _layer_findings(checkpoint, config, module)
    yield from cache_findings(checkpoint, config)
    yield from attention_findings(checkpoint, config)


def quark_schemes_in_vllm(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the scheme of every quantized layer."""
    config = QuarkConfig(checkpoint.quantization)
    for module in checkpoint.modules.values():
        if module.is_linear and module.is_quantized:
            layer = config.layer_in_vllm(module)
            yield scheme_in_vllm(layer, config.pack_method, bool(module.experts))[
                0
            ] or describe(layer)


def tensor_findings(
    checkpoint: Checkpoint,
    module: Module,
    layer: dict[str, object],
    extra: Slots,
) -> Iterator[Finding]:
    """Yield errors in the tensors of a quantized layer, by its configuration."""
    weight = module.weight
    if weight is None:
        return
    found = slots_of(layer, weight, module.tensors.get("weight_scale"))
    if found is None:
        return
    size, slots = found
    group = group_of(layer)
    if group and size[1] % group:
        yield broken(
            "group-divides",
            module.name,
            f"groups of {group}, and {size[1]} inputs",
        )
        return
    yield from size_findings(module, size, size_of(module.name, checkpoint.text_config))
    yield from slot_findings(module, {**slots, **extra})


def kv_slots(config: QuarkConfig, module: Module) -> Slots:
    """Return the scales of a layer whose output is the KV cache."""
    queries = module.last == "q_proj" and config.rounds_attention
    if not (queries or config.is_cached(module)):
        return {}
    return {"output_scale": replace(SCALE, needed=False)}


def kv_scale_findings(checkpoint: Checkpoint, config: QuarkConfig) -> Iterator[Finding]:
    """Yield layers that lack the scale of their output for the KV cache."""
    for module in checkpoint.modules.values():
        if (
            config.is_cached(module)
            and module.last != "q_proj"
            and "output_scale" not in module.tensors
        ):
            yield broken("kv-scales-missing", f"{module.name}.output_scale", _ONE)


def attention_findings(
    checkpoint: Checkpoint,
    config: QuarkConfig,
) -> Iterator[Finding]:
    """Yield non-scalar scales of probabilities, and missing attention scales."""
    for name, module in checkpoint.modules.items():
        if _PROBABILITIES in module.tensors:
            alone = Module(name, {_PROBABILITIES: module.tensors[_PROBABILITIES]})
            yield from slot_findings(alone, {_PROBABILITIES: SCALE})
    if not config.rounds_attention:
        return
    for module in checkpoint.modules.values():
        if not module.is_linear or module.last not in _QUERIES:
            continue
        parent = module.name.rpartition(".")[0]
        if (
            parent not in checkpoint.modules
            or _PROBABILITIES not in checkpoint.modules[parent].tensors
        ):
            yield broken("attention-scales-missing", f"{parent}.{_PROBABILITIES}", _ONE)
        out = config.excludes(module.name)
        if (
            not out
            and module.last == "q_proj"
            and config.is_cached(module)
            and "output_scale" not in module.tensors
        ):
            yield broken(
                "attention-scales-missing",
                f"{module.name}.output_scale",
                _ONE,
            )


def _export_findings(config: QuarkConfig) -> Iterator[Finding]:
    entries = config.entries
    place = f"{_HERE}.export"
    if not isinstance(entries.get("export"), dict):
        yield broken("quark-export", place, _short(entries.get("export")))
        return
    group = config.export.get("kv_cache_group")
    if not isinstance(group, list) or len(config.kv_patterns) < len(group):
        yield broken("quark-export", f"{place}.kv_cache_group", _short(group))
        return
    if config.export.get("pack_method") not in ("reorder", "order"):
        yield broken(
            "quark-export",
            f"{place}.pack_method",
            _short(config.export.get("pack_method")),
        )
    if config.export.get("weight_format") == "fake_quantized":
        yield broken(
            "quark-fake",
            f"{place}.weight_format",
            "'fake_quantized': the weights are floats",
        )
    if not group:
        return
    layers = config.kv_layers
    if not layers:
        yield broken(
            "quark-kv",
            f"{place}.kv_cache_group",
            f"no name in layer_quant_config matches {group}",
        )
        return
    outputs = [layer.get("output_tensors") for layer in layers.values()]
    if any("output_tensors" not in layer for layer in layers.values()):
        yield broken(
            "quark-kv",
            f"{_HERE}.layer_quant_config",
            "a layer of the KV cache lacks output_tensors",
        )
    elif not all(same(output, outputs[0]) for output in outputs):
        yield broken(
            "quark-kv",
            f"{_HERE}.layer_quant_config",
            "layers of the KV cache differ in output_tensors",
        )
    else:
        spec = object_of(outputs[0])
        found = spec.get("dtype"), spec.get("qscheme")
        if found != ("fp8_e4m3", "per_tensor"):
            yield broken(
                "quark-kv",
                f"{_HERE}.layer_quant_config",
                f"output_tensors are {found[0]}, {found[1]}",
            )


def _form_findings(config: QuarkConfig) -> Iterator[Finding]:
    """Yield malformed entries."""
    layers = config.entries.get("layer_quant_config")
    if layers is not None and not isinstance(layers, dict):
        yield broken("malformed", f"{_HERE}.layer_quant_config", _short(layers))
    own = {
        f"layer_quant_config.{name}": entry for name, entry in object_of(layers).items()
    }
    for place, entry in {"global_quant_config": config.fallback, **own}.items():
        if not isinstance(entry, dict):
            yield broken("malformed", f"{_HERE}.{place}", _short(entry))
            continue
        for key in ("weight", "input_tensors"):
            spec = entry.get(key)
            if spec is not None and len(stages(spec)) != (
                len(spec) if isinstance(spec, list) else 1
            ):
                yield broken("malformed", f"{_HERE}.{place}.{key}", _short(spec))


def _fused_findings(
    config: QuarkConfig,
    name: str,
    modules: list[Module],
) -> Iterator[Finding]:
    excluded = [config.excludes(module.name) for module in modules]
    if any(excluded) and not all(excluded):
        which = ", ".join(
            module.name for module, out in zip(modules, excluded, strict=True) if out
        )
        yield broken("shards-excluded", name, f"only {which} is excluded")
        return
    if all(excluded):
        return
    first, *others = modules
    if first.experts:
        own = [config.layer(module.name) for module in modules]
        shared = config.layer_in_vllm(first)
        differ = [
            m.name
            for m, layer in zip(modules, own, strict=True)
            if not same(layer, shared)
        ]
        if differ:
            text = (
                f"{len(differ)} of {len(modules)} experts have a configuration of their"
                f" own, as {differ[0]}"
            )
            yield broken("quark-experts-differ", name, text)
    else:
        layer = config.layer_in_vllm(first)
        for other in others:
            found = config.layer_in_vllm(other)
            if not same(found, layer):
                text = (
                    f"{first.last}: {describe(layer)}; {other.last}: {describe(found)}"
                )
                yield broken(
                    "quark-shards-differ",
                    name,
                    text if describe(layer) != describe(found) else _keys(layer, found),
                )


def _second_scale_findings(name: str, modules: list[Module]) -> Iterator[Finding]:
    """Yield fused layers with different second scales.

    vLLM takes the greatest second scale for all codes of the fused layer.
    """
    tensors = [module.tensors.get("weight_scale_2") for module in modules]
    found = [
        values_of(each)
        for each in tensors
        if each is not None and each.count == 1 and each.dtype in FLOATS
    ]
    if len({float(values[0]) for values in found}) > 1:
        yield broken(
            "nvfp4-scales-differ",
            name,
            ", ".join(f"{values[0]:.6g}" for values in found),
        )


def _layer_findings(
    checkpoint: Checkpoint,
    config: QuarkConfig,
    module: Module,
) -> Iterator[Finding]:
    if config.excludes(module.name) or config.excludes_in_vllm(module):
        if module.is_quantized:
            yield broken(
                "excluded-quantized",
                module.name,
                f"it is excluded, and {_stored(module)}",
            )
        return
    layer = config.layer_in_vllm(module)
    for key in ("output_tensors", "bias"):
        if layer.get(key):
            yield broken("quark-outputs", module.name, f"{key} is {_short(layer[key])}")
    name, why = scheme_in_vllm(layer, config.pack_method, bool(module.experts))
    if not name:
        yield broken("quark-scheme", module.name, f"{describe(layer)}: {why}")
    elif config.export.get("weight_format") == "fake_quantized":
        return
    elif not module.is_quantized:
        severity = REFUSED if _is_packed(layer) else WRONG
        yield broken(
            "float-included",
            module.name,
            f"{_stored(module)}; the configuration says {name}",
            severity,
        )
    else:
        yield from tensor_findings(checkpoint, module, layer, cache_slots(module))


def _is_packed(layer: dict[str, object]) -> bool:
    """Return whether the stored shape differs from a float weight's shape."""
    return any(
        str(spec.get("dtype")).endswith("4") or "fp6" in str(spec["dtype"])
        for spec in stages(layer.get("weight"))
    )


def _stored(module: Module) -> str:
    scales = [name for name in module.tensors if "scale" in name]
    if not scales:
        return f"its weight is {module.weight}"
    return f"its weight is {module.weight} with {', '.join(scales)}"


def _keys(first: dict[str, object], second: dict[str, object]) -> str:
    differ = [
        key for key in {**first, **second} if not same(first.get(key), second.get(key))
    ]
    inner = [
        f"{key}.{name}"
        for key in differ
        for one, other in [(stages(first.get(key)), stages(second.get(key)))]
        if len(one) == len(other) == 1
        for name in {**one[0], **other[0]}
        if name not in one[0]
        or name not in other[0]
        or not same(one[0][name], other[0][name])
    ]
    return f"the configurations differ in {', '.join(inner or differ)}"


def _is_regular(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _short(value: object) -> str:
    if value is None:
        return "there is no such key, or it is null"
    text = repr(value)
    if len(text) < 80:
        return text
    return f"{text[:77]}..."
