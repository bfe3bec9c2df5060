"""Small random models of transformers, and tokens for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 96


def llama(**settings: Any) -> Any:
    """A configuration of two small blocks with fewer keys than queries."""
    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return AutoConfig.for_model("llama", **(base | settings))


def made(config: Any, dtype: Any = torch.float32, seed: int = 0) -> Any:
    """The model of a configuration with random weights that matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=True
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
    return model


def tokens(count: int = 3, length: int = 12) -> list[Any]:
    """Batches of token ids."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, VOCABULARY, (1, length), generator=generator)
        for _ in range(count)
    ]


def logits(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=batch).logits.float()


def saved(model: Any, folder: Path, **settings: Any) -> Path:
    """The folder where transformers writes a model."""
    model.save_pretrained(folder, **settings)
    return folder


def with_tokenizer(folder: Path, size: int = VOCABULARY) -> Path:
    """The folder of a model, with a tokenizer of single characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    signs = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    vocabulary = {sign: place for place, sign in enumerate(["<s>", *signs])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>"
    ).save_pretrained(folder)
    return folder


def data_folder() -> Path:
    """The folder of real models; the test is skipped without it."""
    folder = os.environ.get("QUARK_ONNX_DATA")
    if not folder or not (Path(folder) / "llm").is_dir():
        pytest.skip("QUARK_ONNX_DATA names no folder with llm/ in it")
    return Path(folder)
