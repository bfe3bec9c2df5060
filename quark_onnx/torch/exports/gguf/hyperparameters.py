"""Hyperparameters of GGUF files, and the tensors that scale the rotary embedding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.exports.gguf.architectures import Architecture, head_dim

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig


def add_hyperparameters(
    writer: GGUFWriter,
    config: PreTrainedConfig,
    architecture: Architecture,
    vocabulary: int,
) -> None:
    """Write the sizes and constants of a model.

    Args:
        writer: gguf.GGUFWriter.
        config: the transformers configuration.
        architecture: the architecture of llama.cpp.
        vocabulary: number of rows of the embedding.

    Raises:
        ModelError: llama.cpp would compute a different function.
    """
    _check(config, architecture)
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if experts := getattr(config, "num_local_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        # Experts may be narrower than the other layers.
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", config.intermediate_size),
        )
    _add_rope(writer, config)


def notes_on(config: PreTrainedConfig) -> list[str]:
    """Return notes on features that llama.cpp ignores, relevant for long texts."""
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    # Qwen2 has a window that its configuration switches off.
    if window and used and window < config.max_position_embeddings:
        return [
            (
                f"llama.cpp has no sliding window here: beyond {window} tokens results"
                " differ from those of the model"
            ),
        ]
    return []


def _check(config: PreTrainedConfig, architecture: Architecture) -> None:
    """Raise ModelError for settings without a key in GGUF, where llama.cpp differs."""
    if config.hidden_act not in architecture.activations:
        computed = " or ".join(architecture.activations)
        raise ModelError(
            f"hidden_act is {config.hidden_act!r}; llama.cpp's {architecture.name!r}"
            f" computes {computed}",
        )
    if not getattr(config, "norm_topk_prob", True):
        raise ModelError(
            f"norm_topk_prob is false; llama.cpp's {architecture.name!r} always"
            " normalizes the experts",
        )


def _rotating(config: PreTrainedConfig) -> int:
    """Return the number of features of a head that the rotary embedding rotates."""
    # null stands for all features.
    partial = config.rope_parameters.get("partial_rotary_factor") or 1.0
    return int(head_dim(config) * partial)


def _add_rope(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    """Write the base frequency and the scaling of the rotary embedding.

    Raises:
        ModelError: llama.cpp does not know the scaling.
    """
    import gguf

    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    writer.add_rope_dimension_count(_rotating(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(_original(config))
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
        # Such a factor would change the function without an error.
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if rope.get(name) is not None:
                raise ModelError(
                    f"rope_parameters has {name}; llama.cpp computes YaRN with the"
                    " factor of its paper",
                )
    elif kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(_original(config))
        writer.add_rope_scaling_attn_factors(
            rope.get("attention_factor") or _longrope_attention(config),
        )
    elif kind not in ("default", "llama3"):
        raise ModelError(
            f"rope_type is {kind!r}; these can be written: default, linear, llama3,"
            " longrope, yarn",
        )


def rope_tensors(config: PreTrainedConfig) -> dict[str, Any]:
    """Return float32 divisors of the rotary embedding's frequencies, by tensor name."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": _llama3(rope, _rotating(config))}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}.weight": np.float32(rope[f"{length}_factor"])
            for length in ("long", "short")
        }
    return {}


def _llama3(rope: Any, dim: int) -> Any:
    """Compute the frequency divisors of Llama 3.

    Wavelengths longer than the context are scaled by the full factor, short ones are unchanged, and
    wavelengths between are interpolated.
    """
    # Wavelengths in tokens, of shape (features / 2,).
    wave = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, dim, 2) / dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    # The share of the unscaled frequency: 0 for long wavelengths, 1 for short ones.
    kept = np.clip(
        (rope["original_max_position_embeddings"] / wave - low) / (high - low),
        0,
        1,
    )
    return np.float32(1 / (kept + (1 - kept) / rope["factor"]))


def _original(config: PreTrainedConfig) -> int:
    """Return the number of tokens of the context before its extension."""
    length = config.rope_parameters.get("original_max_position_embeddings")
    return int(
        # The parameters of the embedding have priority over the configuration of the model.
        length
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings,
    )


def _longrope_attention(config: PreTrainedConfig) -> float:
    """Return the factor of attention of LongRoPE for an extended context."""
    scale = config.max_position_embeddings / _original(config)
    if scale <= 1:
        return 1.0
    # sqrt(1 + ln(scale) / ln(original context)), as in transformers.
    return math.sqrt(1 + math.log(scale) / math.log(_original(config)))
