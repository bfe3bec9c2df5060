"""ChatGLM3: hidden states have tokens in front of samples, queries, keys and values come from one
layer, half of each head is rotated, and the head is a part of the transformer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_chatglm import ChatGLMConfig


def rotated(x: Any, angles: Any) -> Any:
    """Pairs of neighbours in the first half of each head, turned.

    Args:
        x: (tokens, samples, heads, features).
        angles: (tokens, 1, 1, a quarter of the features).
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half:2], x[..., 1:half:2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turned = torch.stack(
        (first * cos - second * sin, second * cos + first * sin), -1
    ).flatten(-2)
    return torch.cat((turned, x[..., half:]), -1)


class SelfAttention(nn.Module):
    """Groups of heads have keys and values together."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.groups = (
            layer,
            config.num_attention_heads,
            config.multi_query_group_num,
        )
        self.size = config.kv_channels
        width = self.heads * self.size
        self.query_key_value = nn.Linear(
            config.hidden_size, width + 2 * self.groups * self.size, bias=True
        )
        self.dense = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: Any, mask: Any, angles: Any, past_key_values: Any
    ) -> Any:
        mixed = self.query_key_value(hidden_states).unflatten(-1, (-1, self.size))
        query, key, value = mixed.split((self.heads, self.groups, self.groups), -2)
        query, key = rotated(query, angles), rotated(key, angles)
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer)
        key, value = (
            each.repeat_interleave(self.heads // self.groups, 1)
            for each in (key, value)
        )
        found = F.scaled_dot_product_attention(query, key, value, mask)
        return self.dense(found.permute(2, 0, 1, 3).flatten(-2))


class MLP(nn.Module):
    """The gate is the first half of what the first layer computes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(
            config.hidden_size, 2 * config.ffn_hidden_size, bias=False
        )
        self.dense_4h_to_h = nn.Linear(
            config.ffn_hidden_size, config.hidden_size, bias=False
        )

    def forward(self, hidden_states: Any) -> Any:
        gate, up = self.dense_h_to_4h(hidden_states).chunk(2, -1)
        return self.dense_4h_to_h(F.silu(gate) * up)


class GLMBlock(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.self_attention = SelfAttention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.mlp = MLP(config)

    def forward(
        self, hidden_states: Any, mask: Any, angles: Any, past_key_values: Any = None
    ) -> Any:
        attended = self.self_attention(
            self.input_layernorm(hidden_states), mask, angles, past_key_values
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(
            self.post_attention_layernorm(hidden_states)
        ), past_key_values


class Embedding(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(
            config.padded_vocab_size, config.hidden_size
        )

    def forward(self, input_ids: Any) -> Any:
        return self.word_embeddings(input_ids).transpose(0, 1).contiguous()


class GLMTransformer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [GLMBlock(config, layer) for layer in range(config.num_layers)]
        )
        self.final_layernorm = nn.RMSNorm(config.hidden_size, eps=1e-5)

    def forward(
        self, hidden_states: Any, mask: Any, angles: Any, past_key_values: Any
    ) -> Any:
        for layer in self.layers:
            hidden_states, _ = layer(
                hidden_states, mask, angles, past_key_values=past_key_values
            )
        return self.final_layernorm(hidden_states)


class ChatGLMPreTrainedModel(PreTrainedModel):
    config_class = ChatGLMConfig
    base_model_prefix = "transformer"


class ChatGLMModel(ChatGLMPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding = Embedding(config)
        self.encoder = GLMTransformer(config)
        self.output_layer = nn.Linear(
            config.hidden_size, config.padded_vocab_size, bias=False
        )
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.embedding.word_embeddings

    def forward(
        self, input_ids: Any, past_key_values: Any = None, use_cache: bool | None = None
    ) -> Any:
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        places = torch.arange(past + input_ids.shape[1], device=input_ids.device)
        quarter = self.config.kv_channels // 4
        frequencies = 10000.0 ** (
            -torch.arange(quarter, device=input_ids.device) / quarter
        )
        angles = (places[past:, None] * frequencies)[:, None, None]
        mask = places[None] <= places[past:, None]
        return self.encoder(
            self.embedding(input_ids), mask, angles, past_key_values
        ), past_key_values


class ChatGLMForConditionalGeneration(ChatGLMPreTrainedModel, GenerationMixin):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        self.post_init()

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
        logits = (
            self.transformer.output_layer(hidden_states).transpose(0, 1).contiguous()
        )
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
