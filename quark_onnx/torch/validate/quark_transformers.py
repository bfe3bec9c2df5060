"""Checks of AMD Quark's layout for transformers with amd-quark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import (
    QUANTIZATION,
    FieldCheck,
    field_findings,
    is_given,
    is_integer,
    is_positive,
    missing_key_findings,
    object_of,
    one_of,
)
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.layer_checks import excluded_findings, included_findings
from quark_onnx.torch.validate.modules import Module
from quark_onnx.torch.validate.quark_config import QuarkConfig, listed, stages
from quark_onnx.torch.validate.quark_schemes import describe
from quark_onnx.torch.validate.quark_vllm import (
    attention_findings,
    kv_scale_findings,
    kv_slots,
    tensor_findings,
)
from quark_onnx.torch.validate.rules import broken

_TOP_KEYS = (
    "global_quant_config",
    "layer_quant_config",
    "layer_type_quant_config",
    "exclude",
)
#: ``QLayerConfig.from_dict`` of amd-quark indexes its keys, so that a missing key is a KeyError.
LAYER_KEYS = ("weight", "input_tensors", "output_tensors", "bias")
_TENSOR_KEYS = (
    "dtype",
    "is_dynamic",
    "qscheme",
    "ch_axis",
    "group_size",
    "symmetric",
    "observer_cls",
)
#: amd-quark passes the object as keyword arguments, so that another key is a TypeError.
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
    "bfloat16",
    "float16",
    "fp8_e5m2",
    "fp8_e4m3",
    "fp8_e5m3",
    "fp6_e3m2",
    "fp6_e2m3",
    "fp4",
    "mx",
    "mx6",
    "mx9",
    "bfp16",
)
#: Formats without a separate scale, and without an observer.
_CASTS = ("bfloat16", "float16")
_UNSCALED = (*_CASTS, "mx", "mx6", "mx9", "bfp16")
_ALGORITHMS = (
    "rotation",
    "quarot",
    "smooth",
    "autosmoothquant",
    "awq",
    "gptq",
    "gptaq",
    "qronos",
    "svdquant",
    "twobitscalar",
)
_LAYER_CLASSES = ("Linear", "Conv2d", "ConvTranspose2d")
#: Keys of objects with the configurations of layers, by name, class or pattern.
_LAYERS_BY_NAME = (
    "layer_quant_config",
    "layer_type_quant_config",
    "kv_cache_quant_config",
)


def quark_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of amd-quark's QConfig."""
    config = QuarkConfig(checkpoint.quantization)
    entries = config.entries
    yield from missing_key_findings(entries, QUANTIZATION, "quark-key", *_TOP_KEYS)
    # missing keys have defaults
    extra = [key for key in config.export if key not in EXPORT_KEYS]
    if extra:
        text = f"it has {', '.join(map(repr, extra))}"
        yield broken("quark-export-keys", f"{QUANTIZATION}.export", text)
    if config.is_fake:
        # amd-quark unpacks integers of any width, also where floats are stored
        specs = stages(config.fallback.get("weight"))
        place = f"{QUANTIZATION}.export.weight_format"
        text = "'fake_quantized': the weights are floats"
        has_integers = any(spec.get("dtype") in INTEGERS for spec in specs)
        severity = REFUSED if has_integers else WRONG
        yield broken("quark-fake", place, text, severity)
    # null or a list is no object, and has a finding of vLLM's rules alone
    classes = object_of(entries.get("layer_type_quant_config"))
    unknown = [name for name in classes if name not in _LAYER_CLASSES]
    for layer_class in unknown:
        place = f"{QUANTIZATION}.layer_type_quant_config"
        yield broken("quark-layer-class", place, f"it names {layer_class!r}")
    for algorithm in listed(entries.get("algo_config") or []):
        # an algorithm is an object with a name; older files have the name itself
        name = algorithm.get("name") if isinstance(algorithm, dict) else algorithm
        if name not in _ALGORITHMS:
            place = f"{QUANTIZATION}.algo_config"
            yield broken("quark-algorithm", place, f"it names {name!r}")
    # transformers does not build AMD Quark's attention
    for spec in stages(entries.get("softmax_quant_spec")):
        place = f"{QUANTIZATION}.softmax_quant_spec"
        yield broken("quark-softmax", place, describe({"weight": spec}))
    if "global_quant_config" in entries:
        place = f"{QUANTIZATION}.global_quant_config"
        yield from _layer_findings(place, entries["global_quant_config"])
    for key in _LAYERS_BY_NAME:
        for name, layer in object_of(entries.get(key)).items():
            yield from _layer_findings(f"{QUANTIZATION}.{key}[{name!r}]", layer)


def _layer_findings(place: str, layer: Any) -> Iterator[Finding]:
    """Yield errors in the configuration of a layer and in its specifications."""
    if not isinstance(layer, dict):
        yield broken("quark-key", place, f"it is {layer!r} where an object should be")
        return
    for key in LAYER_KEYS:
        yield from missing_key_findings(layer, place, "quark-key", key)
        for number, spec in enumerate(stages(layer.get(key))):
            # a single stage has no number in the file
            which = f"[{number}]" if isinstance(layer[key], list) else ""
            yield from _spec_findings(f"{place}.{key}{which}", spec)


