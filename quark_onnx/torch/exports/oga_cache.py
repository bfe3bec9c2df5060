"""Static scales of an int8 or int4 key-value cache, for onnxruntime-genai.

GroupQueryAttention keeps rotated keys (after RoPE) and values as codes, with a scale for each
channel of each key head. The scales are constants of the model, and are measured on data. Codes are
symmetric and saturate, and are rounded half to even, as in onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require_known
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.affine import Params, rounded
from quark_onnx.torch.models.attention import attention_function, register_wrapper

#: Formats of a quantized cache.
CACHES = ("int8", "int4")
#: Name of the attention function in transformers.
_NAME = "quark_onnx_cache"

#: Keys and values of a layer, (batch, key heads, sequence, head size), as they are read.
_Change = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class CacheScales:
    """Scales of a quantized key-value cache.

    Attributes:
        format: "int8" or "int4".
        keys: scales of shape (key heads, 1, head size), by layer.
        values: scales of shape (key heads, 1, head size), by layer.
    """

    format: str
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    def document(self) -> dict[str, Any]:
        """Return the content of the model builder's ``kv_cache_scale_file``."""
        return {
            "scales": {
                "k_scales": [scale.reshape(-1).tolist() for scale in self.keys],
                "v_scales": [scale.reshape(-1).tolist() for scale in self.values],
            },
        }

    def options(self, file: str) -> tuple[str, ...]:
        """Return the options of the model builder.

        Args:
            file: path of the file with the scales.
        """
        return (
            f"kv_cache_quant_scheme={self.format}_per_channel",
            f"kv_cache_scale_file={file}",
        )


def check_cache(format: str) -> None:
    """Raise ConfigError for an unknown format of a cache."""
    require_known(format, CACHES, "the KV cache of onnxruntime-genai is")


def measure_cache(model: Any, windows: Sequence[Any], format: str) -> CacheScales:
    """Measure the scales that cover the keys and values of calibration data.

    Args:
        model: a causal language model of transformers.
        windows: int64 token ids of shape (length,).
        format: "int8" or "int4".

    Returns:
        The scales, in float32.

    Raises:
        ConfigError: the format is unknown, or a layer's attention is not a function of
            transformers.
    """
    check_cache(format)
    largest: dict[tuple[int, int], Any] = {}

    def observe(layer: int, *sides: Any) -> tuple[Any, Any]:
        for side, tensor in enumerate(sides):
            # (batch, key heads, sequence, head size) to (key heads, 1, head size).
            peak = tensor.detach().float().abs().amax((0, 2))[:, None]
            previous = largest.get((layer, side))
            if previous is not None:
                peak = torch.maximum(previous, peak)
            largest[layer, side] = peak
        return sides[0], sides[1]

    with torch.no_grad(), _changed_attention(model, observe):
        # Each window is run as a whole.
        for window in windows:
            model(input_ids=window[None], use_cache=False)
    layers = int(model.config.get_text_config().num_hidden_layers)
    # Attention with code of its own does not call the registered function.
    if {layer for layer, _ in largest} != set(range(layers)):
        raise ConfigError(
            f"a {type(model).__name__} does not compute attention by the attention"
            " functions of transformers in every layer, so that its keys and values"
            " cannot be measured; leave out --kv-cache",
        )
    # the largest code stands for the largest value: halves of a step at the end of the range, which
    # onnxruntime rounds by a product with the reciprocal, would become one code or the other
    largest_code = TensorSpec(format).grid.qmax

    def scales_of(side: int) -> tuple[Any, ...]:
        return tuple(
            _scale(largest[layer, side], largest_code) for layer in range(layers)
        )

    return CacheScales(format, scales_of(0), scales_of(1))


def _scale(largest: Any, largest_code: float) -> Any:
    """Return the scales of channels; 1 where all values are 0."""
    # Codes are 0 for any scale, and a scale of 0 would divide by 0.
    scale = largest / largest_code
    return torch.where(scale > 0, scale, torch.ones_like(scale))


@contextmanager
def rounded_cache(model: Any, scales: CacheScales | None) -> Iterator[None]:
    """Let a model's attention read rounded keys and values.

    Args:
        model: a causal language model of transformers.
        scales: the scales; None for a float cache.
    """
    if scales is None:
        yield
        return
    spec = TensorSpec(scales.format)

    def change(
        layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            rounded(key, Params(scales.keys[layer]), spec, key.dtype),
            rounded(value, Params(scales.values[layer]), spec, value.dtype),
        )

    with _changed_attention(model, change):
        yield


@contextmanager
def _changed_attention(model: Any, change: _Change) -> Iterator[None]:
    """Apply a function to the rotated keys and the values of each layer."""

    def attend(  # the signature of transformers, after the wrapped function
        function: Callable[..., Any],
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **named: Any,
    ) -> Any:
        key, value = change(module.layer_idx, key, value)
        return function(module, query, key, value, *args, **named)

    register_wrapper(_NAME, model.config._attn_implementation, attend)
    with attention_function(model, _NAME):
        yield
