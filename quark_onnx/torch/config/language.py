"""Configurations of language models, from the names of command-line options."""

from __future__ import annotations

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require_one_of
from quark_onnx.torch.config.refusals import REFUSED_CACHES
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.config.torch_config import (
    HEADS,
    Attention,
    KVCache,
    TorchConfig,
)

#: Formats of keys and values.
KV_CACHES = ("fp8", "fp8-rope")
#: Formats of queries and probabilities of attention.
ATTENTIONS = ("fp8",)


def config_for(  # noqa: PLR0913
    name: str,
    *,
    group_size: int | None = None,
    kv_cache: str | None = None,
    least_kv_scale: float = 0.0,
    attention: str | None = None,
    layers: tuple[tuple[str, str], ...] = (),
    exclude: tuple[str, ...] = (HEADS,),
) -> TorchConfig:
    """Return the configuration of a scheme for a language model.

    Args:
        name: name of the scheme.
        group_size: values per group, for schemes without a fixed size.
        kv_cache: "fp8"; "fp8-rope" to round keys after the rotation (RoPE); None for float keys and
            values.
        least_kv_scale: lower bound of the scales of keys and values.
        attention: "fp8" to round queries and probabilities; None for float attention.
        layers: pairs of a glob of layer names and the scheme of these layers.
        exclude: globs of the names of layers that stay float; by default the heads of the model.

    Raises:
        ConfigError: a scheme or a format is unknown.

    >>> config_for("fp8", kv_cache="fp8").kv_cache.layers
    ('*k_proj', '*v_proj')
    """
    # Before the check for unknown formats, whose error would give no reason.
    if kv_cache in REFUSED_CACHES:
        raise ConfigError(f"kv_cache is {kv_cache!r}: {REFUSED_CACHES[kv_cache]}")
    if kv_cache is not None:
        require_one_of("kv_cache", kv_cache, KV_CACHES)
    if kv_cache is None and least_kv_scale:
        raise ConfigError(
            f"the least scale of the KV cache is {least_kv_scale}, but keys and values"
            " stay float",
        )
    if attention is not None:
        require_one_of("attention", attention, ATTENTIONS)
    # vLLM has E4M3 with per-tensor scales for a calibrated cache, and for attention.
    fp8 = TensorSpec("fp8e4m3")
    cache = None
    if kv_cache is not None:
        where = "rope" if kv_cache == "fp8-rope" else "projection"
        cache = KVCache(fp8, least=least_kv_scale, where=where)
    # The group size of the model holds for its single layers, too.
    layer_specs = tuple(
        (glob, scheme(layer_scheme, group_size)) for glob, layer_scheme in layers
    )
    return TorchConfig(
        scheme(name, group_size),
        layers=layer_specs,
        exclude=exclude,
        kv_cache=cache,
        attention=None if attention is None else Attention(fp8, fp8),
    )