_TYPE_CHECK = FieldCheck("quark-type", "dtype", one_of(*_TYPES))
_QSCHEME_CHECK = FieldCheck("quark-type", "qscheme", one_of(*OBSERVERS, "per_block"))
_NONE_OF_INTEGERS = "there is none, and the type is {dtype}"
_INTEGER_CHECKS = (
    FieldCheck("quark-integer", "round_method", is_given, _NONE_OF_INTEGERS),
    FieldCheck("quark-integer", "scale_type", is_given, _NONE_OF_INTEGERS),
    FieldCheck("quark-integer", "symmetric", is_given, _NONE_OF_INTEGERS),
)
_AXIS = FieldCheck("quark-type", "ch_axis", is_integer, "{ch_axis!r}, with {qscheme}")
_GROUP = FieldCheck(
    "quark-type", "group_size", is_integer, "{group_size!r}, with {qscheme}"
)
_SIZE_CHECKS = {"per_channel": (_AXIS,), "per_group": (_AXIS, _GROUP)}


def _spec_findings(place: str, spec: dict[str, Any]) -> Iterator[Finding]:
    """Yield errors in a specification; each kind of problem hides the later ones."""
    yield from missing_key_findings(spec, place, "quark-key", *_TENSOR_KEYS)
    # other fields mean nothing without a known type, nor without a known qscheme
    problems = [*field_findings(spec, place, _TYPE_CHECK)]
    if not problems and spec["dtype"] not in _UNSCALED:
        problems = [*field_findings(spec, place, _QSCHEME_CHECK)]
        problems = problems or [*_scaled_findings(place, spec)]
    yield from problems


def _scaled_findings(place: str, spec: dict[str, Any]) -> Iterator[Finding]:
    """Yield errors in the fields of a known type and qscheme."""
    qscheme = spec["qscheme"]
    checks = list[FieldCheck]()
    # per_block has no list of observers
    if qscheme in OBSERVERS:
        observers = one_of(*OBSERVERS[qscheme])
        text = "{observer_cls!r}, with {qscheme}"
        checks.append(FieldCheck("quark-observer", "observer_cls", observers, text))
    if spec["dtype"] in INTEGERS:
        checks += _INTEGER_CHECKS
    checks += _SIZE_CHECKS.get(qscheme, ())
    for check in checks:
        # required keys that are missing have their own finding
        if check.key in spec or check.key not in _TENSOR_KEYS:
            yield from field_findings(spec, place, check)


def quark_layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield missing tensors, and tensors that are misread silently."""
    config = QuarkConfig(checkpoint.quantization)
    # transformers holds the experts of a block in fused tensors, and does not find single experts
    experts = checkpoint.experts
    if experts:
        yield broken("quark-mixture", experts[0], f"{len(experts)} layers have experts")
    for module in checkpoint.matrices:
        if module.weight is not None:
            yield from _module_findings(checkpoint, config, module)
    yield from kv_scale_findings(checkpoint, config)
    yield from attention_findings(checkpoint, config)


def _module_findings(
    checkpoint: Checkpoint, config: QuarkConfig, module: Module
) -> Iterator[Finding]:
    """Yield errors in the scheme and the tensors of a layer with a weight."""
    stored = f"its weight is {module.weight}"
    # amd-quark leaves the layer as it is, with a float weight
    if config.excludes(module.name):
        yield from excluded_findings(module, f"it is excluded, and {stored}")
        return
    layer = config.layer(module.name)
    weights = stages(layer.get("weight"))
    casts = [spec.get("dtype") in _CASTS for spec in weights]
    # a cast has no scale, so that the file shows no sign of it
    if module.is_quantized or any(casts):
        yield from _unloadable_findings(module, weights)
    # float weights are right here
    if not weights or casts[0] or config.is_fake:
        return
    # routers are no Linear in transformers
    yield from included_findings(module, f"{stored}, not {describe(layer)}")
    if module.is_quantized:
        # transformers renames the scale of the first stage only
        if len(weights) > 1:
            yield broken("quark-two-stages", module.name, describe(layer))
        yield from tensor_findings(checkpoint, module, layer, kv_slots(config, module))


def _unloadable_findings(
    module: Module, weights: list[dict[str, Any]]
) -> Iterator[Finding]:
    """Yield schemes that amd-quark 0.13 cannot load, by tests of every scheme."""
    for spec in weights:
        dtype = spec.get("dtype")
        is_group = spec.get("qscheme") == "per_group"
        # "int3" and "uint3" have no packing in amd-quark 0.13
        is_unpacked = dtype in _CASTS or str(dtype).endswith("int3")
        if is_unpacked or (is_group and str(dtype).startswith("fp8")):
            yield broken("quark-weight", module.name, describe({"weight": spec}))
    first = weights[0] if weights else {}
    group = first.get("group_size")
    is_two_bits = str(first.get("dtype")).endswith("int2")
    if is_two_bits and first.get("qscheme") == "per_group" and is_positive(group):
        # packed weights in groups are stored transposed, so that the first axis counts the inputs
        inputs = module.matrix.shape[0]
        if inputs % group:
            text = f"groups of {group}, and {inputs} inputs"
            yield broken("group-divides", module.name, text)


def quark_schemes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the number formats of every quantized layer."""
    config = QuarkConfig(checkpoint.quantization)
    for module in checkpoint.quantized_linears:
        yield describe(config.layer(module.name))
