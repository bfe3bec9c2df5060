"""Checks of AMD Quark's layout for vLLM: configuration, then schemes by layer."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from fnmatch import filter as fnmatch_filter
from functools import partial
from itertools import filterfalse

from quark_onnx.common.containers import names_of, subset
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
    one_of,
    shown,
)
from quark_onnx.torch.validate.finding import REFUSED, WARNING, WRONG, Finding
from quark_onnx.torch.validate.fp8_blocks import block_findings
from quark_onnx.torch.validate.global_scales import global_scale_findings
from quark_onnx.torch.validate.json_values import object_of
from quark_onnx.torch.validate.modules import (
    Module,
    excluded_findings,
    fused,
    fused_parts,
    size_of,
)
from quark_onnx.torch.validate.name_patterns import is_regular
from quark_onnx.torch.validate.packed_outputs import (
    PackedOutputs,
    packed_output_findings,
)
from quark_onnx.torch.validate.quark_config import (
    Layer,
    QuarkConfig,
    different,
    is_glob,
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
from quark_onnx.torch.validate.slots import (
    SCALE,
    Slots,
    cache_slots,
    quantized_findings,
    slot_findings,
)

#: Families whose routers vLLM quantizes like other layers, unless they are excluded.
_QUANTIZED_ROUTERS = ("dbrx", "lfm2_moe", "qwen3_moe")

#: The scale of the probabilities of an attention, and the layers that each attention has one of.
_PROBABILITIES, _QUERIES = (
    "prob_output_scale",
    ("q_proj", "qkv_proj", "query_key_value"),
)
#: vLLM initializes the scales with -1.0, and takes 1.0 where no tensor has replaced that
#: (``BaseKVCacheMethod`` in kv_cache.py).
_ONE = "there is no such tensor; 1.0 is taken"

_EXCLUDE_CHECK = FieldCheck("quark-exclude", "exclude", is_names, absent=NO_KEY_OR_NULL)
_LAYER_TYPES_CHECK = FieldCheck(
    "quark-layer-types",
    "layer_type_quant_config",
    is_object,
    absent=NO_KEY_OR_NULL,
)
_EXPORT_CHECK = FieldCheck("quark-export", "export", is_object, absent=NO_KEY_OR_NULL)
_CACHE_GROUP_CHECK = FieldCheck(
    "quark-export",
    "kv_cache_group",
    is_names,
    absent=NO_KEY_OR_NULL,
)
_EXPORT_CHECKS = (
    FieldCheck(
        "quark-export",
        "pack_method",
        one_of("reorder", "order"),
        absent=NO_KEY_OR_NULL,
    ),
    FieldCheck(
        "quark-fake",
        "weight_format",
        lambda form: form != "fake_quantized",
        "'fake_quantized': the weights are floats",
    ),
)
_LAYERS_CHECK = FieldCheck(
    "malformed",
    "layer_quant_config",
    lambda layers: isinstance(layers, dict | None),
)


def _has_stages(spec: object) -> bool:
    """Return whether a specification is null, an object or a list of objects."""
    # stages drops entries that are no objects, so that fewer stages than entries are a sign of them
    return spec is None or len(stages(spec)) == len(listed(spec))


_SPEC_CHECKS = (
    FieldCheck("malformed", "weight", _has_stages),
    FieldCheck("malformed", "input_tensors", _has_stages),
)


def quark_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of vLLM in the configuration.

    Args:
        checkpoint: a checkpoint of amd-quark; its tensors give the names that patterns match.
    """
    config = QuarkConfig(checkpoint.quantization)
    entries = config.entries
    # the order of ``QuarkConfig.from_config``: the export and the cache before the layers
    yield from _export_findings(config)
    yield from field_findings(entries, QUANTIZATION, [_EXCLUDE_CHECK])
    for pattern in config.exclude:
        yield from _pattern_findings(checkpoint, pattern)
    yield from field_findings(entries, QUANTIZATION, [_LAYER_TYPES_CHECK])
    # vLLM looks the class itself up in this object; its keys are strings, so that none is ever
    # found
    ignored = object_of(entries.get("layer_type_quant_config"))
    if ignored:
        place = f"{QUANTIZATION}.layer_type_quant_config"
        yield broken(
            "quark-layer-types-ignored", place, f"it names {', '.join(ignored)}"
        )
    yield from _form_findings(config)
    if not config.fallback:
        place = f"{QUANTIZATION}.global_quant_config"
        yield broken("quark-key", place, "there is no such object")
    yield from _override_findings(checkpoint, config)


