"""Language models of given shapes with generated weights, or without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

#: Bytes of a file of the written checkpoints.
SHARD = 2_000_000_000
#: Random numbers from which weights are taken.
_ROW = 1 << 23
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Size:
    """Shape of a language model.

    Attributes:
        blocks: number of decoder blocks.
        hidden: values of a hidden state.
        wide: values between the layers of a dense MLP.
        heads: heads of queries, and of keys and values.
        vocabulary: number of tokens.
        experts: number of experts of DeepSeek-V3's blocks; 0 for a Llama. The first block of
            DeepSeek-V3 is dense.
    """

    blocks: int
    hidden: int
    wide: int
    heads: tuple[int, int]
    vocabulary: int
    experts: int = 0

    def with_(self, **changes: Any) -> Size:
        """Return a copy with other values."""
        return replace(self, **changes)

    def config(self, dtype: str = "bfloat16") -> Any:
        """Return the configuration for transformers."""
        from transformers import AutoConfig

        common = {
            "dtype": dtype,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.wide,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads[0],
            "num_key_value_heads": self.heads[1],
            "max_position_embeddings": 4096,
        }
        if not self.experts:
            return AutoConfig.for_model(
                "llama", architectures=["LlamaForCausalLM"], **common
            )
        return AutoConfig.for_model(
            "deepseek_v3",
            architectures=["DeepseekV3ForCausalLM"],
            moe_intermediate_size=2048,
            n_routed_experts=self.experts,
            num_experts_per_tok=8,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            **common,
        )


def small_llama(blocks: int, hidden: int, vocabulary: int = 32_000) -> Size:
    """Return a shape with the proportions of TinyLlama."""
    heads = hidden // 64
    keys = max(1, heads // 8)
    return Size(blocks, hidden, hidden * 11 // 4, (heads, keys), vocabulary)


#: Sizes by name: TinyLlama 1.1B, Llama 3 8B and 70B, Kimi K2.
SIZES = {
    "1B": Size(22, 2048, 5632, (32, 4), 32_000),
    "8B": Size(32, 4096, 14_336, (32, 8), 128_256),
    "70B": Size(80, 8192, 28_672, (64, 8), 128_256),
    "1T": Size(61, 7168, 18_432, (64, 64), 163_840, experts=384),
}


def write(folder: Path, config: Any) -> int:
    """Write a model with random weights, one tensor in memory at a time.

    Weights are parts of one row of random numbers, from random places on.

    Returns:
        The number of weights in the largest block.
    """
    import torch

    from quark_onnx.torch.checkpoints.meta_model import skeleton_of
    from quark_onnx.torch.checkpoints.safetensors_io import Writer

    model = skeleton_of(config)
    generator = torch.Generator().manual_seed(0)
    row = torch.empty(_ROW).normal_(0, 0.02, generator=generator)
    with Writer(folder, shard=SHARD) as writer:
        for name, parameter in model.named_parameters():
            values = torch.ones(parameter.shape, dtype=parameter.dtype)
            if parameter.ndim > 1:
                _fill(values.view(-1), row.to(parameter.dtype), generator)
            writer.add(name, values)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                writer.add(name, torch.zeros(buffer.shape, dtype=buffer.dtype))
        config.save_pretrained(writer.staging)
    return largest_block(model)


def _fill(values: Any, row: Any, generator: Any) -> None:
    """Fill a vector with parts of a row."""
    import torch

    for part in values.split(len(row) // 2):
        start = int(torch.randint(len(row) // 2, (1,), generator=generator))
        part.copy_(row[start : start + len(part)])


def write_headers(folder: Path, config: Any) -> int:
    """Write a checkpoint of which files hold the headers, and holes instead of weights.

    Returns:
        The number of weights in the largest block.
    """
    from quark_onnx.torch.checkpoints.meta_model import skeleton_of

    folder.mkdir(parents=True)
    model = skeleton_of(config)
    places = dict[str, str]()
    for number, part in zip(count(), _shards(model), strict=False):
        file = folder / f"model-{number:05}.safetensors"
        _write_header(file, part)
        places |= dict.fromkeys(part, file.name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    config.save_pretrained(folder)
    return largest_block(model)


def largest_block(model: Any) -> int:
    """Return the number of weights in the largest block."""
    from quark_onnx.torch.models.structure import blocks_of

    sizes = []
    for block in blocks_of(model).values():
        sizes.append(sum(each.numel() for each in block.parameters()))
    return max(sizes)


def _shards(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the tensors of each file of a model."""
    part = dict[str, Any]()
    size = 0
    for name, tensor in model.state_dict().items():
        if part and size + tensor.nbytes > SHARD:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _write_header(file: Path, tensors: dict[str, Any]) -> None:
    """Write a safetensors file without the bytes of its tensors."""
    entries = dict[str, Any]()
    end = 0
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {
            "dtype": _NAMES[kind],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    header = json.dumps(entries).encode()
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + end)
