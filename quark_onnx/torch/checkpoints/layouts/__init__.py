"""The table of checkpoint layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require_known
from quark_onnx.torch.checkpoints.entries import as_object
from quark_onnx.torch.checkpoints.layouts.awq import AwqLayout
from quark_onnx.torch.checkpoints.layouts.base import Layout as Layout
from quark_onnx.torch.checkpoints.layouts.compressed_tensors import (
    CompressedTensorsLayout,
)
from quark_onnx.torch.checkpoints.layouts.fp8 import FinegrainedFp8Layout, Fp8Layout
from quark_onnx.torch.checkpoints.layouts.oga import OgaLayout
from quark_onnx.torch.checkpoints.layouts.quark import WEIGHT_FORMATS, QuarkLayout
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig

LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout
    for layout in (
        QuarkLayout,
        CompressedTensorsLayout,
        AwqLayout,
        Fp8Layout,
        FinegrainedFp8Layout,
        OgaLayout,
    )
}


def layout_named(
    name: str,
    pack_method: str = "reorder",
    weight_format: str = WEIGHT_FORMATS[0],
) -> Layout:
    """Return the layout with this name.

    Args:
        name: key of ``LAYOUTS``.
        pack_method: order of nibbles, "reorder", or "order" in AMD Quark's layout.
        weight_format: "real_quantized", or "fake_quantized" in AMD Quark's layout.

    Raises:
        ConfigError: the name is unknown, or the layout does not support a setting.

    >>> layout_named("awq").parts
    ('qweight', 'qzeros', 'scales')
    """
    require_known(name, LAYOUTS, "unknown layout")
    if name == QuarkLayout.name:
        return QuarkLayout(pack_method, weight_format)
    if weight_format != WEIGHT_FORMATS[0]:
        raise ConfigError(
            f"weight_format is {weight_format!r}; the layout {name!r} has a place for"
            " codes alone",
        )
    if pack_method != "reorder":
        raise ConfigError(
            f"pack_method is {pack_method!r}; the layout {name!r} has an order of its"
            " own, leave it out",
        )
    return LAYOUTS[name]()


def check_config(layout: Layout, config: TorchConfig) -> None:
    """Raise ConfigError if a layout does not support a configuration.

    The message names the layouts that support it.
    """
    places = {"default": config.default}
    for glob, spec in config.layers:
        places[f"layers {glob!r}"] = spec
    for name, spec in config.types:
        places[f"types {name!r}"] = spec
    for where, spec in places.items():
        _check_spec(layout, where, spec)
    if config.kv_cache is not None:
        _check_cache(layout, config.kv_cache)
    _check_attention(layout, config)


def _supporting(refusal: Callable[[Layout], str]) -> list[str]:
    """Return the names of the layouts without a refusal, which is a text, or empty."""
    # Each layout is asked with its usual settings.
    return [name for name, layout in LAYOUTS.items() if not refusal(layout())]


def _check_spec(layout: Layout, place: str, spec: LayerSpec) -> None:
    """Raise ConfigError, which names the place, if a layout does not support a layer."""
    if spec.weight is None and spec.weight_only:
        return  # stays float
    if reason := layout.refusal(spec):
        others = _supporting(lambda other: other.refusal(spec))
        tensors = {"weight": spec.weight, "input": spec.input, "output": spec.output}
        parts = [
            f"{name} {tensor}" for name, tensor in tensors.items() if tensor is not None
        ]
        no_place = _no_place(layout, reason, others)
        raise ConfigError(f"{place}, {', '.join(parts)}, {no_place}")


def _check_cache(layout: Layout, cache: KVCache) -> None:
    """Raise ConfigError if a layout does not support a KV cache."""
    if reason := layout.cache_refusal(cache.spec):
        others = _supporting(lambda other: other.cache_refusal(cache.spec))
        no_place = _no_place(layout, reason, others)
        raise ConfigError(f"kv_cache, {cache.spec}, {no_place}")
    if cache.where == "rope" and layout.name != QuarkLayout.name:
        raise ConfigError(
            f"kv_cache: a checkpoint of the layout {layout.name!r} cannot say that keys"
            " are rounded after they are rotated; choose the layout"
            f" {QuarkLayout.name!r}, or where='projection'",
        )


def _check_attention(layout: Layout, config: TorchConfig) -> None:
    """Raise ConfigError if a layout does not support quantized attention."""
    if config.attention is not None and layout.name != QuarkLayout.name:
        raise ConfigError(
            f"attention: a checkpoint of the layout {layout.name!r} has no place for"
            " scales of queries and probabilities; choose the layout"
            f" {QuarkLayout.name!r}, or leave attention as it is",
        )


def _no_place(layout: Layout, reason: str, others: list[str]) -> str:
    """Return the end of a message, with the names of the other, suitable layouts."""
    if others:
        hint = f"these have one: {', '.join(others)}"
    else:
        hint = "no layout has; it can be evaluated, or choose another"
    return (
        f"has no place in a checkpoint of the layout {layout.name!r}: {reason}; {hint}"
    )


def read_layout(found: Mapping[str, Any]) -> tuple[TorchConfig, Layout]:
    """Return the configuration of a checkpoint, and its layout.

    Args:
        found: the ``quantization_config`` of config.json.

    Raises:
        ConfigError: the layout is unknown, or an entry is not supported.
    """
    method = as_object(found).get("quant_method")
    for layout in LAYOUTS.values():
        # The first layout of a method reads the files of the others, too: quark those of oga, fp8
        # those of finegrained-fp8.
        if layout.method == method:
            return layout.read(found)
    methods = dict.fromkeys(layout.method for layout in LAYOUTS.values())
    raise ConfigError(f"quant_method is {method!r}; this reads {', '.join(methods)}")
