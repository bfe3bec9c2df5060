"""Checks of AMD Quark's layout for transformers with amd-quark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.json_values import object_of
from quark_onnx.torch.validate.modules import Module
from quark_onnx.torch.validate.quark_config import QuarkConfig, stages
from quark_onnx.torch.validate.quark_schemes import describe
from quark_onnx.torch.validate.quark_vllm import (
    attention_findings,
    kv_scale_findings,
    kv_slots,
    tensor_findings,
)
from quark_onnx.torch.validate.rules import broken

TOP_KEYS = (
    "global_quant_config",
    "layer_quant_config",
    "layer_type_quant_config",
    "exclude",
)
LAYER_KEYS = ("weight", "input_tensors", "output_tensors", "bias")
TENSOR_KEYS = (
    "dtype",
    "is_dynamic",
    "qscheme",
    "ch_axis",
    "group_size",
    "symmetric",
    "observer_cls",
)
EXPORT_KEYS = (
    "kv_cache_group",
    "min_kv_scale",
    "pack_method",
    "weight_format",
    "weight_merge_groups",
)
#: The observers of amd-quark 0.13 by the qscheme that they go with; the first is what it writes for
#: min-max.
OBSERVERS = {
    "per_tensor": (
        "PerTensorMinMaxObserver",
        "PerTensorPowOf2MinMaxObserver",
        "PerTensorPowOf2MinMSEObserver",
        "PerTensorHistogramObserver",
        "PerTensorHistogramObserverPro",
        "PerTensorPercentileObserver",
        "PerTensorMSEObserver",
        "TQTObserver",
        "LSQObserver",
    ),
    "per_channel": (
        "PerChannelMinMaxObserver",
        "PerChannelPowOf2MinMaxObserver",
        "PerChannelPowOf2MinMSEObserver",
        "LSQObserver",
    ),
    "per_group": (
        "PerGroupMinMaxObserver",
        "PerBlockMXObserver",
        "PerBlockMXBufferReuseObserver",
        "PerBlockMXDiffsObserver",
        "PerBlockBFPObserver",
        "PerBlock2DMinMaxObserver",
    ),
}
INTEGERS = (
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "int4",
    "uint4",
    "int3",
    "int2",
    "uint2",
)
_TYPES = (
    *INTEGERS,
    *(
        "bfloat16",
        "float16",
        "fp8_e5m2",
        "fp8_e4m3",
        "fp8_e5m3",
        "fp6_e3m2",
        "fp6_e2m3",
        "fp4",
    ),
    *("mx", "mx6", "mx9", "bfp16"),
)
#: Formats without a separate scale, and without an observer.
_CASTS = ("bfloat16", "float16")
_UNSCALED = (*_CASTS, "mx", "mx6", "mx9", "bfp16")
#: Keys of a specification that are integers, by its qscheme.
_INTEGER_KEYS = {
    "per_channel": ("ch_axis",),
    "per_group": ("ch_axis", "group_size"),
}
_ALGORITHMS = [
    "rotation",
    "quarot",
    "smooth",
    "autosmoothquant",
    "awq",
    "gptq",
    "gptaq",
    "qronos",
    "svdquant",
]
_ALGORITHMS += ["twobitscalar"]
_HERE = "quantization_config"


def quark_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:  # noqa: C901
    """Yield errors of amd-quark's QConfig."""
    config = QuarkConfig(checkpoint.quantization)
    for key in TOP_KEYS:
        if key not in config.entries:
            yield broken("quark-key", f"{_HERE}.{key}", "there is no such key")
    extra = [key for key in config.export if key not in EXPORT_KEYS]
    if extra:
        yield broken(
            "quark-export-keys",
            f"{_HERE}.export",
            f"it has {', '.join(map(repr, extra))}",
        )
    if config.export.get("weight_format") == "fake_quantized":
        packed = any(
            str(spec.get("dtype")) in INTEGERS
            for spec in stages(config.fallback.get("weight"))
        )
        severity = REFUSED if packed else WRONG
        yield broken(
            "quark-fake",
            f"{_HERE}.export.weight_format",
            "'fake_quantized': the weights are floats",
            severity,
        )
    for layer_class in object_of(config.entries.get("layer_type_quant_config")):
        if layer_class not in ("Linear", "Conv2d", "ConvTranspose2d"):
            yield broken(
                "quark-layer-class",
                f"{_HERE}.layer_type_quant_config",
                f"it names {layer_class!r}",
            )
    algorithms = config.entries.get("algo_config") or []
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        name = algorithm.get("name") if isinstance(algorithm, dict) else algorithm
        if name not in _ALGORITHMS:
            yield broken(
                "quark-algorithm",
                f"{_HERE}.algo_config",
                f"it names {name!r}",
            )
    for spec in stages(config.entries.get("softmax_quant_spec")):
        yield broken(
            "quark-softmax",
            f"{_HERE}.softmax_quant_spec",
            describe({"weight": spec}),
        )
    for place, layer in _layers(config):
        yield from _layer_findings(place, layer)


