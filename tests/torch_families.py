"""Small configurations of the families of language models that are quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
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
            # as many inputs as a group has: narrower layers stay float
            "kv_lora_rank": 32,
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
_ENCODER = {name: value for name, value in _BASE.items() if "token" not in name} | {
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")},
    "max_position_embeddings": 64,
}
_STATES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 8,
}
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_SHARED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_DELTA = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}

#: By class: the model type, its settings and the names of the heads' layers.
TASKS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "LlamaForCausalLM": ("llama", _DENSE, ["lm_head"]),
    "LlamaForSequenceClassification": ("llama", _DENSE, ["score"]),
    "LlamaForTokenClassification": ("llama", _DENSE, ["score"]),
    "LlamaForQuestionAnswering": ("llama", _DENSE, ["qa_outputs"]),
    "Qwen2ForSequenceClassification": ("qwen2", _DENSE, ["score"]),
    "GPT2ForSequenceClassification": ("gpt2", _GPT, ["score"]),
    "OPTForCausalLM": (
        "opt",
        _BASE | {"ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 32},
        ["lm_head"],
    ),
    "BertModel": ("bert", _ENCODER, ["pooler.dense"]),
    "BertForSequenceClassification": (
        "bert",
        _ENCODER,
        ["bert.pooler.dense", "classifier"],
    ),
    "BertForTokenClassification": ("bert", _ENCODER, ["classifier"]),
    "BertForQuestionAnswering": ("bert", _ENCODER, ["qa_outputs"]),
    "BertForMaskedLM": (
        "bert",
        _ENCODER,
        ["cls.predictions.transform.dense", "cls.predictions.decoder"],
    ),
    "RobertaForSequenceClassification": (
        "roberta",
        _ENCODER,
        ["classifier.dense", "classifier.out_proj"],
    ),
    "ModernBertForSequenceClassification": (
        "modernbert",
        _ENCODER
        | dict.fromkeys(
            (f"{name}_token_id" for name in ("bos", "eos", "cls", "sep")), 1
        ),
        ["head.dense", "classifier"],
    ),
    "ViTForImageClassification": (
        "vit",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
        ["classifier"],
    ),
    "T5ForConditionalGeneration": ("t5", _T5, ["lm_head"]),
    # their forward depends on values, so that it cannot be traced
    "T5ForSequenceClassification": (
        "t5",
        _T5,
        ["classification_head.dense", "classification_head.out_proj"],
    ),
    "BartForSequenceClassification": (
        "bart",
        _BART,
        ["classification_head.dense", "classification_head.out_proj"],
    ),
    "MambaForCausalLM": ("mamba", _STATES, ["lm_head"]),
    "FalconMambaForCausalLM": ("falcon_mamba", _STATES, ["lm_head"]),
    "JambaForCausalLM": (
        "jamba",
        _DENSE
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 32,
        },
        ["lm_head"],
    ),
    "Gemma3nForCausalLM": (
        "gemma3n_text",
        _DENSE
        | {
            "head_dim": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "laurel_rank": 32,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        ["lm_head"],
    ),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _MOE | {"head_dim": 16}, ["lm_head"]),
    "MixtralForCausalLM": ("mixtral", _DENSE | {"num_local_experts": 4}, ["lm_head"]),
    "DeepseekV3ForCausalLM": ("deepseek_v3", _MOE | _LATENT | _SHARED, ["lm_head"]),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        _MOE | _SHARED | {"head_dim": 16},
        ["lm_head"],
    ),
    "Qwen3NextForCausalLM": (
        "qwen3_next",
        _MOE | _DELTA | {"shared_expert_intermediate_size": 32},
        ["lm_head"],
    ),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", _DENSE | _DELTA, ["lm_head"]),
}
#: Layers for multi-token prediction (MTP), which files have and the classes of transformers lack.
MTP: dict[str, tuple[str, ...]] = {
    "DeepseekV3ForCausalLM": (
        "model.layers.2.eh_proj",
        "model.layers.2.self_attn.o_proj",
        "model.layers.2.shared_head.head",
    ),
    "Glm4MoeForCausalLM": ("model.layers.2.eh_proj", "model.layers.2.mlp.gate"),
    "Qwen3NextForCausalLM": ("mtp.fc", "mtp.layers.0.mlp.experts.0.up_proj"),
    "Qwen3_5ForCausalLM": ("mtp.fc", "mtp.layers.0.self_attn.q_proj"),
}


def task_model(name: str) -> Any:
    """The model of a class of ``TASKS`` with random weights."""
    kind, settings, _ = TASKS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(
        AutoConfig.for_model(kind, **settings)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
    return model.eval()


def task_folder(name: str, folder: Path) -> Path:
    """The checkpoint of a class of ``TASKS``, with its layers for multi-token prediction."""
    task_model(name).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= {f"{layer}.weight": torch.randn(64, 64) for layer in MTP.get(name, ())}
    save_file(tensors, file, {"format": "pt"})
    return folder


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
