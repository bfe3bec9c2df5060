"""Checks of AMD Quark's layout for vLLM: configuration, then schemes by layer."""

from __future__ import annotations

from collections.abc import Container, Iterator
from fnmatch import filter as fnmatch_filter
from functools import partial
from typing import Any

from quark_onnx.torch.validate.cache_in_vllm import cache_findings
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import (
    NO_KEY_OR_NULL,
    QUANTIZATION,
    FieldCheck,
    field_findings,
    is_names,
    is_object,
    meets,
    object_of,
    one_of,
    shown,
)
from quark_onnx.torch.validate.finding import REFUSED, WARNING, WRONG, Finding
from quark_onnx.torch.validate.layer_checks import (
    OPTIONAL_SCALE,
    SCALE,
    PackedOutputs,
    Slots,
    block_findings,
    cache_slots,
    excluded_findings,
    global_scale_findings,
    packed_output_findings,
    quantized_findings,
    slot_findings,
)
from quark_onnx.torch.validate.modules import Module, fused, fused_parts
from quark_onnx.torch.validate.name_patterns import is_expression, is_glob, is_regular
from quark_onnx.torch.validate.quark_config import (
    Layer,
    QuarkConfig,
    different,
    listed,
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

#: Families whose routers vLLM quantizes like other layers, unless they are excluded.
_QUANTIZED_ROUTERS = ("dbrx", "lfm2_moe", "qwen3_moe")
#: The scale of the probabilities of an attention.
_PROBABILITIES = "prob_output_scale"
#: Layers that each attention has one of.
_QUERIES = ("q_proj", "qkv_proj", "query_key_value")
#: vLLM initializes the scales with -1.0, and takes 1.0 where no tensor has replaced that
#: (``BaseKVCacheMethod`` in kv_cache.py).
_ONE = "there is no such tensor; 1.0 is taken"


def quark_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of vLLM in the configuration.

    Args:
        checkpoint: a checkpoint of amd-quark; its tensors give the names that patterns match.
    """
    config = QuarkConfig(checkpoint.quantization)
    entries = config.entries
    # the order of ``QuarkConfig.from_config``: the export and the cache before the layers
    yield from _export_findings(config)
    yield from field_findings(
        entries,
        QUANTIZATION,
        FieldCheck("quark-exclude", "exclude", is_names, absent=NO_KEY_OR_NULL),
    )
    for pattern in config.exclude:
        yield from _pattern_findings(checkpoint, pattern)
    types = "layer_type_quant_config"
    yield from field_findings(
        entries,
        QUANTIZATION,
        FieldCheck("quark-layer-types", types, is_object, absent=NO_KEY_OR_NULL),
    )
    # vLLM looks the class itself up in this object, whose keys are strings: none is ever found
    ignored = object_of(entries.get(types))
    if ignored:
        text = f"it names {', '.join(ignored)}"
        yield broken("quark-layer-types-ignored", f"{QUANTIZATION}.{types}", text)
    yield from _form_findings(config)
    if not config.fallback:
        place = f"{QUANTIZATION}.global_quant_config"
        yield broken("quark-key", place, "there is no such object")
    # an entry may be for all experts of a block, which vLLM looks up as one module
    names = {*checkpoint.modules, *checkpoint.experts} - {""}
    for pattern in config.overrides:
        # entries by name are mostly those of layers
        if pattern in names:
            continue
        if not any(overrides_in_vllm(pattern, name) for name in names):
            place = f"{QUANTIZATION}.layer_quant_config"
            yield broken("quark-pattern", place, f"{pattern!r} matches no layer")


def _export_findings(config: QuarkConfig) -> Iterator[Finding]:
    """Yield errors in the settings of the export."""
    place = f"{QUANTIZATION}.export"
    rule, absent = "quark-export", NO_KEY_OR_NULL
    export = FieldCheck(rule, "export", is_object, absent=absent)
    problems = [*field_findings(config.entries, QUANTIZATION, export)]
    # the checks below read keys that the first ones demand
    if not problems:
        group = FieldCheck(rule, "kv_cache_group", is_names, absent=absent)
        problems = [*field_findings(config.export, place, group)]
    if problems:
        yield from problems
        return
    methods = one_of("reorder", "order")
    yield from field_findings(
        config.export, place, FieldCheck(rule, "pack_method", methods, absent=absent)
    )
    if config.is_fake:
        text = "'fake_quantized': the weights are floats"
        yield broken("quark-fake", f"{place}.weight_format", text)
    if not config.kv_patterns:
        return
    layers = [*config.kv_layers.values()]
    if not layers:
        text = f"no name in layer_quant_config matches {config.kv_patterns}"
        yield broken("quark-kv", f"{place}.kv_cache_group", text)
    # vLLM raises the first of these errors; the others would follow from it
    elif problem := _cache_problem(layers):
        yield broken("quark-kv", f"{QUANTIZATION}.layer_quant_config", problem)


def _cache_problem(layers: list[Layer]) -> str:
    """Return what keeps vLLM from an fp8 cache, by the layers of keys and values, or ""."""
    # vLLM indexes the key, and raises a KeyError without it
    if not all("output_tensors" in layer for layer in layers):
        return "a layer of the KV cache lacks output_tensors"
    # one cache holds all layers, so that vLLM demands one specification
    first = layers[0]["output_tensors"]
    if not all(same(layer["output_tensors"], first) for layer in layers):
        return "layers of the KV cache differ in output_tensors"
    spec = object_of(first)
    if meets(spec, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}):
        return ""
    return f"output_tensors are {spec.get('dtype')}, {spec.get('qscheme')}"


def _pattern_findings(checkpoint: Checkpoint, pattern: str) -> Iterator[Finding]:
    """Yield an entry of exclude that vLLM reads otherwise than amd-quark."""
    place = f"{QUANTIZATION}.exclude"
    # vLLM compiles the expression when it creates the first layer
    if is_expression(pattern) and not is_regular(pattern[3:]):
        yield broken("quark-exclude", place, f"{pattern!r} is no regular expression")
    # amd-quark writes patterns that users gave; vLLM compares the pattern as an exact name
    if is_glob(pattern):
        names = fnmatch_filter(checkpoint.modules, pattern)
        # vLLM creates quantized layers for float weights: values are cast to codes without a scale
        modules = [checkpoint.modules[name] for name in names]
        has_floats = any(
            module.is_linear and not module.is_quantized for module in modules
        )
        text = f"{pattern!r} means {len(names)} layers"
        severity = WRONG if has_floats else WARNING
        yield broken("quark-exclude-glob", place, text, severity)


def _form_findings(config: QuarkConfig) -> Iterator[Finding]:
    """Yield malformed configurations of layers, or malformed specifications."""
    layers = config.entries.get("layer_quant_config")
    if not isinstance(layers, dict | None):
        yield broken("malformed", f"{QUANTIZATION}.layer_quant_config", shown(layers))
    entries: dict[str, Any] = {"global_quant_config": config.fallback}
    for name, entry in object_of(layers).items():
        entries[f"layer_quant_config.{name}"] = entry
    for name, entry in entries.items():
        place = f"{QUANTIZATION}.{name}"
        if isinstance(entry, dict):
            yield from field_findings(
                entry,
                place,
                FieldCheck("malformed", "weight", _has_stages),
                FieldCheck("malformed", "input_tensors", _has_stages),
            )
        else:
            found = NO_KEY_OR_NULL if entry is None else shown(entry)
            yield broken("malformed", place, found)


def _has_stages(spec: object) -> bool:
    """Return whether a specification is null, an object or a list of objects."""
    # stages drops entries that are no objects, so that fewer stages than entries are a sign of them
    return spec is None or len(stages(spec)) == len(listed(spec))


def quark_layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of vLLM in the layers and their tensors."""
    config = QuarkConfig(checkpoint.quantization)
    for name, modules in fused(checkpoint.modules).items():
        fused_name, _ = fused_parts(modules[0], checkpoint.modules)
        if not config.excludes_fused(fused_name):
            yield from _fused_findings(config, name, modules)
    yield from block_findings(checkpoint, partial(_rows_of_blocks, config))
    yield from packed_output_findings(checkpoint, partial(_packed_outputs, config))
    # the greatest scale of inputs clips none of them
    yield from global_scale_findings(checkpoint, "weight_scale_2")
    # vLLM creates the routers of other families without a quantization config
    has_routers = checkpoint.config.get("model_type") in _QUANTIZED_ROUTERS
    for module in checkpoint.linears:
        if has_routers or module.is_quantized or not module.is_router:
            yield from _layer_findings(checkpoint, config, module)
    yield from cache_findings(checkpoint, config)
    yield from attention_findings(checkpoint, config)


def _fused_findings(
    config: QuarkConfig, common_name: str, modules: list[Module]
) -> Iterator[Finding]:
    """Yield partially excluded fused layers, or fused layers with different configurations.

    The experts of a block are fused as well.
    """
    # by the shell patterns of amd-quark or the regular expressions of vLLM
    names = [module.name for module in modules]
    excluded = [name for name in names if config.excludes(name)]
    if excluded:
        if len(excluded) < len(modules):
            text = f"only {', '.join(excluded)} is excluded"
            yield broken("shards-excluded", common_name, text)
        return
    first, *others = modules
    # of experts, that of the module whose name stands for all of them
    layer = config.layer_in_vllm(first)
    if first.experts:
        differ = [name for name in names if not same(config.layer(name), layer)]
        if differ:
            text = (
                f"{len(differ)} of {len(modules)} experts have a configuration of their"
                f" own, as {differ[0]}"
            )
            yield broken("quark-experts-differ", common_name, text)
        return
    for other in others:
        other_layer = config.layer_in_vllm(other)
        if not same(other_layer, layer):
            text = f"{first.last}: {describe(layer)}; {other.last}: {describe(other_layer)}"
            # equal in a few words: the difference is in another key, such as the observer
            if describe(layer) == describe(other_layer):
                keys = ", ".join(_differing_keys(layer, other_layer))
                text = f"the configurations differ in {keys}"
            yield broken("quark-shards-differ", common_name, text)


def _differing_keys(first: Layer, second: Layer) -> list[str]:
    """Return the differing keys of two configurations, with those of single stages."""
    differ = list[str]()
    for key in different(first, second):
        one, other = stages(first.get(key)), stages(second.get(key))
        # keys of single stages can be named; lists of stages differ as a whole
        if len(one) == len(other) == 1:
            differ += [f"{key}.{name}" for name in different(one[0], other[0])]
    return differ or different(first, second)


def _rows_of_blocks(config: QuarkConfig, module: Module) -> object:
    """Return the number of outputs of the fp8 blocks of a layer; None if it has no blocks."""
    for spec in stages(config.layer_in_vllm(module).get("weight")):
        # MX formats have blocks of 32 inputs, which vLLM does not check
        if meets(spec, {"qscheme": "per_block", "block_size": [128, 128]}):
            return 128
    return None


def _packed_outputs(config: QuarkConfig, module: Module) -> PackedOutputs | None:
    """Return the packed outputs of a layer with int4 in groups; None for any other layer."""
    layer, weight = config.layer_in_vllm(module), module.matrix
    if not group_of(layer) or weight.dtype != "I32":
        return None
    placed = slots_of(layer, weight, module.tensors.get("weight_scale"))
    # experts with int4 in groups have no scheme, which is another finding
    if placed is None or module.experts:
        return None
    # codes and zero points are both packed along the outputs
    (outputs, _), _ = placed
    return PackedOutputs(outputs, 4, "outputs")


def _layer_findings(
    checkpoint: Checkpoint, config: QuarkConfig, module: Module
) -> Iterator[Finding]:
    """Yield errors in the configuration of a Linear layer, and then in its tensors."""
    stored = f"its weight is {module.weight}"
    scales = [name for name in module.tensors if "scale" in name]
    if scales:
        stored += f" with {', '.join(scales)}"
    fused_name, _ = fused_parts(module, checkpoint.modules)
    # a pattern of amd-quark means a float layer in the file, even where vLLM does not read it
    if config.excludes(module.name) or config.excludes_in_vllm(module, fused_name):
        yield from excluded_findings(module, f"it is excluded, and {stored}")
        return
    layer = config.layer_in_vllm(module)
    # outputs for the KV cache are removed by ``layer_in_vllm``
    for key in ("output_tensors", "bias"):
        if layer.get(key):
            yield broken("quark-outputs", module.name, f"{key} is {shown(layer[key])}")
    name, why = scheme_in_vllm(layer, config.pack_method, bool(module.experts))
    if not name:
        yield broken("quark-scheme", module.name, f"{describe(layer)}: {why}")
    elif config.is_fake:
        # the weights are floats, whatever the scheme says
        return
    elif module.is_quantized:
        yield from tensor_findings(checkpoint, module, layer, cache_slots(module))
    else:
        # a float weight fits into a parameter of its own shape, and is cast; a packed shape raises
        packed = ("4", "fp6_e3m2", "fp6_e2m3")  # "4" stands for int4, uint4 and fp4
        dtypes = [str(spec.get("dtype")) for spec in stages(layer.get("weight"))]
        is_packed = any(dtype.endswith(packed) for dtype in dtypes)
        text = f"{stored}; the configuration says {name}"
        severity = REFUSED if is_packed else WRONG
        yield broken("float-included", module.name, text, severity)


def quark_schemes_in_vllm(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the scheme of every quantized layer."""
    config = QuarkConfig(checkpoint.quantization)
    for module in checkpoint.quantized_linears:
        layer = config.layer_in_vllm(module)
        # a layer without a scheme is named by its number formats
        name, _ = scheme_in_vllm(layer, config.pack_method, bool(module.experts))
        yield name or describe(layer)


def tensor_findings(
    checkpoint: Checkpoint, module: Module, layer: Layer, extra: Slots
) -> Iterator[Finding]:
    """Yield errors in the tensors of a quantized layer, by its configuration.

    Args:
        checkpoint: the checkpoint.
        module: the layer, which has a weight.
        layer: configuration of the layer, of which the weight and the inputs are read.
        extra: slots in addition to those of the number formats, such as scales of the KV cache.
    """
    placed = slots_of(layer, module.matrix, module.tensors.get("weight_scale"))
    # a number format without a layout is a finding of the scheme
    if placed is not None:
        size, slots = placed
        yield from quantized_findings(
            checkpoint, module, size, {**slots, **extra}, group_of(layer)
        )


def kv_slots(config: QuarkConfig, module: Module) -> Slots:
    """Return the scale of a layer whose output is the KV cache or queries; empty for others."""
    # scales of queries come with quantized attention, even where no entry names the queries
    queries = module.last == "q_proj" and config.rounds_attention
    if not (queries or config.is_cached(module)):
        return {}
    return {"output_scale": OPTIONAL_SCALE}


def kv_scale_findings(checkpoint: Checkpoint, config: QuarkConfig) -> Iterator[Finding]:
    """Yield layers that lack the scale of their output for the KV cache."""
    for module in checkpoint.modules.values():
        if module.last != "q_proj" and _lacks_output_scale(config, module):
            yield broken("kv-scales-missing", f"{module.name}.output_scale", _ONE)


def _lacks_output_scale(config: QuarkConfig, module: Module) -> bool:
    return config.is_cached(module) and "output_scale" not in module.tensors


def attention_findings(
    checkpoint: Checkpoint, config: QuarkConfig
) -> Iterator[Finding]:
    """Yield non-scalar scales of probabilities, and missing attention scales."""
    scaled = checkpoint.modules_with(_PROBABILITIES)
    for module in scaled.values():
        # the other tensors of the module have rules of their own
        alone = {_PROBABILITIES: module.tensors[_PROBABILITIES]}
        yield from slot_findings(Module(module.name, alone), {_PROBABILITIES: SCALE})
    # without quantized probabilities the scales are not needed
    if config.rounds_attention:
        for module in checkpoint.linears:
            yield from _missing_attention_findings(config, module, scaled)


def _missing_attention_findings(
    config: QuarkConfig, module: Module, scaled: Container[str]
) -> Iterator[Finding]:
    """Yield missing scales of quantized attention, for a layer of queries.

    The attention modules in ``scaled`` have a scale of probabilities.
    """
    if module.last in _QUERIES and module.parent not in scaled:
        place = f"{module.parent}.{_PROBABILITIES}"
        yield broken("attention-scales-missing", place, _ONE)
    is_query = module.last == "q_proj" and not config.excludes(module.name)
    if is_query and _lacks_output_scale(config, module):
        place = f"{module.name}.output_scale"
        yield broken("attention-scales-missing", place, _ONE)
