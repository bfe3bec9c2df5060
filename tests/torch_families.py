"""Small configurations of the families of language models that are quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tests.torch_models import VOCABULARY

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DENSE = _BASE | _HEADS
_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
_MOE = _DENSE | {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

#: By name: the model type and its settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", _BASE | {"num_attention_heads": 4}),
    "llama3": (
        "llama",
        _DENSE | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "llama3.2": ("llama", _DENSE | {"tie_word_embeddings": True}),
    "opt": (
        "opt",
        _BASE | {"ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 64},
    ),
    "gptj": (
        "gptj",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 8,
            "n_positions": 64,
        },
    ),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
        },
    ),
    "qwen2": ("qwen2", _DENSE),
    "qwen3": ("qwen3", _DENSE | {"head_dim": 16}),
    "qwen2_moe": ("qwen2_moe", _MOE | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", _MOE | {"head_dim": 16}),
    "phi": ("phi", _BASE | {"num_attention_heads": 4}),
    "phi3": ("phi3", _DENSE),
    "mistral": ("mistral", _DENSE),
    "mixtral": ("mixtral", _DENSE | {"num_local_experts": 4}),
    "cohere": ("cohere", _DENSE),
    "dbrx": (
        "dbrx",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        _MOE
        | {
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    "gemma2": ("gemma2", _DENSE | {"head_dim": 16}),
    "gemma3": ("gemma3_text", _DENSE | {"head_dim": 16}),
    "gpt_oss": (
        "gpt_oss",
        _DENSE | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo": ("olmo", _DENSE),
    "llama4": (
        "llama4_text",
        _DENSE
        | {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "moe_layers": [0, 1],
        },
    ),
    "granite": ("granite", _DENSE),
    "chatglm3": ("local", {}),
    "qwen": ("local", {}),
    "grok1": ("local", {}),
}
#: Heads that are not called "lm_head".
_HEADS_OF = {"chatglm3": "transformer.output_layer"}


def config_of(family: str) -> Any:
    """The configuration of a family; some bring their own code along, in a folder."""
    kind, settings = FAMILIES[family]
    if kind == "local":
        return AutoConfig.from_pretrained(
            Path(__file__).with_name("local_models") / family, trust_remote_code=True
        )
    return AutoConfig.for_model(kind, **settings)


def head_of(family: str) -> str:
    """The name of the layer that computes logits."""
    return _HEADS_OF.get(family, "lm_head")
