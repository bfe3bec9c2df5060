"""The configuration of ChatGLM3."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig


class ChatGLMConfig(PreTrainedConfig):
    """The settings of THUDM/chatglm3-6b that change what is computed, by their names and with their
    values there.
    """

    model_type = "chatglm"
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "vocab_size": "padded_vocab_size",
        "max_position_embeddings": "seq_length",
    }

    def __init__(
        self,
        num_layers: int = 28,
        padded_vocab_size: int = 65024,
        hidden_size: int = 4096,
        ffn_hidden_size: int = 13696,
        kv_channels: int = 128,
        num_attention_heads: int = 32,
        multi_query_group_num: int = 2,
        seq_length: int = 8192,
        **kwargs: Any,
    ) -> None:
        self.num_layers = num_layers
        self.padded_vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.kv_channels = kv_channels
        self.num_attention_heads = num_attention_heads
        self.multi_query_group_num = multi_query_group_num
        self.seq_length = seq_length
        super().__init__(**{"tie_word_embeddings": False} | kwargs)