def _override_findings(
    checkpoint: Checkpoint,
    config: QuarkConfig,
) -> Iterator[Finding]:
    """Yield entries of layer_quant_config without a layer."""
    # an entry may be for all experts of a block, which vLLM looks up as one module
    names = {*checkpoint.modules, *checkpoint.experts} - {""}
    for pattern in config.overrides:
        # entries by name are mostly those of layers
        if pattern in names:
            continue
        if not any(overrides_in_vllm(pattern, name) for name in names):
            place = f"{QUANTIZATION}.layer_quant_config"
            yield broken("quark-pattern", place, f"{pattern!r} matches no layer")


def _pattern_findings(checkpoint: Checkpoint, pattern: str) -> Iterator[Finding]:
    """Yield an entry of exclude that vLLM reads otherwise than amd-quark.

    Args:
        checkpoint: the checkpoint.
        pattern: an entry of exclude: a name, a shell pattern, or "re:" with a regular expression.
    """
    place = f"{QUANTIZATION}.exclude"
    # vLLM compiles the expression when it creates the first layer
    if pattern.startswith("re:") and not is_regular(pattern[3:]):
        yield broken("quark-exclude", place, f"{pattern!r} is no regular expression")
    # amd-quark writes patterns that users gave; vLLM compares the pattern as an exact name
    if is_glob(pattern):
        names = fnmatch_filter(checkpoint.modules, pattern)
        yield broken(
            "quark-exclude-glob",
            place,
            f"{pattern!r} means {len(names)} layers",
            _severity_of_glob(subset(checkpoint.modules, names).values()),
        )


def _severity_of_glob(modules: Iterable[Module]) -> str:
    """Return the consequence of a shell pattern in exclude.

    vLLM finds no name in it, and quantizes the float layers that amd-quark left out by it.

    Args:
        modules: the modules that the pattern matches.

    Returns:
        "wrong" if the pattern excludes a float Linear layer, else "warning".
    """
    # vLLM creates quantized layers for float weights: values are cast to codes without a scale
    for module in modules:
        if module.is_linear and not module.is_quantized:
            return WRONG
    return WARNING


def quark_layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of vLLM in the layers and their tensors."""
    config = QuarkConfig(checkpoint.quantization)
    for name, modules in fused(checkpoint.modules):
        fused_name, _ = fused_parts(modules[0], checkpoint.modules)
        if not config.excludes_fused(fused_name):
            yield from _fused_findings(config, name, modules)
    yield from block_findings(checkpoint, partial(_rows_of_blocks, config))
    yield from packed_output_findings(checkpoint, partial(_packed_outputs, config))
    # the greatest scale of inputs clips none of them
    yield from global_scale_findings(checkpoint, "weight_scale_2")
    for module in filterfalse(
        partial(_is_float_router, checkpoint), checkpoint.linears
    ):
        yield from _layer_findings(checkpoint, config, module)
    yield from cache_findings(checkpoint, config)
    yield from attention_findings(checkpoint, config)


def _rows_of_blocks(config: QuarkConfig, module: Module) -> object:
    """Return the number of outputs of the fp8 blocks of a layer; None if it has no blocks."""
    for spec in stages(config.layer_in_vllm(module).get("weight")):
        # MX formats have blocks of 32 inputs, which vLLM does not check
        if meets(spec, {"qscheme": "per_block", "block_size": [128, 128]}):
            return 128
    return None


def _packed_outputs(config: QuarkConfig, module: Module) -> PackedOutputs | None:
    """Return the packed outputs of a layer with int4 in groups; None for any other layer.

    Args:
        config: the configuration.
        module: a quantized layer.
    """
    layer = config.layer_in_vllm(module)
    weight, scale = module.weight, module.tensors.get("weight_scale")
    # experts with int4 in groups have no scheme, which is another finding
    if weight is None or not group_of(layer) or not module.has_type("I32"):
        return None
    found = slots_of(layer, weight, scale)
    if found is None or module.experts:
        return None
    # codes and zero points are both packed along the outputs
    (outputs, _), _ = found
    return PackedOutputs(outputs, 4, "outputs")


def _is_float_router(checkpoint: Checkpoint, module: Module) -> bool:
    """Return whether vLLM creates a router without a quantization config."""
    if module.is_quantized or not module.is_router:
        return False
    return checkpoint.config.get("model_type") not in _QUANTIZED_ROUTERS


def quark_schemes_in_vllm(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the scheme of every quantized layer."""
    config = QuarkConfig(checkpoint.quantization)
    for module in checkpoint.quantized_linears:
        layer = config.layer_in_vllm(module)
        # the reason is for ``_layer_findings``; a layer without a scheme is named by its number
        # formats
        name, _ = scheme_in_vllm(layer, config.pack_method, bool(module.experts))
        yield name or describe(layer)


