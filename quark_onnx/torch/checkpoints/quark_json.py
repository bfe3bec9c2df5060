"""Conversion between TorchConfig and the ``quantization_config`` of AMD Quark.

The keys are the keys of release 0.13, without omissions: loaders expect them, and vLLM compares
whole entries.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require_known
from quark_onnx.dtypes import Integer
from quark_onnx.torch.checkpoints.entries import (
    as_object,
    names_in,
    number_in,
    object_in,
    size_in,
)
from quark_onnx.torch.config.number_formats import (
    FloatScaled,
    Progressive,
    TwoLevel,
    block_of,
)
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import (
    Attention,
    KVCache,
    TorchConfig,
    matches,
)

#: Entries of a quantization_config by glob or name.
_Entries = dict[str, dict[str, Any]]
#: The release whose keys are written.
VERSION = "0.13"
#: Formats of this package by AMD Quark's names.
_NAMES = {
    "fp8_e4m3": "fp8e4m3",
    "fp8_e5m2": "fp8e5m2",
    "fp4": "mxfp4e2m1",
    "fp6_e3m2": "mxfp6e3m2",
    "fp6_e2m3": "mxfp6e2m3",
}
#: Floats with a per-tensor or per-channel scale, which are elements of microscaling blocks
#: otherwise.
_IN_BLOCKS = {"fp8_e4m3": "mxfp8e4m3", "fp8_e5m2": "mxfp8e5m2"}
#: Formats that always have blocks, whatever an entry says of its scales.
_BLOCKS = ("mx", "mx6", "mx9", "bfp16")
#: Formats of microscaling blocks whose name differs from the name of the element.
_MX_ELEMENTS = {"int8": "mxint8"}
#: Formats with two levels of scales, by the dtypes of the stages: the place, key and value of the
#: setting that tells them apart, and the format.
_STAGED: dict[tuple[str, ...], tuple[int, str, object, TensorSpec]] = {
    ("fp4", "fp8_e4m3"): (0, "group_size", 16, TensorSpec("nvfp4")),
    ("fp8_e4m3", "int4"): (
        1,
        "qscheme",
        "per_channel",
        TensorSpec("int4fp8", per_channel=True, scale="float32"),
    ),
}
#: AMD's FP4, by the size of its blocks.
_FLOAT_SCALED = {16: "amdfp4", 32: "amdfp4g32"}
#: AMD Quark's rules for shared exponents, called ``scale_calculation_mode``.
_MODES = ("even", "floor", "ceil")
#: Names of AMD Quark's algorithms that rotate activations.
_ROTATIONS = ("rotation", "quarot")
_THEIRS = {ours: theirs for theirs, ours in (*_NAMES.items(), *_IN_BLOCKS.items())}
#: The last parts of the names of layers that compute queries, alone or with keys and values.
_QUERIES = re.compile(r"(^|[.*_])W?(q|query|qkv)(_[a-z_]+)?$|(^|[.*])c_attn$")
_SCALES = {
    "model": "float",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
}


def to_json(
    config: TorchConfig,
    exclude: Iterable[str] | None = None,
    method: str = "reorder",
) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint.

    Args:
        config: configuration of the model.
        exclude: exact names of layers that stay float; None for the globs of the configuration.
        method: order of nibbles.
    """
    kv, attention = config.kv_cache, config.attention
    layers, rounded, cache = _layer_entries(config)
    exact = {name: entry for name, entry in layers.items() if "*" not in name}
    return {
        "algo_config": None,
        # vLLM compares exact names here, and knows no globs.
        "exclude": list(config.exclude if exclude is None else exclude),
        # amd-quark rejects an object with other keys than these five.
        "export": {
            "kv_cache_group": list(config.cached),
            "min_kv_scale": kv.least if kv else 0.0,
            "pack_method": method,
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": layer_to_json(config.default),
        "kv_cache_post_rope": kv is not None and kv.where == "rope",
        "kv_cache_quant_config": cache,
        # readers take the first entry that matches a layer
        "layer_quant_config": exact | rounded | layers,
        "layer_type_quant_config": {
            name: layer_to_json(spec) for name, spec in config.types
        },
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "softmax_quant_spec": (
            _unscaled(attention.probabilities) if attention else None
        ),
        "version": VERSION,
    }


def _layer_entries(config: TorchConfig) -> tuple[_Entries, _Entries, _Entries]:
    """Return the entries of layers by glob.

    Returns:
        The entries of layers, of layers with outputs rounded for attention, and of layers with
        cached outputs, which are part of the second.
    """
    kv, attention = config.kv_cache, config.attention
    queries = attention.queries if attention else None
    layers = {glob: layer_to_json(spec) for glob, spec in config.layers}
    if queries is not None:
        # vLLM forgets outputs of queries under the glob alone, and refuses them elsewhere
        _set_outputs(layers, config.attending, {"output_tensors": None})
    cache = _Entries()
    if kv is not None:
        output = {"output_tensors": _unscaled(kv.spec)}
        _set_outputs(layers, kv.layers, output)
        # The entry of a glob for the cache leaves the other entries: it is written once.
        for glob in kv.layers:
            cache[glob] = layers.pop(glob, layer_to_json(config.default)) | output
    rounded = dict(cache)
    if queries is not None:
        output = {"output_tensors": _unscaled(queries)}
        for glob in config.attending:
            # A layer that computes keys and queries at once has its entry from the cache already.
            rounded[glob] = (
                cache.get(glob)
                or layers.pop(glob, layer_to_json(config.default)) | output
            )
    return layers, rounded, cache


def _set_values(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object without the keys that are null, false, 0 or empty."""
    return {key: value for key, value in entries.items() if value}


def _set_outputs(
    layers: _Entries, globs: Iterable[str], output: dict[str, Any]
) -> None:
    """Change the outputs of the entries whose names match a glob, in place."""
    for name, entry in layers.items():
        if matches(name, globs):
            layers[name] = entry | output


def from_json(found: Mapping[str, Any]) -> tuple[TorchConfig, str]:
    """Return the configuration of a checkpoint, and the order of nibbles.

    Raises:
        ConfigError: the method is not "quark", or an entry is not supported.
    """
    if found.get("quant_method") != "quark":
        raise ConfigError(
            f"quant_method is {found.get('quant_method')!r}; this reads 'quark'",
        )
    _check_rotations(found.get("algo_config"))
    default = found.get("global_quant_config")
    if not isinstance(default, Mapping):
        raise ConfigError("the quantization_config has no global_quant_config")
    given = _set_values(found)
    export = _set_values(object_in(given, "export"))
    config = TorchConfig(
        layer_from_json(default, "global_quant_config"),
        types=tuple(_layers_in(given, "layer_type_quant_config").items()),
        exclude=names_in(given, "exclude"),
    )
    # False entries were dropped.
    where = "rope" if "kv_cache_post_rope" in given else "projection"
    probabilities = spec_from_json(
        found.get("softmax_quant_spec"),
        "softmax_quant_spec",
    )
    config = with_layers(
        config,
        _layers_in(given, "layer_quant_config"),
        names_in(export, "kv_cache_group"),
        number_in(export, "min_kv_scale"),
        where,
        probabilities,
    )
    # the entry of a single layer comes before globs for outputs that are rounded
    config = config.with_(
        # The sort is stable: the order within names and within globs stays.
        layers=tuple(sorted(config.layers, key=lambda entry: "*" in entry[0])),
    )
    return config, str(export.get("pack_method", "reorder"))


#: Settings of AMD Quark's rotations that a model computes while it runs.
_ONLINE = ("r3", "r4", "online_r1_rotation", "online_config", "online-had")


def _check_rotations(algorithms: Any) -> None:
    """Raise ConfigError if the weights are those of a model with online rotations.

    Other algorithms of ``algo_config`` have changed the weights, and need nothing at run time.
    """
    # The entry is a list, an object, or null.
    entries = algorithms if isinstance(algorithms, list) else [algorithms]
    for entry in entries:
        if not isinstance(entry, Mapping) or entry.get("name") not in _ROTATIONS:
            continue
        if online := [name for name in _ONLINE if entry.get(name)]:
            raise ConfigError(
                f"algo_config has a rotation with {online[0]}, which the model computes"
                " while it runs, and which is not supported; export it without"
            )


def with_layers(  # noqa: PLR0913
    config: TorchConfig,
    layers: Mapping[str, LayerSpec],
    kv_layers: Collection[str],
    least: float = 0.0,
    where: str = "projection",
    probabilities: TensorSpec | None = None,
) -> TorchConfig:
    """Return a configuration with layers that may compute keys, values and queries.

    Args:
        config: configuration without layers, KV cache and attention.
        layers: specifications by glob.
        kv_layers: globs of ``layers`` whose outputs are cached; they come first.
        least: lower bound of the scales of keys and values.
        where: place of the rounding of keys, "projection" or "rope".
        probabilities: specification of softmax probabilities. If given, the function looks for
            layers that compute queries.
    """
    # A glob of the group may have no entry.
    outputs = [layers[glob].output for glob in kv_layers if glob in layers]
    cache = None
    if outputs and outputs[0] is not None:
        if len(set(outputs)) > 1:
            raise ConfigError(
                f"the outputs of {', '.join(kv_layers)} are quantized differently; keys"
                " and values are alike",
            )
        cache = KVCache(outputs[0], tuple(kv_layers), least, where)
    attention = None if probabilities is None else _attention(layers, probabilities)
    config = config.with_(kv_cache=cache, attention=attention)
    # Rounded outputs belong to the cache and to attention, the rest to the layers.
    rounded = {
        glob: layers[glob].with_(output=None)
        for glob in config.rounded
        if glob in layers
    }
    others = {glob: spec for glob, spec in layers.items() if glob not in rounded}
    # without other entries, the default applies to the rounded layers, too
    if {*rounded.values()} == {config.default} and not others and not config.types:
        rounded = {}
    return config.with_(layers=tuple((rounded | others).items()))


def _attention(layers: Mapping[str, LayerSpec], probabilities: TensorSpec) -> Attention:
    """Find the layers that compute queries, by quantized outputs and by names."""
    globs, single_layers = dict[str, TensorSpec](), dict[str, TensorSpec]()
    for name, spec in layers.items():
        if spec.output is None or not _QUERIES.search(name):
            continue
        if "*" in name:
            globs[name] = spec.output
        else:
            single_layers[name] = spec.output
    # Where a glob names the queries, entries of single layers are exceptions in other respects.
    outputs = globs or single_layers
    if not outputs:
        return Attention(probabilities)
    if len(set(outputs.values())) > 1:
        raise ConfigError(
            f"the outputs of {', '.join(outputs)} are quantized differently; queries are"
            " alike",
        )
    queries = next(iter(outputs.values()))
    return Attention(probabilities, queries, tuple(outputs))


def layer_to_json(spec: LayerSpec) -> dict[str, Any]:
    """Return the entry of a layer."""
    read = spec.input
    dynamic = False
    if read is not None:
        # Block scales of NVFP4 are dynamic, although its global scale is measured.
        dynamic = not read.measured or isinstance(read.dtype, TwoLevel)
    return {
        "bias": None,
        "input_tensors": _spec(read, dynamic=dynamic),
        "output_tensors": _spec(spec.output),
        "target_device": None,
        "weight": _spec(spec.weight),
    }


def _unscaled(spec: TensorSpec) -> dict[str, Any]:
    """Return the entry of a tensor of attention, whose type of scales is not stored."""
    entry: dict[str, Any] = _spec(spec)
    return entry | {"scale_type": None}


def _mode(spec: TensorSpec, dynamic: bool) -> str:
    """Return AMD Quark's name of the rule for shared exponents.

    For weights, the rule only documents how the stored scales were computed.
    """
    if spec.exponent in _MODES:
        return spec.exponent
    if dynamic:
        raise ConfigError(
            f"exponent is {spec.exponent!r}; each run computes it, and AMD Quark knows"
            f" {', '.join(_MODES)}",
        )
    return "even"


def _spec(spec: TensorSpec | None, dynamic: bool = False) -> Any:
    """Return the entry of a tensor: None if it is float, two entries for two levels of scales.

    Args:
        spec: how the tensor is quantized.
        dynamic: whether each run computes the scales, or the block scales of NVFP4.

    Raises:
        ConfigError: AMD Quark does not know the rule for shared exponents.
    """
    if spec is None:
        return None
    # Blocks of 16 FP4 values, and an FP8 stage that rounds their scales.
    if isinstance(spec.dtype, TwoLevel):
        return [
            _entry(
                "fp4",
                **_BLOCKS_OF_FLOATS,
                group_size=block_of(spec.dtype),
                is_dynamic=dynamic,
                scale_format="float32",
                scale_type="float32",
            ),
            _entry("fp8_e4m3", **_GLOBAL_SCALE, is_scale_quant=True),
        ]
    if isinstance(spec.dtype, Progressive):
        # An FP8 stage with the per-tensor factor, and an integer stage with per-channel factors.
        return [
            _entry("fp8_e4m3", **_GLOBAL_SCALE),
            _entry(
                "int4",
                qscheme="per_channel",
                observer_cls="PerChannelMinMaxObserver",
                ch_axis=0,
                scale_type="float32",
                symmetric=True,
            ),
        ]
    if isinstance(spec.dtype, FloatScaled):
        return _entry(
            "fp4",
            **_BLOCKS_OF_FLOATS,
            group_size=spec.group,
            is_dynamic=dynamic,
            scale_format="e5m3",
            scale_type="float8_e5m3",
        )
    name = _THEIRS.get(spec.dtype.name, spec.dtype.name)
    # A cast has no scale to observe.
    if spec.is_cast:
        return _entry(
            name,
            observer_cls="PlaceholderObserver",
            is_dynamic=None,
            round_method=None,
            scale_type=None,
        )
    return _entry(
        name,
        **_granularity(spec, dynamic),
        is_dynamic=dynamic,
        scale_type="pof2" if spec.pow2 else _SCALES[spec.scale],
    )


def _granularity(spec: TensorSpec, dynamic: bool) -> dict[str, Any]:
    """Return the fields for the granularity of scales."""
    if block_of(spec.dtype):
        return {
            **_BLOCKS_OF_FLOATS,
            "group_size": block_of(spec.dtype),
            "scale_calculation_mode": _mode(spec, dynamic),
            "scale_format": "e8m0",
        }
    if spec.group:
        return {
            "qscheme": "per_group",
            "observer_cls": "PerGroupMinMaxObserver",
            "ch_axis": -1,
            "group_size": spec.group,
            "symmetric": spec.symmetric,
        }
    if spec.per_channel:
        return {
            "qscheme": "per_channel",
            "observer_cls": "PerChannelMinMaxObserver",
            # amd-quark: 0 for the outputs of a weight, 1 for the tokens of dynamic activations
            "ch_axis": int(dynamic),
            "symmetric": spec.symmetric,
        }
    return {
        "qscheme": "per_tensor",
        "observer_cls": "PerTensorMinMaxObserver",
        "symmetric": spec.symmetric,
    }


#: Fields of a specification that amd-quark writes where nothing else is said.
_USUAL_FIELDS: dict[str, Any] = {
    "block_size": None,
    "ch_axis": None,
    "dtype": None,
    "enable_buffer_reuse": False,
    "group_size": None,
    "is_dynamic": False,
    "is_scale_quant": False,
    "max_input_numel": 4194304,
    "mx_element_dtype": None,
    "observer_cls": None,
    "qscheme": None,
    "round_method": "half_even",
    "scale_calculation_mode": None,
    "scale_format": None,
    "scale_type": "float",
    "symmetric": None,
    "zero_point_type": "int32",
}


_BLOCKS_OF_FLOATS = {
    "qscheme": "per_group",
    "observer_cls": "PerBlockMXObserver",
    "ch_axis": -1,
}


#: One scale in float32 for a tensor, or for the scales of its blocks.
_GLOBAL_SCALE = {
    "qscheme": "per_tensor",
    "observer_cls": "PerTensorMinMaxObserver",
    "scale_type": "float32",
    "symmetric": True,
}


def _entry(dtype: str, **fields: Any) -> dict[str, Any]:
    """Return an entry with the full set of keys, since vLLM compares whole entries."""
    return {**_USUAL_FIELDS, "dtype": dtype, **fields}


def _layers_in(found: Mapping[str, Any], key: str) -> dict[str, LayerSpec]:
    """Return the layer specifications of an object by glob or class name."""
    return {
        name: layer_from_json(entry, f"{key} {name!r}")
        for name, entry in object_in(found, key).items()
    }


def layer_from_json(entry: Any, where: str) -> LayerSpec:
    """Return the layer specification of an entry.

    Args:
        entry: entry of the configuration.
        where: name of the entry, for errors.

    Raises:
        ConfigError: the entry is not supported.
    """
    tensors = as_object(entry, where)
    return LayerSpec(
        spec_from_json(tensors.get("weight"), "weight"),
        spec_from_json(tensors.get("input_tensors"), "input_tensors"),
        spec_from_json(tensors.get("output_tensors"), "output_tensors"),
    )


def spec_from_json(entry: Any, where: str) -> TensorSpec | None:
    """Return the tensor specification of an entry or a list of stages; None for None.

    Args:
        entry: entry of the configuration.
        where: purpose of the entry, for errors.

    Raises:
        ConfigError: the entry is not supported.
    """
    if entry is None:
        return None
    if isinstance(entry, list):
        return _staged(entry, where)
    entry = as_object(entry, where)
    name = str(entry.get("dtype"))
    # Entries of earlier releases have "mx" with the element apart.
    if name == "mx":
        element = str(entry.get("mx_element_dtype"))
        name = _MX_ELEMENTS.get(element, element)
    if name == "fp4" and entry.get("scale_format") == "e5m3":
        return TensorSpec(_float_scaled(entry.get("group_size"), where))
    # Formats whose blocks share an exponent.
    if entry.get("scale_format") == "e8m0" or entry.get("dtype") in _BLOCKS:
        return _in_mx_blocks(name, entry, where)
    return _with_scales(name, entry, where)


def _staged(stages: list[Any], where: str) -> TensorSpec | None:
    """Return the specification of a list of stages, which are levels of scales."""
    # A list of one stage is the same as its entry.
    if len(stages) == 1:
        return spec_from_json(stages[0], where)
    levels = [as_object(stage, f"a stage of {where}") for stage in stages]
    dtypes = [level.get("dtype") for level in levels]
    staged = _STAGED.get(tuple(map(str, dtypes)))
    if staged is not None:
        index, key, value, spec = staged
        if levels[index].get(key) == value:
            return spec
    raise ConfigError(f"{where} has stages {dtypes}, which cannot be read")


def _in_mx_blocks(name: str, entry: Mapping[str, Any], where: str) -> TensorSpec:
    """Return the specification of a format whose blocks share an exponent."""
    spec = TensorSpec(
        _IN_BLOCKS.get(name) or _NAMES.get(name, name),
        exponent=str(entry.get("scale_calculation_mode") or "even"),
    )
    # null leaves the size to the format.
    if entry.get("group_size") not in (None, block_of(spec.dtype)):
        raise ConfigError(
            f"{where} has blocks of {entry['group_size']}; those of {name} have"
            f" {block_of(spec.dtype)}",
        )
    return spec


def _with_scales(name: str, entry: Mapping[str, Any], where: str) -> TensorSpec:
    """Return the specification of a format with scales of a type and a granularity."""
    spec = TensorSpec(_NAMES.get(name, name))
    # Powers of two are computed in the type of the model.
    scales = {theirs: ours for ours, theirs in _SCALES.items()} | {"pof2": "model"}
    kind = str(entry.get("scale_type") or "float")
    require_known(kind, scales, f"{where} has scales of type")
    settings: dict[str, Any] = {
        "dynamic": bool(entry.get("is_dynamic")),
        "scale": scales[kind],
        "pow2": kind == "pof2",
    }
    # The entry is null for floats.
    if isinstance(spec.dtype, Integer):
        settings["symmetric"] = entry.get("symmetric") is not False
    scheme = entry.get("qscheme")
    if scheme == "per_group":
        settings["block_size"] = size_in(entry, "group_size", where)
    elif scheme == "per_channel":
        settings["per_channel"] = True
    elif scheme not in ("per_tensor", None):
        raise ConfigError(f"{where} has the scheme {scheme!r}, which cannot be read")
    return spec.with_(**settings)


def _float_scaled(size: Any, where: str) -> str:
    """Return the name of the FP4 format with E5M3 scales.

    Raises:
        ConfigError: no such format has blocks of this size.
    """
    if size not in tuple(_FLOAT_SCALED):  # a list has no hash
        raise ConfigError(
            f"{where} has blocks of {size}; those with scales in E5M3 have 16 or 32",
        )
    return _FLOAT_SCALED[size]
