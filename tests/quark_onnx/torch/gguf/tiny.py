"""Small random models in Hugging Face folders, and llama.cpp to run what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save(
    folder: Path, model_type: str = "llama", shard: str = "1GB", **settings: Any
) -> Any:
    """A model whose every tensor matters, in ``folder``."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn_like(parameter)
            if parameter.ndim == 1:
                values = 0.3 * values + (
                    1.0 if "norm" in name and model_type != "gemma" else 0.0
                )
            elif "embed" not in name:
                values *= 2 / parameter.shape[-1] ** 0.5
            parameter.copy_(values)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tensors(path: Path) -> dict[str, Any]:
    """The tensors of a GGUF file by name, as float32."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = values.reshape(
            tuple(int(length) for length in tensor.shape[::-1])
        ).copy()
    return found


def metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file by key."""
    return {
        key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()
    }


def llama(
    path: Path, monkeypatch: pytest.MonkeyPatch, context: int = 128, **settings: Any
) -> Any:
    """The model of a GGUF file in llama.cpp; skips where llama-cpp-python is not installed."""
    library = pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed"
    )
    defaults = library.llama_cpp.llama_model_default_params

    def plain() -> (
        Any
    ):  # the repacked kernels need matrix units, which not every virtual machine gives
        params = defaults()
        params.use_extra_bufts = False
        return params

    monkeypatch.setattr(library.llama_cpp, "llama_model_default_params", plain)
    floats = {"type_k": 0, "type_v": 0}  # of the cache: GGML's number for float32
    return library.Llama(
        str(path),
        n_ctx=context,
        n_batch=context,
        n_threads=1,
        logits_all=True,
        verbose=False,
        **floats,
        **settings,
    )


def logits(model: Any, ids: Any) -> Any:
    """(length, vocabulary) float32 of one text."""
    model.reset()
    model.eval([int(token) for token in ids])
    return np.array(model.scores[: len(ids)])