def tensor_findings(
    checkpoint: Checkpoint,
    module: Module,
    layer: dict[str, object],
    extra: Slots,
) -> Iterator[Finding]:
    """Yield errors in the tensors of a quantized layer, by its configuration.

    Args:
        checkpoint: the checkpoint.
        module: the layer; without a weight nothing is checked.
        layer: configuration of the layer, of which the weight and the inputs are read.
        extra: slots in addition to those of the number formats, such as scales of the KV cache.
    """
    weight = module.weight
    if weight is None:
        return
    found = slots_of(layer, weight, module.tensors.get("weight_scale"))
    # a number format without a layout is a finding of the scheme
    if found is None:
        return
    size, slots = found
    demanded = size_of(module.name, checkpoint.text_config)
    # 0 stands for no groups
    group = group_of(layer)
    yield from quantized_findings(module, size, demanded, {**slots, **extra}, group)


def kv_slots(config: QuarkConfig, module: Module) -> Slots:
    """Return the scales of a layer whose output is the KV cache.

    Args:
        config: the configuration.
        module: any layer.

    Returns:
        The optional slot "output_scale"; empty for a layer that neither belongs to the cache nor
        computes the queries of quantized attention.
    """
    # scales of queries come with quantized attention, even where no entry names the queries
    queries = module.last == "q_proj" and config.rounds_attention
    if not (queries or config.is_cached(module)):
        return {}
    return {"output_scale": replace(SCALE, needed=False)}


def kv_scale_findings(checkpoint: Checkpoint, config: QuarkConfig) -> Iterator[Finding]:
    """Yield layers that lack the scale of their output for the KV cache."""
    for module in checkpoint.modules.values():
        if module.last != "q_proj" and _lacks_output_scale(config, module):
            yield broken("kv-scales-missing", f"{module.name}.output_scale", _ONE)


def _lacks_output_scale(config: QuarkConfig, module: Module) -> bool:
    return config.is_cached(module) and "output_scale" not in module.tensors


def attention_findings(
    checkpoint: Checkpoint,
    config: QuarkConfig,
) -> Iterator[Finding]:
    """Yield non-scalar scales of probabilities, and missing attention scales."""
    scaled = checkpoint.modules_with(_PROBABILITIES)
    for module in scaled.values():
        # the other tensors of the module have rules of their own
        alone = subset(module.tensors, [_PROBABILITIES])
        yield from slot_findings(Module(module.name, alone), {_PROBABILITIES: SCALE})
    # without quantized probabilities the scales are not needed
    if config.rounds_attention:
        for module in checkpoint.linears:
            yield from _missing_attention_findings(config, module, scaled)


def _missing_attention_findings(
    config: QuarkConfig,
    module: Module,
    scaled: Container[str],
) -> Iterator[Finding]:
    """Yield missing scales of quantized attention, for a layer of queries.

    Args:
        config: the configuration.
        module: a layer.
        scaled: names of the attention modules with a scale of probabilities.
    """
    if module.last in _QUERIES and module.parent not in scaled:
        place = f"{module.parent}.{_PROBABILITIES}"
        yield broken("attention-scales-missing", place, _ONE)
    is_query = module.last == "q_proj" and not config.excludes(module.name)
    if is_query and _lacks_output_scale(config, module):
        place = f"{module.name}.output_scale"
        yield broken("attention-scales-missing", place, _ONE)


