"""Families of language models: layers of keys and values, and float layers.

The keys are the ``model_type`` of a model's configuration, as in AMD Quark 0.13.
"""

from __future__ import annotations

# Patterns that several families share; a family has one string, as in its row below.
_KV, _HEAD = "*k_proj *v_proj", "lm_head"
# Multi-head latent attention: keys and values come from a compressed vector.
_LATENT_KV = "*kv_a_proj_with_mqa *kv_b_proj"
# Vision towers of multimodal models have k_proj and v_proj, too, and stay float.
_LANGUAGE_KV = "*language_model.*k_proj *language_model.*v_proj"
_DENSE_MLP = "*mlp.gate_proj *mlp.up_proj *mlp.down_proj"
_QWEN4 = (
    "lm_head model.visual.* mtp.* *mlp.gate *shared_expert_gate* *.linear_attn.*"
    " *.self_attn.* *hyper_connection* *.ple.*"
)

#: Globs of query layers whose names do not follow those of the keys.
_QUERIES = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32"),
        "*q_a_proj *q_b_proj",
    ),
    **dict.fromkeys(
        ("glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "kimi_k25"),
        "*q_a_proj",
    ),
    "deepseek_v4": "*wq_a *wq_b",
    "glm5_next": "*self_attn.q_b_proj",
    "kimi_k3": "*self_attn.q_proj *self_attn.q_a_proj *self_attn.q_b_proj",
    "mllama": "*self_attn.q_proj",
}

