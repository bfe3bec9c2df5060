"""Tiny random models of every family of transformers, built from the default configuration of its
class.

Sizes of known names become small, in the configurations of parts (vision, audio) as well. What a
family needs beyond that is in `SETTINGS`. No family is downloaded.
"""

from __future__ import annotations

import re
from typing import Any

import torch

VOCABULARY = 128
#: Families that are no single model: wrappers around any two others.
COMPOSED = ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder")
#: More parameters than this are not tiny: a size that has no rule yet.
LARGEST = 20_000_000

_HIDDEN, _INNER, _HEADS, _HEAD = 64, 128, 4, 16
#: Sizes by the pattern that the whole name of a setting matches; the first that matches.
_SIZES = (
    (r"(.*_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|num_selected_experts", 2),
    (r"(moe_)?num_(local_)?experts|n_routed_experts", 4),
    (r"n_group|n_groups|topk_group|num_expert_group", 1),
    (
        r"(moe|expert|(moe_|share_|shared_)?expert|shared|moe_shared_expert|shared_experts)"
        r"_(ffn_)?(intermediate_|hidden_)?(size|dim)",
        64,
    ),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank", 32),
    (
        r"qk_nope_head_dim|qk_rope_head_dim|v_head_dim|index_head_dim|swa_head_dim|swa_v_head_dim",
        _HEAD,
    ),
    (r"qk_head_dim", 2 * _HEAD),
    (r"(global_)?head_dim|d_kv|attention_head_size|dim_head|d_head", _HEAD),
    (
        r"(.*_)?num_key_value_heads|num_kv_heads|num_query_groups|(.*_)?num_global_key_value_heads",
        2,
    ),
    (r"(.*_)?(num_)?(attention_)?heads|n_heads?|index_n_heads|.*_n_heads", _HEADS),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|layers|depth|num_blocks)", 2),
    (
        r"(.*_)?(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|d_ff|dff|n_inner|mlp_dim|dim_ff|feed_forward_size)",
        _INNER,
    ),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|word_embed_proj_dim|embedding_size|emb_dim|hidden_dim)",
        _HIDDEN,
    ),
    (r"hidden_size_per_layer_input|laurel_rank|prompt_mid_dim", 32),
    (
        r"(vision_|output_|projection_|out_)?(output_dim|projection_dim|out_hidden_size)|lru_width",
        _HIDDEN,
    ),
    (r"image_size|resolution", 28),
    (r"(spatial_)?patch_size", 14),
    (
        r"sliding_window(_size)?|attention_window_size|attention_chunk_size|local_attention",
        16,
    ),
    (
        r"max_(source|target|text|speech)_positions|(.*_)?max_position_embeddings|n_positions|n_ctx|max_seq_len",
        64,
    ),
    (r"linear_(key|value)_head_dim|linear_head_dim", _HEAD),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", 2 * _HEAD),
    (r"(mamba_)?chunk_size", 8),
    (r"mamba_d_ssm", 2 * _HIDDEN),
    (r"mamba_d_state|ssm_state_size|state_size", 16),
    (r"rotary_dim", 8),
    (r"embedding_dim", _HIDDEN),
    (r"num_sliding_attention_heads|swa_num_attention_heads", _HEADS),
    (r"codebook_size|audio_vocab_size|codebook_dim", 32),
)
"""Sizes of a setting."""


