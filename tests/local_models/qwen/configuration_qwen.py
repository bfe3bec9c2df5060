"""The configuration of the first Qwen."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig


class QWenConfig(PreTrainedConfig):
    """The settings of Qwen/Qwen-7B that change what is computed, by their names and with their
    values there.
    """

    model_type = "qwen"
    attribute_map: ClassVar[dict[str, str]] = {"max_position_embeddings": "seq_length"}

    def __init__(
        self,
        vocab_size: int = 151936,
        hidden_size: int = 4096,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 32,
        intermediate_size: int = 22016,
        layer_norm_epsilon: float = 1e-6,
        seq_length: int = 8192,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.layer_norm_epsilon = layer_norm_epsilon
        self.seq_length = seq_length
        super().__init__(**{"tie_word_embeddings": False} | kwargs)