#: Globs of layers that compute keys and values, and of layers that stay float, separated by
#: spaces.
FAMILIES: dict[str, tuple[str, str]] = {
    # One layer computes queries, keys and values.
    "chatglm": ("*query_key_value", "transformer.output_layer"),
    "cohere": (_KV, _HEAD),
    "dbrx": ("*Wqkv", "lm_head *router.layer"),
    # The gates are routers of experts, whose few outputs decide which experts run.
    "deepseek": (_KV, "lm_head *.gate"),
    "deepseek_v2": ("*kv_b_proj", "lm_head *self_attn* *mlp.gate"),
    "deepseek_v3": ("*kv_b_proj", "lm_head *self_attn* *mlp.gate"),
    "deepseek_v32": ("*kv_b_proj", "lm_head *mlp.gate model.layers.61.* *self_attn*"),
    "deepseek_v4": ("*wkv", "*attn* embed head *ffn.gate* hc_* mtp.*"),
    "deepseek_vl_v2": (
        _KV,
        "lm_head model.sam_model* model.vision_model* model.projector*",
    ),
    "gemma2": (_KV, _HEAD),
    "gemma3": (_LANGUAGE_KV, "*vision_tower* *multi_modal_projector* *lm_head"),
    "gemma3_text": (_KV, "*lm_head"),
    "gemma4": (
        _LANGUAGE_KV,
        (
            "*vision_tower* *embed_vision* *audio_tower* *embed_audio*"
            " *multi_modal_projector* *lm_head *router.proj"
        ),
    ),
    "gemma4_unified": (
        _LANGUAGE_KV,
        "*embed_vision* *vision_embedder* *embed_audio* *lm_head",
    ),
    "glm4_moe": (_KV, f"lm_head *mlp.gate *self_attn* *shared_experts.* {_DENSE_MLP}"),
    "glm4_moe_lite": (_LATENT_KV, "lm_head *self_attn* *mlp.gate"),
    "glm_moe_dsa": (_LATENT_KV, f"*self_attn* *mlp.gate *lm_head {_DENSE_MLP}"),
    "glm5_next": (
        "*self_attn.kv_b_proj",
        (
            f"*self_attn* *mlp.gate {_DENSE_MLP} *visual* *lm_head*"
            " model.language_model.layers.45.*"
        ),
    ),
    "gptj": (_KV, _HEAD),
    "gpt_oss": (_KV, "lm_head *router*"),
    "granitemoehybrid": (_KV, "lm_head *router*"),
    "grok-1": (_KV, "lm_head *.gate"),
    "hunyuan_v1_dense": (_KV, _HEAD),
    "instella": (_KV, _HEAD),
    "kimi_k2": (
        _LATENT_KV,
        f"*self_attn* *mlp.gate *lm_head {_DENSE_MLP} *shared_experts*",
    ),
    "kimi_k25": (
        _LATENT_KV,
        (
            f"*self_attn* *mlp.gate *lm_head {_DENSE_MLP} *shared_experts*"
            " *mm_projector* *vision_tower*"
        ),
    ),
    "kimi_k3": (
        "*self_attn.k_proj *self_attn.v_proj *self_attn.kv_a_proj_with_mqa",
        (
            "*block_sparse_moe.gate* *block_sparse_moe.routed_expert_down_proj*"
            " *block_sparse_moe.routed_expert_up_proj* *lm_head* *vision_tower*"
            " *mm_projector* *self_attention_res_proj* *mlp_res_proj*"
            " *output_attn_res_proj* *self_attn.*_conv1d*"
        ),
    ),
    "lfm2": (
        "*self_attn.k_proj *self_attn.v_proj",
        "lm_head *conv.in_proj *conv.out_proj",
    ),
    "llama": (_KV, _HEAD),
    "llama4": (
        "*language_model.*.k_proj *language_model.*.v_proj",
        "multi_modal_projector* *feed_forward.router vision_model* *lm_head",
    ),
    "minimax_m2": (_KV, "lm_head *block_sparse_moe.gate* *self_attn*"),
    "minimax_m3_vl": (
        _LANGUAGE_KV,
        (
            "*lm_head *vision_tower* *multi_modal_projector* *patch_merge_mlp*"
            " *block_sparse_moe.gate *self_attn*"
        ),
    ),
    "mistral": (_KV, _HEAD),
    "mixtral": (_KV, "lm_head *.gate"),
    "mllama": (_LANGUAGE_KV, "*lm_head *patch_embedding multi_modal_projector"),
    "muse_glimmer": (
        _LANGUAGE_KV,
        "*vision_tower* *vision_adapter* *vision_projection* lm_head",
    ),
    "olmo": (_KV, _HEAD),
    "opt": (_KV, _HEAD),
    "phi": (_KV, _HEAD),
    "phi3": ("*qkv_proj", _HEAD),
    "qwen": ("*c_attn", _HEAD),
    "qwen2": (_KV, _HEAD),
    "qwen2_moe": (_KV, "lm_head *.gate *.shared_expert_gate"),
    "qwen3": (_KV, _HEAD),
    "qwen3_moe": (_KV, "lm_head *.gate"),
    "qwen3_next": (
        "*qkvz",
        (
            "lm_head mtp.fc *linear_attn.in_proj_ba *linear_attn.in_proj_qkvz *mlp.gate"
            " *mlp.shared_expert_gate *self_attn.k_proj *self_attn.q_proj"
            " *self_attn.v_proj"
        ),
    ),
    "qwen3_vl_moe": (_KV, "lm_head *mlp.gate *.visual.*"),
    "qwen3_5_moe": (
        _KV,
        (
            "lm_head model.visual.* mtp.* *mlp.gate *shared_expert_gate*"
            " *.linear_attn.* *.self_attn.* *.shared_expert.*"
        ),
    ),
    "qwen3_5": ("*self_attn.k_proj *self_attn.v_proj", "lm_head model.visual.* *mtp*"),
    "qwen4_exp": ("*self_attn.k_proj *self_attn.v_proj", _QWEN4),
    "qwen4_exp_text": ("*self_attn.k_proj *self_attn.v_proj", _QWEN4),
}


def queries_of(model_type: str) -> list[str]:
    """Return globs of the layers that compute queries, alone or with keys and values.

    >>> queries_of("gemma3"), queries_of("phi3")
    (['*language_model.*q_proj'], ['*qkv_proj'])
    """
    # Keys come first in each row; a fused layer computes queries as well.
    key_glob = FAMILIES[model_type][0].split()[0]
    if key_glob.endswith("k_proj"):
        usual = f"{key_glob.removesuffix('k_proj')}q_proj"
    else:
        usual = key_glob
    return _QUERIES.get(model_type, usual).split()