def _export_findings(config: QuarkConfig) -> Iterator[Finding]:
    """Yield errors in the settings of the export."""
    place = f"{QUANTIZATION}.export"
    problems = [*field_findings(config.entries, QUANTIZATION, [_EXPORT_CHECK])]
    # the checks below read keys that the first ones demand
    if not problems:
        problems = [*field_findings(config.export, place, [_CACHE_GROUP_CHECK])]
    yield from problems
    if not problems:
        yield from field_findings(config.export, place, _EXPORT_CHECKS)
        yield from _cache_group_findings(config)


def _cache_group_findings(config: QuarkConfig) -> Iterator[Finding]:
    """Yield obstacles to the fp8 cache of an export in vLLM."""
    if not config.kv_patterns:
        return
    layers = [*config.kv_layers.values()]
    if not layers:
        text = f"no name in layer_quant_config matches {config.kv_patterns}"
        yield broken("quark-kv", f"{QUANTIZATION}.export.kv_cache_group", text)
    # vLLM raises the first of these errors; the others would follow from it
    elif problem := _cache_problem(layers):
        yield broken("quark-kv", f"{QUANTIZATION}.layer_quant_config", problem)


def _cache_problem(layers: list[Layer]) -> str:
    """Return what keeps vLLM from an fp8 cache, by the layers of keys and values, or "".

    Args:
        layers: configurations of the layers for keys and values; at least one.

    Returns:
        The text of a finding; empty if vLLM accepts the cache.
    """
    # vLLM indexes the key, and raises a KeyError without it
    for layer in layers:
        if "output_tensors" not in layer:
            return "a layer of the KV cache lacks output_tensors"
    first = layers[0]["output_tensors"]
    # one cache holds all layers, so that vLLM demands one specification
    for layer in layers:
        if not same(layer["output_tensors"], first):
            return "layers of the KV cache differ in output_tensors"
    spec = object_of(first)
    if meets(spec, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}):
        return ""
    return f"output_tensors are {spec.get('dtype')}, {spec.get('qscheme')}"


def _form_findings(config: QuarkConfig) -> Iterator[Finding]:
    """Yield malformed entries."""
    yield from field_findings(config.entries, QUANTIZATION, [_LAYERS_CHECK])
    yield from _entry_findings("global_quant_config", config.fallback)
    for name, entry in object_of(config.entries.get("layer_quant_config")).items():
        yield from _entry_findings(f"layer_quant_config.{name}", entry)


def _entry_findings(name: str, entry: object) -> Iterator[Finding]:
    """Yield a malformed configuration of a layer, or malformed specifications."""
    place = f"{QUANTIZATION}.{name}"
    if isinstance(entry, dict):
        yield from field_findings(entry, place, _SPEC_CHECKS)
    else:
        yield broken("malformed", place, _short(entry))


def _fused_findings(
    config: QuarkConfig,
    name: str,
    modules: list[Module],
) -> Iterator[Finding]:
    """Yield partially excluded fused layers, or fused layers with different configurations.

    Args:
        config: the configuration.
        name: common name of the fused layers, for findings.
        modules: the layers that vLLM fuses, or the experts of a block; at least one.
    """
    # by the shell patterns of amd-quark or the regular expressions of vLLM
    excluded = list(filter(config.excludes, names_of(modules)))
    if not excluded and modules[0].experts:
        yield from _expert_findings(config, name, modules)
    elif not excluded:
        yield from _shard_findings(config, name, modules)
    elif len(excluded) < len(modules):
        text = f"only {', '.join(excluded)} is excluded"
        yield broken("shards-excluded", name, text)


