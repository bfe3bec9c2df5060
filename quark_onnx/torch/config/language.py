"""config_for: the configuration of a language model from the names of its options."""

from __future__ import annotations

from quark_onnx.errors import ConfigError
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.config.torch_config import Attention, KVCache, TorchConfig

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
    exclude: tuple[str, ...] = ("lm_head",),
) -> TorchConfig:
    """The configuration of a scheme for a language model.

    Args:
        name: the scheme.
        group_size: values to a block, for schemes that leave it open.
        kv_cache: "fp8"; "fp8-rope" for keys that are rounded after they are rotated; None to leave
            keys and values as they are.
        least_kv_scale: the least scale of keys and values.
        attention: "fp8" for queries and probabilities; None to leave them as they are.
        layers: globs of names and the schemes that these layers get instead.
        exclude: globs of names that stay float.

    Raises:
        ConfigError: a scheme or a format is unknown.

    >>> config_for("fp8", kv_cache="fp8").kv_cache.layers
    ('*k_proj', '*v_proj')
    """
    if kv_cache not in (None, *KV_CACHES):
        raise ConfigError(
            f"kv_cache is {kv_cache!r}; it must be one of: {', '.join(KV_CACHES)}",
        )
    if kv_cache is None and least_kv_scale:
        raise ConfigError(
            f"the least scale of the KV cache is {least_kv_scale}, but keys and values"
            " stay float",
        )
    if attention not in (None, *ATTENTIONS):
        raise ConfigError(
            f"attention is {attention!r}; it must be one of: {', '.join(ATTENTIONS)}",
        )
    fp8 = TensorSpec("fp8e4m3")
    where = "rope" if kv_cache == "fp8-rope" else "projection"
    cache = (
        None if kv_cache is None else KVCache(fp8, least=least_kv_scale, where=where)
    )
    own = tuple((glob, scheme(each, group_size)) for glob, each in layers)
    rounded = None if attention is None else Attention(fp8, fp8)
    return TorchConfig(
        scheme(name, group_size),
        layers=own,
        exclude=exclude,
        kv_cache=cache,
        attention=rounded,
    )
