"""Architectures that GGUF files support, and the mapping of checkpoint tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quark_onnx.common.errors import ModelError, nearest
from quark_onnx.torch.runtime.safetensors_header import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Architecture:
    """Architecture of llama.cpp for a model type of transformers.

    Attributes:
        name: llama.cpp's name.
        interleaved: whether the rotary embedding rotates adjacent features, so that rows of q and k
            are permuted.
        norm: constant that is added to norm weights.
        activations: supported activations; llama.cpp computes a fixed one regardless of
            config.json.
    """

    name: str
    interleaved: bool = False
    norm: float = 0.0
    activations: tuple[str, ...] = ("silu",)


# By the model type of transformers. llama.cpp runs Mistral and Mixtral as llama.
ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),
    "mistral": Architecture("llama", interleaved=True),
    "mixtral": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe"),
    "phi3": Architecture("phi3"),
    # Norms of Gemma multiply by 1 + weight in transformers, and by the stored weight in llama.cpp.
    "gemma": Architecture("gemma", norm=1.0, activations=("gelu_pytorch_tanh", "gelu")),
}
_FLOATS = {"F64", "F32", "F16", "BF16"}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ROTATED = re.compile(r"\.attn_([qk])\.")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
#: Checkpoint tensors that are no weights, and that loaders compute.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$")


@dataclass(frozen=True)
class TargetTensor:
    """Tensor of the GGUF file.

    Attributes:
        name: llama.cpp's name.
        sources: the tensor of the checkpoint; or the tensors of all experts in order, which are
            stacked.
    """

    name: str
    sources: tuple[StoredTensor, ...]

    @property
    def stacked(self) -> bool:
        """Return whether the tensor stacks the weights of experts."""
        return "_exps." in self.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor in torch's order."""
        one = self.sources[0].shape
        if not self.stacked:
            return one
        return (len(self.sources), *one)

    @property
    def routes(self) -> bool:
        """Return whether the tensor is the weight of an expert router."""
        return ".ffn_gate_inp." in self.name

    @property
    def in_block(self) -> bool:
        """Return whether the tensor belongs to a decoder block."""
        return self.name.startswith("blk.")

    @property
    def is_norm(self) -> bool:
        """Return whether the tensor is the weight of a norm."""
        return self.name.endswith("_norm.weight")

    def order(self, config: PreTrainedConfig) -> Any:
        """Return the row permutation of q and k in an interleaved architecture.

        transformers rotates row i of a head with row i + n/2, llama.cpp rotates rows 2i and 2i + 1.

        Args:
            config: the transformers configuration.

        Returns:
            The indices of the source rows; None for other tensors.

        Raises:
            ModelError: the number of rows does not match the heads.
        """
        match = _ROTATED.search(self.name)
        if match is None:
            return None
        heads = (
            config.num_attention_heads
            if match[1] == "q"
            else config.num_key_value_heads
        )
        rows = self.sources[0].shape[0]
        if rows != heads * head_dim(config):
            raise ModelError(
                f"{self.sources[0].name!r} has {rows} rows; the {heads} heads of"
                f" {head_dim(config)} in config.json have others",
            )
        # (heads, half, features / 2) to (heads, features / 2, half).
        return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).ravel()


def architecture_of(model_type: object) -> Architecture:
    """Return the architecture of a model type.

    Raises:
        ModelError: there is none.

    >>> architecture_of("mistral").name
    'llama'
    """
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        hint = nearest(str(model_type), list(ARCHITECTURES))
        raise ModelError(
            f"models of type {model_type!r} cannot be written as GGUF{hint}; these can:"
            f" {', '.join(ARCHITECTURES)}",
        )
    return architecture


def head_dim(config: PreTrainedConfig) -> int:
    """Return the number of features of an attention head."""
    return int(
        # Not every configuration has the entry.
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
    )


def targets(
    tensors: Iterable[StoredTensor],
    architecture: Architecture,
    config: PreTrainedConfig,
) -> list[TargetTensor]:
    """Return the tensors of the file, in the order of the checkpoint's names.

    Raises:
        ModelError: llama.cpp's architecture does not support a tensor, a tensor is missing, or a
            tensor holds no floats.
    """
    import gguf

    arch = gguf.MODEL_ARCH[architecture.name.upper()]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    sources_by_name: dict[str, list[tuple[int, StoredTensor]]] = {}
    # In natural order, so that expert 10 follows expert 9 in a stack.
    for stored in sorted(tensors, key=lambda stored: _natural(stored.name)):
        # llama.cpp takes the embedding for a tied head.
        if _DERIVED.search(stored.name) or (
            config.tie_word_embeddings and stored.name == "lm_head.weight"
        ):
            continue
        expert = _EXPERT.search(stored.name)
        name = names.get_name(
            # gguf maps the names of stacks, without the index of an expert.
            _EXPERT.sub(".experts.", stored.name),
            try_suffixes=(".weight", ".bias"),
        )
        if name is None:
            raise ModelError(
                f"{stored.path}: llama.cpp's architecture {architecture.name!r} with"
                f" {config.num_hidden_layers} blocks has no place for the tensor"
                f" {stored.name!r}",
            )
        if stored.dtype not in _FLOATS:
            raise ModelError(
                f"{stored.path}: the tensor {stored.name!r} is of type {stored.dtype}; the"
                " floats of the model are needed",
            )
        sources_by_name.setdefault(name, []).append(
            (int(expert[1]) if expert else 0, stored)
        )
    _check(sources_by_name, config)
    return [
        TargetTensor(name, tuple(stored for _, stored in parts))
        for name, parts in sources_by_name.items()
    ]


def _check(
    sources_by_name: dict[str, list[tuple[int, StoredTensor]]], config: PreTrainedConfig
) -> None:
    """Raise ModelError for missing tensors.

    Each block needs the tensors of the first one, each stack all experts, and the file the
    embedding and the final norm.
    """
    # The first block tells which tensors a block of this architecture has.
    matches = map(_BLOCK.fullmatch, sources_by_name)
    suffixes = {match[2] for match in matches if match and match[1] == "0"}
    needed = {"token_embd.weight", "output_norm.weight"}
    for block in range(config.num_hidden_layers):
        needed |= {f"blk.{block}.{suffix}" for suffix in suffixes}
    if not config.tie_word_embeddings:
        needed.add("output.weight")
    if missing := sorted(needed - sources_by_name.keys(), key=_natural):
        raise ModelError(
            f"the checkpoint lacks what becomes {missing[0]!r}; config.json asks"
            " for it",
        )
    experts = getattr(config, "num_local_experts", None) or 0
    for name, parts in sources_by_name.items():
        # No index may be missing or repeated.
        if "_exps." in name and [index for index, _ in parts] != list(range(experts)):
            raise ModelError(
                f"the checkpoint holds {len(parts)} experts for {name!r}; config.json"
                f" says {experts}",
            )
        if len({stored.shape for _, stored in parts}) > 1:
            raise ModelError(f"the experts of {name!r} differ in shape")


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders block 10 after block 9."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]
