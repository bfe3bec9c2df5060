"""Grok-1: two of several experts for each token, norms in front of and behind attention and
experts, bounded logits of attention, and factors of embeddings, attention and logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_grok1 import Grok1Config


def rotated(x: Any, angles: Any) -> Any:
    """The halves of each head, turned.

    Args:
        x: (samples, heads, tokens, features).
        angles: (tokens, features).
    """
    first, second = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat(
        (-second, first), -1
    ) * angles.sin().to(x.dtype)


class MultiHeadAttention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer, self.size = layer, config.hidden_size // config.num_attention_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.factor, self.bound = config.attn_output_multiplier, config.max_attn_value
        width, few = config.hidden_size, config.num_key_value_heads * self.size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, few, bias=False)
        self.v_proj = nn.Linear(width, few, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, hidden_states: Any, mask: Any, angles: Any, past_key_values: Any
    ) -> Any:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (
            layer(hidden_states).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in layers
        )
        query, key = rotated(query, angles), rotated(key, angles)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer)
        key, value = (each.repeat_interleave(self.groups, 1) for each in (key, value))
        scores = (query @ key.transpose(2, 3)).float() * self.factor
        scores = (self.bound * torch.tanh(scores / self.bound)).masked_fill(
            ~mask, float("-inf")
        )
        return self.o_proj(
            (scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(-2)
        )


class MoeMLP(nn.Module):
    """``linear`` is the gate, ``linear_1`` comes last."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(
            config.hidden_size, config.intermediate_size, bias=False
        )
        self.linear_v = nn.Linear(
            config.hidden_size, config.intermediate_size, bias=False
        )
        self.linear_1 = nn.Linear(
            config.intermediate_size, config.hidden_size, bias=False
        )

    def forward(self, hidden_states: Any) -> Any:
        return self.linear_1(
            F.gelu(self.linear(hidden_states)) * self.linear_v(hidden_states)
        )


class MoeBlock(nn.Module):
    """The weights of the chosen experts are shares of all of them, and do not sum to one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            [MoeMLP(config) for _ in range(config.num_experts)]
        )

    def forward(self, hidden_states: Any) -> Any:
        tokens = hidden_states.flatten(0, -2)
        weights, chosen = self.gate(tokens).float().softmax(-1).topk(self.top, -1)
        total = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == index)
            if len(rows):
                total.index_add_(
                    0,
                    rows,
                    expert(tokens[rows]) * weights[rows, places, None].to(tokens.dtype),
                )
        return total.view_as(hidden_states)


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.attn = MultiHeadAttention(config, layer)
        self.moe_block = MoeBlock(config)
        for name in (
            "pre_attn_norm",
            "post_attn_norm",
            "pre_moe_norm",
            "post_moe_norm",
        ):
            self.add_module(name, nn.RMSNorm(config.hidden_size, eps=1e-5))

    def forward(
        self, hidden_states: Any, mask: Any, angles: Any, past_key_values: Any = None
    ) -> Any:
        attended = self.attn(
            self.pre_attn_norm(hidden_states), mask, angles, past_key_values
        )
        hidden_states = hidden_states + self.post_attn_norm(attended)
        return (
            hidden_states
            + self.post_moe_norm(self.moe_block(self.pre_moe_norm(hidden_states))),
        )


class Grok1PretrainedModel(PreTrainedModel):
    config_class = Grok1Config
    base_model_prefix = "model"


class Grok1Model(Grok1PretrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.post_init()

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
        angles = torch.cat((angles, angles), -1)
        mask = places[None] <= places[past:, None]
        hidden_states = (
            self.embed_tokens(input_ids) * self.config.embedding_multiplier_scale
        )
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, mask, angles, past_key_values=past_key_values
            )[0]
        return self.norm(hidden_states), past_key_values


class Grok1ModelForCausalLM(Grok1PretrainedModel, GenerationMixin):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Grok1Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Any,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        hidden_states, past_key_values = self.model(
            input_ids, past_key_values, use_cache
        )
        logits = self.lm_head(hidden_states) * self.config.output_multiplier_scale
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