def quark_layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:  # noqa: C901
    """Yield missing tensors, and tensors that are misread silently."""
    config = QuarkConfig(checkpoint.quantization)
    experts = sorted(
        {module.experts for module in checkpoint.modules.values() if module.experts},
    )
    if experts:
        yield broken("quark-mixture", experts[0], f"{len(experts)} layers have experts")
    for module in checkpoint.modules.values():
        if not (module.is_linear or (module.is_head and module.weight is not None)):
            continue
        if config.excludes(module.name):
            if module.is_quantized:
                yield broken(
                    "excluded-quantized",
                    module.name,
                    f"it is excluded, and its weight is {module.weight}",
                )
            continue
        layer = config.layer(module.name)
        weights = stages(layer.get("weight"))
        if module.is_quantized or any(spec.get("dtype") in _CASTS for spec in weights):
            yield from _unloadable(module, weights)
        if (
            not weights
            or weights[0].get("dtype") in _CASTS
            or config.export.get("weight_format") == "fake_quantized"
        ):
            continue
        if not module.is_quantized:
            if not module.is_router:  # routers are no Linear in transformers
                yield broken(
                    "float-included",
                    module.name,
                    f"its weight is {module.weight}, not {describe(layer)}",
                )
            continue
        if len(weights) > 1:
            yield broken("quark-two-stages", module.name, describe(layer))
        yield from tensor_findings(checkpoint, module, layer, kv_slots(config, module))
    yield from kv_scale_findings(checkpoint, config)
    yield from attention_findings(checkpoint, config)


def _unloadable(module: Module, weights: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield schemes that amd-quark 0.13 cannot load, by tests of every scheme."""
    for spec in weights:
        dtype, qscheme = str(spec.get("dtype")), spec.get("qscheme")
        fp8_groups = dtype.startswith("fp8") and qscheme == "per_group"
        if dtype in _CASTS or dtype.endswith("int3") or fp8_groups:
            yield broken("quark-weight", module.name, describe({"weight": spec}))
    group = weights[0].get("group_size") if weights else None
    two_bits = (
        bool(weights)
        and str(weights[0].get("dtype")).endswith("int2")
        and weights[0]["qscheme"] == "per_group"
    )
    weight = module.weight
    if (
        two_bits
        and weight is not None
        and type(group) is int
        and group > 0
        and weight.shape[0] % group
    ):
        yield broken(
            "group-divides",
            module.name,
            f"groups of {group}, and {weight.shape[0]} inputs",
        )


def quark_schemes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the number formats of every quantized layer."""
    config = QuarkConfig(checkpoint.quantization)
    for module in checkpoint.modules.values():
        if module.is_linear and module.is_quantized:
            yield describe(config.layer(module.name))


def _layers(config: QuarkConfig) -> Iterator[tuple[str, Any]]:
    entries = config.entries
    if "global_quant_config" in entries:
        yield f"{_HERE}.global_quant_config", entries["global_quant_config"]
    for key in (
        "layer_quant_config",
        "layer_type_quant_config",
        "kv_cache_quant_config",
    ):
        for name, layer in object_of(entries.get(key)).items():
            yield f"{_HERE}.{key}[{name!r}]", layer


def _layer_findings(place: str, layer: Any) -> Iterator[Finding]:
    if not isinstance(layer, dict):
        yield broken("quark-key", place, f"it is {layer!r} where an object should be")
        return
    for key in LAYER_KEYS:
        if key not in layer:
            yield broken("quark-key", f"{place}.{key}", "there is no such key")
        for number, spec in enumerate(stages(layer.get(key))):
            which = f"[{number}]" if isinstance(layer[key], list) else ""
            yield from _tensor_findings(f"{place}.{key}{which}", spec)


def _tensor_findings(place: str, spec: dict[str, Any]) -> Iterator[Finding]:  # noqa: C901
    missing = [key for key in TENSOR_KEYS if key not in spec]
    for key in missing:
        yield broken("quark-key", f"{place}.{key}", "there is no such key")
    dtype, qscheme = spec.get("dtype"), spec.get("qscheme")
    if dtype not in _TYPES:
        yield broken("quark-type", f"{place}.dtype", repr(dtype))
        return
    if dtype in _UNSCALED:
        return
    if qscheme not in (*OBSERVERS, "per_block"):
        yield broken("quark-type", f"{place}.qscheme", repr(qscheme))
        return
    observer = spec.get("observer_cls")
    if (
        "observer_cls" in spec
        and qscheme in OBSERVERS
        and observer not in OBSERVERS[qscheme]
    ):
        yield broken(
            "quark-observer",
            f"{place}.observer_cls",
            f"{observer!r}, with {qscheme}",
        )
    if dtype in INTEGERS:
        for key in ("round_method", "scale_type", "symmetric"):
            if spec.get(key) is None and key not in missing:
                yield broken(
                    "quark-integer",
                    f"{place}.{key}",
                    f"there is none, and the type is {dtype}",
                )
    for key in _INTEGER_KEYS.get(str(qscheme), ()):
        if key in spec and type(spec[key]) is not int:
            yield broken(
                "quark-type",
                f"{place}.{key}",
                f"{spec[key]!r}, with {qscheme}",
            )