def families() -> dict[str, tuple[str, str]]:
    """Every family that generates text, by its model type: the name of its class, and the kind of
    model.
    """
    from transformers.models.auto import modeling_auto

    kinds = {
        "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    }
    found = dict[str, tuple[str, str]]()
    for kind, mapping in kinds.items():  # the whole model rather than its decoder
        for family, name in getattr(modeling_auto, mapping).items():
            if family not in COMPOSED and isinstance(name, str):
                found[family] = (name, kind)
    return dict(sorted(found.items()))


#: Families whose rotary embeddings have three sections, in the code alone.
_SECTIONS = (
    "glm46v",
    "glm4v",
    "glm_ocr",
    "glmga",
    "paddleocr_vl",
    "qwen2_5_vl",
    "qwen2_5_omni_thinker",
    "qwen2_vl",
)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
#: What a family needs beside small sizes: settings by their path in the configuration.
SETTINGS: dict[str, dict[str, Any]] = {
    **{family: {"text_config.rope_parameters": _MROPE} for family in _SECTIONS},
    "glm4v_moe": {
        "text_config.rope_parameters": (
            _MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        )
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "dots3_note": {"text_config.num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_head": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "nemotron": {"num_key_value_heads": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"head_dim": 32},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True},
    "step3p7": {"text_config.sliding_window": 16},
    "zamba2": {"hybrid_layer_ids": [1]},
}


def tiny_config(family: str) -> Any:
    """The configuration of a tiny model of a family."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(family)
    settings = _shrunk(default.to_dict())
    for place, value in SETTINGS.get(family, {}).items():
        *parents, name = place.split(".")
        part = settings
        for parent in parents:
            part = part[parent]
        part[name] = value
    return type(default).from_dict(settings)


def tiny_model(family: str, seed: int = 0) -> Any:
    """A model of a family with random weights.

    Raises:
        ValueError: a part of it is not tiny.
    """
    import transformers

    config = tiny_config(family)
    cls = getattr(transformers, families()[family][0])
    torch.manual_seed(seed)
    with torch.device("meta"):
        empty = cls._from_config(config)
    largest = max(empty.named_parameters(), key=lambda item: item[1].numel())
    if (count := sum(each.numel() for each in empty.parameters())) > LARGEST:
        raise ValueError(
            f"{count:,} parameters, {largest[0]} of shape {list(largest[1].shape)}"
            " among them"
        )
    model = cls._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # what transformers does not save is computed, and no weight
            if parameter.ndim >= 2 and name not in (
                model._keys_to_ignore_on_save or ()
            ):
                parameter.normal_(0, 0.1)
    return model


def _shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration with small sizes."""
    layers = _layers(settings)
    depth = settings.get("num_hidden_layers")
    found = dict[str, Any]()
    for name, value in settings.items():
        if isinstance(value, dict) and "model_type" in value:
            found[name] = _shrunk(value)
        elif isinstance(value, dict) and name.startswith("rope"):
            found[name] = _rope(value)
        elif name == "num_hidden_layers" and isinstance(value, int):
            found[name] = len(layers)
        elif isinstance(value, list) and depth and len(value) == depth:
            found[name] = [_size(name, value[index]) for index in layers]
        elif name == "per_layer_config":
            continue
        else:
            found[name] = _size(name, value)
    if found.get("head_dim", 0) is None:
        found["head_dim"] = _HEAD
    if "num_key_value_heads" in found and settings[
        "num_key_value_heads"
    ] == settings.get("num_attention_heads"):
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def _layers(settings: dict[str, Any]) -> list[int]:
    """The layers that a tiny model keeps: one of each kind, and two at least."""
    kinds = settings.get("layer_types") or settings.get("layers_block_type") or []
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    kept += [index for index in range(2) if index not in kept][: max(0, 2 - len(kept))]
    return sorted(kept)


def _rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of rotary embeddings: three sections of a head."""
    found = {
        name: _rope(value) if isinstance(value, dict) else value
        for name, value in settings.items()
    }
    if "mrope_section" in found:
        found["mrope_section"] = [2, 3, 3]
    return found


def _size(name: str, value: Any) -> Any:
    """A small value for a setting; others stay as they are."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.fullmatch(r".*_(id|index|ids)", name) and value >= VOCABULARY - 28:
        return _token(name)
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size)
    return value


def _token(name: str) -> int:
    """The id of a special token, behind those of text."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return special.get(name, VOCABULARY - 28 + sum(map(ord, name)) % 28)


def samples(model: Any, count: int = 3, length: int = 12) -> list[dict[str, Any]]:
    """Batches that a model can be run on: tokens of text, for what has an encoder of its own beside
    them.

    Raises:
        ValueError: it needs something else.
    """
    generator = torch.Generator().manual_seed(7)

    def tokens() -> Any:
        return torch.randint(3, VOCABULARY - 28, (1, length), generator=generator)

    def sound(bins: int, frames: int) -> Any:
        return torch.randn(1, bins, frames, generator=generator)

    config = model.config
    bins = int(
        getattr(config, "num_mel_bins", 0)
        or getattr(config, "input_feat_per_channel", 0)
        or 80
    )
    frames = 2 * int(getattr(config, "max_source_positions", 0) or 32)
    kinds = {
        "tokens": lambda: {"input_ids": tokens()},
        "tokens for encoder and decoder": lambda: {
            "input_ids": tokens(),
            "decoder_input_ids": tokens(),
        },
        "sound and tokens": lambda: {
            "input_features": sound(bins, frames),
            "decoder_input_ids": tokens(),
        },
        "sound, frames first": lambda: {
            "input_features": sound(bins, frames).transpose(1, 2).contiguous(),
            "decoder_input_ids": tokens(),
        },
        "samples of sound": lambda: {
            "input_values": torch.randn(1, 4000, generator=generator),
            "decoder_input_ids": tokens(),
        },
    }
    errors = list[str]()
    for kind, made in kinds.items():
        try:
            with torch.no_grad():
                logits_of(model(**made()))
        except Exception as error:
            errors.append(f"on {kind}: {type(error).__name__}: {error}")
        else:
            return [made() for _ in range(count)]
    raise ValueError("; ".join(errors))


def logits_of(found: Any) -> Any:
    """The logits that a model computes."""
    return found.logits if hasattr(found, "logits") else found[0]
