"""The configuration of Grok-1."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class Grok1Config(PreTrainedConfig):
    """The settings of xai-org/grok-1 that change what is computed, with the values there, by the
    names of its ports.
    """

    model_type = "grok-1"

    def __init__(
        self,
        vocab_size: int = 131072,
        hidden_size: int = 6144,
        intermediate_size: int = 32768,
        num_hidden_layers: int = 64,
        num_attention_heads: int = 48,
        num_key_value_heads: int = 8,
        num_experts: int = 8,
        num_experts_per_tok: int = 2,
        attn_output_multiplier: float = 0.08838834764831845,
        max_attn_value: float = 30.0,
        embedding_multiplier_scale: float = 78.38367176906169,
        output_multiplier_scale: float = 0.5773502691896257,
        max_position_embeddings: int = 8192,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.attn_output_multiplier = attn_output_multiplier
        self.max_attn_value = max_attn_value
        self.embedding_multiplier_scale = embedding_multiplier_scale
        self.output_multiplier_scale = output_multiplier_scale
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**{"tie_word_embeddings": False} | kwargs)
