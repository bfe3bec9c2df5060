"""TorchConfig as the ``quantization_config`` of AMD Quark's checkpoints, and back.

The keys are those of its release 0.13, all of them written out: loaders ask for them, and vLLM compares whole entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quark_onnx.dtypes import Integer
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.torch.config import KVCache, TorchConfig
from quark_onnx.torch.formats import TwoLevel, block_of
from quark_onnx.torch.spec import LayerSpec, TensorSpec

#: The release whose keys are written.
VERSION = "0.13"
#: Our formats by their names there.
_NAMES = {
    "fp8_e4m3": "fp8e4m3",
    "fp8_e5m2": "fp8e5m2",
    "fp4": "mxfp4e2m1",
    "fp6_e3m2": "mxfp6e3m2",
    "fp6_e2m3": "mxfp6e2m3",
}
#: Those that are floats with a scale for a tensor or a channel, and elements of microscaling blocks otherwise.
_IN_BLOCKS = {"fp8_e4m3": "mxfp8e4m3", "fp8_e5m2": "mxfp8e5m2"}
_THEIRS = {ours: theirs for theirs, ours in (*_NAMES.items(), *_IN_BLOCKS.items())}
_SCALES = {"model": "float", "float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


def to_json(config: TorchConfig, exclude: Iterable[str] | None = None, method: str = "reorder") -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint.

    Args:
        exclude: exact names of layers that stay float; the globs of the configuration if None.
        method: how nibbles are ordered.
    """
    kv = config.kv_cache
    layers = {glob: _layer(spec) for glob, spec in config.layers}
    cache = {}
    if kv is not None:
        entry = _layer(config.default) | {"output_tensors": _spec(kv.spec) | {"scale_type": None}}
        cache = dict.fromkeys(kv.layers, entry)
    return {
        "algo_config": None,
        "exclude": list(config.exclude if exclude is None else exclude),
        "export": {
            "kv_cache_group": list(kv.layers) if kv else [],
            "min_kv_scale": kv.least if kv else 0.0,
            "pack_method": method,
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": _layer(config.default),
        "kv_cache_post_rope": False,
        "kv_cache_quant_config": cache,
        "layer_quant_config": cache | layers,
        "layer_type_quant_config": {name: _layer(spec) for name, spec in config.types},
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "softmax_quant_spec": None,
        "version": VERSION,
    }


def from_json(found: Mapping[str, Any]) -> tuple[TorchConfig, str]:
    """The configuration of a checkpoint, and how its nibbles are ordered.

    Raises:
        ConfigError: it is not Quark's, or has what cannot be understood.
    """
    if found.get("quant_method") != "quark":
        raise ConfigError(f"quant_method is {found.get('quant_method')!r}; this reads 'quark'")
    default = found.get("global_quant_config")
    if not isinstance(default, Mapping):
        raise ConfigError("the quantization_config has no global_quant_config")
    export = found.get("export") or {}
    kv_layers = export.get("kv_cache_group") or []
    layers = {glob: _layer_from(entry) for glob, entry in (found.get("layer_quant_config") or {}).items()}
    cache = next((layers[glob].output for glob in kv_layers if glob in layers), None)
    kv = None if cache is None else KVCache(cache, tuple(kv_layers), float(export.get("min_kv_scale") or 0.0))
    config = TorchConfig(
        _layer_from(default),
        tuple((glob, spec) for glob, spec in layers.items() if kv is None or glob not in kv_layers),
        tuple((name, _layer_from(entry)) for name, entry in (found.get("layer_type_quant_config") or {}).items()),
        tuple(found.get("exclude") or ()),
        kv,
    )
    return config, str(export.get("pack_method") or "reorder")


def _layer(spec: LayerSpec) -> dict[str, Any]:
    return {
        "bias": None,
        "input_tensors": None if spec.input is None else _spec(spec.input, dynamic=not spec.input.measured),
        "output_tensors": None if spec.output is None else _spec(spec.output),
        "target_device": None,
        "weight": None if spec.weight is None else _spec(spec.weight),
    }


def _spec(spec: TensorSpec, dynamic: bool = False) -> Any:
    """One tensor's entry, or the list of two that a format with two levels of scales has."""
    if isinstance(spec.dtype, TwoLevel):
        inner = _entry("fp4", "per_group", "PerBlockMXObserver") | {"ch_axis": -1, "group_size": block_of(spec.dtype)}
        inner |= {"scale_format": "float32", "scale_type": "float32", "scale_calculation_mode": "even"}
        outer = _entry("fp8_e4m3", "per_tensor", "PerTensorMinMaxObserver") | {"symmetric": True}
        outer |= {"is_scale_quant": True, "scale_type": "float32"}
        return [inner | {"is_dynamic": dynamic}, outer]
    name = _THEIRS.get(spec.dtype.name, spec.dtype.name)
    if block_of(spec.dtype):
        entry = _entry(name, "per_group", "PerBlockMXObserver")
        entry |= {"ch_axis": -1, "group_size": block_of(spec.dtype), "scale_format": "e8m0"}
        entry["scale_calculation_mode"] = spec.exponent
    elif spec.group:
        entry = _entry(name, "per_group", "PerGroupMinMaxObserver") | {"ch_axis": -1, "group_size": spec.group}
        entry["symmetric"] = spec.symmetric
    elif spec.per_channel:
        entry = _entry(name, "per_channel", "PerChannelMinMaxObserver") | {"ch_axis": int(dynamic)}
        entry["symmetric"] = spec.symmetric
    else:
        entry = _entry(name, "per_tensor", "PerTensorMinMaxObserver") | {"symmetric": spec.symmetric}
    return entry | {"is_dynamic": dynamic, "scale_type": _SCALES[spec.scale]}


def _entry(dtype: str, scheme: str, observer: str) -> dict[str, Any]:
    return {
        "block_size": None,
        "ch_axis": None,
        "dtype": dtype,
        "enable_buffer_reuse": False,
        "group_size": None,
        "is_dynamic": False,
        "is_scale_quant": False,
        "max_input_numel": 4194304,
        "mx_element_dtype": None,
        "observer_cls": observer,
        "qscheme": scheme,
        "round_method": "half_even",
        "scale_calculation_mode": None,
        "scale_format": None,
        "scale_type": "float",
        "symmetric": None,
        "zero_point_type": "int32",
    }


def _layer_from(entry: Mapping[str, Any]) -> LayerSpec:
    return LayerSpec(
        _spec_from(entry.get("weight"), "weight"),
        _spec_from(entry.get("input_tensors"), "input_tensors"),
        _spec_from(entry.get("output_tensors"), "output_tensors"),
    )


def _spec_from(entry: Any, where: str) -> TensorSpec | None:
    if entry is None:
        return None
    if isinstance(entry, list):
        if len(entry) == 1:
            return _spec_from(entry[0], where)
        first = entry[0]
        if [each.get("dtype") for each in entry] == ["fp4", "fp8_e4m3"] and first.get("group_size") == 16:
            return TensorSpec("nvfp4")
        raise ConfigError(f"{where} has stages {[each.get('dtype') for each in entry]}, which cannot be read")
    name, scheme, dynamic = str(entry.get("dtype")), entry.get("qscheme"), bool(entry.get("is_dynamic"))
    if entry.get("scale_format") == "e8m0":
        if entry.get("group_size") not in (None, 32):
            raise ConfigError(f"{where} has blocks of {entry['group_size']}; those of microscaling formats have 32")
        ours = _IN_BLOCKS.get(name) or _NAMES.get(name, name)
        return TensorSpec(ours, exponent=str(entry.get("scale_calculation_mode") or "even"))
    spec = TensorSpec(_NAMES.get(name, name))
    scales = {theirs: ours for ours, theirs in _SCALES.items()}
    kind = str(entry.get("scale_type") or "float")
    if kind not in scales:
        raise ConfigError(f"{where} has scales of type {kind!r}{nearest(kind, scales)}")
    settings: dict[str, Any] = {"dynamic": dynamic, "scale": scales[kind]}
    if isinstance(spec.dtype, Integer):
        settings["symmetric"] = entry.get("symmetric") is not False
    if scheme == "per_group":
        settings["block_size"] = int(entry["group_size"])
    elif scheme == "per_channel":
        settings["per_channel"] = True
    elif scheme not in ("per_tensor", None):
        raise ConfigError(f"{where} has the scheme {scheme!r}, which cannot be read")
    return spec.with_(**settings)
