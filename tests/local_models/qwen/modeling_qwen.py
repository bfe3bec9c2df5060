"""The first Qwen: queries, keys and values come from one layer, and the intermediate size counts
two layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_qwen import QWenConfig


def rotated(x: Any, angles: Any) -> Any:
    """The halves of each head, turned.

    Args:
        x: (samples, tokens, heads, features).
        angles: (1, tokens, 1, features).
    """
    first, second = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat(
        (-second, first), -1
    ) * angles.sin().to(x.dtype)


class QWenAttention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.num_attention_heads
        self.c_attn = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=True)
        self.c_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: Any, rotary_pos_emb: Any, mask: Any, past_key_values: Any
    ) -> Any:
        parts = self.c_attn(hidden_states).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        query, key = rotated(query, rotary_pos_emb), rotated(key, rotary_pos_emb)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer)
        return self.c_proj(
            F.scaled_dot_product_attention(query, key, value, mask)
            .transpose(1, 2)
            .flatten(-2)
        )


class QWenMLP(nn.Module):
    """``w2`` is the gate."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.intermediate_size // 2
        self.w1 = nn.Linear(config.hidden_size, width, bias=False)
        self.w2 = nn.Linear(config.hidden_size, width, bias=False)
        self.c_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_states: Any) -> Any:
        return self.c_proj(self.w1(hidden_states) * F.silu(self.w2(hidden_states)))


class QWenBlock(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = QWenAttention(config, layer)
        self.ln_2 = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = QWenMLP(config)

    def forward(
        self,
        hidden_states: Any,
        rotary_pos_emb: Any,
        attention_mask: Any,
        past_key_values: Any,
    ) -> Any:
        attended = self.attn(
            self.ln_1(hidden_states), rotary_pos_emb, attention_mask, past_key_values
        )
        hidden_states = hidden_states + attended
        return (hidden_states + self.mlp(self.ln_2(hidden_states)),)


class QWenPreTrainedModel(PreTrainedModel):
    config_class = QWenConfig
    base_model_prefix = "transformer"


class QWenModel(QWenPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(
            [QWenBlock(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.ln_f = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.wte

    def forward(
        self, input_ids: Any, past_key_values: Any = None, use_cache: bool | None = None
    ) -> Any:
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        places = torch.arange(past + input_ids.shape[1], device=input_ids.device)
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        angles = places[past:, None] * 10000.0 ** (
            -torch.arange(half, device=input_ids.device) / half
        )
        angles = torch.cat((angles, angles), -1)[None, :, None]
        mask = places[None] <= places[past:, None]
        hidden_states = self.wte(input_ids)
        for block in self.h:
            hidden_states = block(
                hidden_states,
                rotary_pos_emb=angles,
                attention_mask=mask,
                past_key_values=past_key_values,
            )[0]
        return self.ln_f(hidden_states), past_key_values


class QWenLMHeadModel(QWenPreTrainedModel, GenerationMixin):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer = QWenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(
        self,
        input_ids: Any,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        hidden_states, past_key_values = self.transformer(
            input_ids, past_key_values, use_cache
        )
        return CausalLMOutputWithPast(
            logits=self.lm_head(hidden_states), past_key_values=past_key_values
        )