def _expert_findings(
    config: QuarkConfig,
    name: str,
    modules: list[Module],
) -> Iterator[Finding]:
    """Yield experts with a configuration unlike their module's.

    Args:
        config: the configuration.
        name: common name of the experts.
        modules: the layers of the experts, none of them excluded.

    Yields:
        At most one finding, which names the first expert that differs.
    """
    # vLLM looks up the module of the experts, whose name stands for all of them
    shared = config.layer_in_vllm(modules[0])
    differ = list[str]()
    for module in modules:
        if not same(config.layer(module.name), shared):
            differ.append(module.name)
    if differ:
        text = (
            f"{len(differ)} of {len(modules)} experts have a configuration of their"
            f" own, as {differ[0]}"
        )
        yield broken("quark-experts-differ", name, text)


def _shard_findings(
    config: QuarkConfig,
    name: str,
    modules: list[Module],
) -> Iterator[Finding]:
    """Yield fused layers with a configuration unlike the first layer's.

    Args:
        config: the configuration.
        name: common name of the fused layers.
        modules: the fused layers, none of them excluded.

    Yields:
        A finding for each layer that differs from the first.
    """
    first, *others = modules
    layer = config.layer_in_vllm(first)
    for other in others:
        found = config.layer_in_vllm(other)
        if not same(found, layer):
            text = f"{first.last}: {describe(layer)}; {other.last}: {describe(found)}"
            # equal in a few words: the difference is in another key, such as the observer
            if describe(layer) == describe(found):
                text = _differing_keys(layer, found)
            yield broken("quark-shards-differ", name, text)


def _layer_findings(
    checkpoint: Checkpoint,
    config: QuarkConfig,
    module: Module,
) -> Iterator[Finding]:
    """Yield errors in the configuration of a layer, and then in its tensors.

    Args:
        checkpoint: the checkpoint.
        config: its configuration.
        module: a Linear layer with a weight; routers that vLLM keeps float are not checked.
    """
    fused_name, _ = fused_parts(module, checkpoint.modules)
    # a pattern of amd-quark means a float layer in the file, even where vLLM does not read it
    if config.excludes(module.name) or config.excludes_in_vllm(module, fused_name):
        yield from excluded_findings(module, f"it is excluded, and {_stored(module)}")
        return
    layer = config.layer_in_vllm(module)
    # outputs for the KV cache are removed by ``layer_in_vllm``
    for key, spec in subset(layer, ("output_tensors", "bias")).items():
        if spec:
            yield broken("quark-outputs", module.name, f"{key} is {_short(spec)}")
    name, why = scheme_in_vllm(layer, config.pack_method, bool(module.experts))
    if not name:
        yield broken("quark-scheme", module.name, f"{describe(layer)}: {why}")
    elif config.is_fake:
        # the weights are floats, whatever the scheme says
        return
    elif module.is_quantized:
        yield from tensor_findings(checkpoint, module, layer, cache_slots(module))
    else:
        yield broken(
            "float-included",
            module.name,
            f"{_stored(module)}; the configuration says {name}",
            # a float weight fits into a parameter of its own shape, and is cast; a packed shape
            # raises
            REFUSED if _is_packed(layer) else WRONG,
        )


def _is_packed(layer: dict[str, object]) -> bool:
    """Return whether the stored shape differs from a float weight's shape."""
    for spec in stages(layer.get("weight")):
        # "4" stands for int4, uint4 and fp4
        if str(spec.get("dtype")).endswith(("4", "fp6_e3m2", "fp6_e2m3")):
            return True
    return False


def _stored(module: Module) -> str:
    """Return the type and shape of a layer's weight as text, with the names of its scales."""
    scales = [name for name in module.tensors if "scale" in name]
    if not scales:
        return f"its weight is {module.weight}"
    return f"its weight is {module.weight} with {', '.join(scales)}"


def _differing_keys(first: Layer, second: Layer) -> str:
    """Return the differing keys of two configurations as text.

    Args:
        first: configuration of the first layer.
        second: configuration of a layer that is fused with the first.
    """
    differ = []
    for key in different(first, second):
        one, other = stages(first.get(key)), stages(second.get(key))
        # keys of single stages can be named; lists of stages differ as a whole
        if len(one) == len(other) == 1:
            differ += [f"{key}.{name}" for name in different(one[0], other[0])]
    names = differ or different(first, second)
    return f"the configurations differ in {', '.join(names)}"


def _short(value: object) -> str:
    """Return a value as text, with words for a missing key or null."""
    return NO_KEY_OR_NULL if value is None else shown(value)
